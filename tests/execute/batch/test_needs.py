"""What a rank's stages take of a batch, and where it may be."""

from types import SimpleNamespace

import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.batch.microbatch import ANY_KEYWORD, Microbatch
from penstock.execute.batch.needs import InputNeeds, batch_binding
from penstock.placement import Placement

GPU = torch.device("cuda", 0)
ON_HOST, ELSEWHERE, NUMBER = torch.zeros(2), torch.zeros(2, device="meta"), torch.zeros(())


@pytest.mark.feature("A5", "G1")
def test_a_rank_wants_what_its_stages_take():
    placement = Placement.bidirectional(2)

    mask, cpu = frozenset({"mask"}), torch.device("cpu")

    def find(rank, placement, *, has_loss):
        keywords = dict.fromkeys(placement.stages_of_rank[rank], mask if rank else frozenset())
        return InputNeeds.of(keywords, placement, mask, cpu, has_loss=has_loss)

    assert find(0, placement, has_loss=True) == InputNeeds(True, True, frozenset(), mask, cpu)
    assert find(1, placement, has_loss=False) == InputNeeds(True, False, mask, mask, cpu)
    assert find(0, Placement.line(2), has_loss=True) == InputNeeds(True, False, frozenset(), mask, cpu)


class Signature:
    """Takes words on the first stage, and a mask on every one."""

    parameters = ("words", "mask")

    def bind(self, args, kwargs, *, is_first):
        return (is_first, *args), dict(kwargs)


def test_a_batch_is_bound_as_the_model_of_the_first_layer_takes_it():
    layer = SimpleNamespace(batch_signature=Signature())
    needs = InputNeeds(True, False, keywords_of_all=frozenset({"scale"}), binding=batch_binding([layer, object()]))

    assert needs.bind((1,), {"mask": 2}) == ((True, 1), {"mask": 2})
    assert needs.bind((), {}) == ((), {}), "a rank that needs nothing passes nothing"
    assert needs.known_keywords == {"scale", "words", "mask"}
    assert batch_binding([object(), layer]) is batch_binding([]) is None
    assert InputNeeds(True, False).bind([1], {"mask": 2}) == ((1,), {"mask": 2})


@pytest.mark.parametrize("device", ["cuda:0", "cuda"])
@pytest.mark.parametrize(
    ("args", "target", "what"), [((ELSEWHERE, NUMBER), ON_HOST, "inputs"), ((ON_HOST,), [ON_HOST, ELSEWHERE], "target")]
)
def test_a_batch_may_be_on_the_host_of_an_accelerator_and_on_no_other_device(device, args, target, what):
    needs = InputNeeds(True, True, device=torch.device(device))

    needs.require_device((ON_HOST, 3.0), {"labels": ON_HOST})
    with pytest.raises(PipelineError, match=f"tensors of the {what} are on .*meta, but this rank computes on {device}"):
        needs.require_device(args, target)
    InputNeeds(False, False, device=GPU).require_device(args, target)
    InputNeeds(True, True).require_device(args, target)


def found(microbatch, *, inputs=True, target=True, keywords=frozenset({"mask"}), device=GPU):
    """Name the tensors that have to go to the device."""
    needs = InputNeeds(inputs, target, keywords, device=device)
    args, kwargs, labels = microbatch
    own = needs.on_host(Microbatch(0, args, kwargs, labels, 2))
    named = {"args": args, "target": [labels], **{name: [each] for name, each in kwargs.items()}}
    return [name for name, values in named.items() if any(each is tensor for each in values for tensor in own)]


def host():
    return torch.zeros(2)


def test_a_rank_has_to_copy_what_its_stages_take_and_nothing_else():
    batch = (host(), "text"), {"mask": host(), "lengths": host()}, host()

    assert found(batch) == ["args", "target", "mask"]
    assert found(batch, inputs=False) == ["target", "mask"]
    assert found(batch, target=False, keywords=frozenset()) == ["args"]
    assert found(batch, keywords=frozenset({ANY_KEYWORD})) == ["args", "target", "mask", "lengths"]
    assert found(batch, device=torch.device("cpu")) == found(batch, device=None) == []


def test_numbers_go_with_inputs_that_are_copied_and_what_is_beside_those_on_the_device_stays_on_the_host():
    assert found(((host(), NUMBER), {"mask": torch.ones(())}, 3)) == ["args", "mask"]
    assert found(((NUMBER,), {}, 3)) == []
    assert found(((ELSEWHERE, host()), {"mask": host()}, host())) == ["target"]
    assert found(((ELSEWHERE,), {"mask": host()}, None)) == []
