"""A batch comes in on all ranks or on none."""

from types import SimpleNamespace

import pytest
import torch

from penstock.errors import ConfigError, StepRefused
from penstock.execute.batch.admission import Admission
from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.local_batch import BatchCutter, StepRequest
from penstock.execute.batch.microbatch import ANY_KEYWORD
from penstock.execute.batch.needs import InputNeeds
from penstock.execute.batch.stream import Stream
from penstock.execute.control.agreement import Mode
from penstock.execute.control.collectives import Control
from tests.support.local_pipelines import error_of, on_ranks


def admission_of(wires, rule, needs):
    return Admission(Control(wires), BatchCutter(wires.rank, f"rank {wires.rank}", rule, needs))


def admit(wires, calls, *, keywords=frozenset(), keywords_of_all=frozenset({ANY_KEYWORD}), last_ranks=(), **rule):
    needs = InputNeeds(wires.rank == 0, wires.rank in last_ranks, keywords, keywords_of_all)
    admission = admission_of(wires, BatchRule(**{"num_microbatches": 2} | rule), needs)
    call = calls[wires.rank]
    return found_by(admission, call if isinstance(call, StepRequest) else StepRequest(*call))


def found_by(admission, call, **proposed):
    """What a rank knows of a batch that was admitted for training: its own part, and what all agree on."""
    agreed, batch = admission.admit(Mode.TRAIN, call, **proposed)
    return SimpleNamespace(agreed=agreed, microbatches=batch.microbatches, slices=batch.slices)


ROWS = torch.arange(6.0)
INPUTS_ONLY = (ROWS,), {}, None
TARGET_ONLY = (), {}, ROWS
NOTHING = (), {}, None


def test_what_a_caller_found_wrong_refuses_the_step_on_all_ranks_whatever_the_others_give():
    calls = [((ROWS,), {"scale": ROWS}, None), StepRequest(refusal=ConfigError("is a list", key="data"))]

    first, second = on_ranks(2, lambda wires: error_of(admit, wires, calls, keywords=frozenset({"scale"})))

    assert type(first) is type(second) is StepRefused
    assert str(first) == "rank 1 refuses the step: data: is a list"
    assert str(second) == "data: is a list"


@pytest.mark.parametrize("inputs", [INPUTS_ONLY, ((), {"tokens": ROWS}, None)], ids=["by place", "by keyword"])
def test_every_rank_knows_the_sizes_and_who_wants_outputs_and_has_the_parts_that_it_was_given(inputs):
    target = StepRequest(target=ROWS, return_outputs=True)

    first, middle, last = on_ranks(3, admit, [inputs, NOTHING, target])

    assert [batch.agreed.wanting_outputs for batch in (first, middle, last)] == [frozenset({2})] * 3
    assert [m.size for batch in (first, middle, last) for m in batch.microbatches] == [3] * 6
    found = [next(iter((*m.args, *m.kwargs.values()))).tolist() for m in first.microbatches]
    assert found == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert [m.args for m in middle.microbatches] == [(), ()]
    assert [m.target.tolist() for m in last.microbatches] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert first.agreed.signature == middle.agreed.signature == last.agreed.signature


def test_all_ranks_know_by_the_batch_whether_one_of_them_trains_other_parameters():
    def case(wires):
        admission = admission_of(wires, BatchRule(2), InputNeeds(inputs=True, target=False))
        steps = [(7, 8), (7, 8), (7, 9)]
        return [found_by(admission, StepRequest((ROWS,)), trained=pair[wires.rank]) for pair in steps]

    first, second = on_ranks(2, case)

    known, *others = [[(batch.agreed.signature, batch.agreed.trained) for batch in rank] for rank in (first, second)]
    assert known == others[0]
    for before, again, other in zip(*known, strict=True):
        assert before == again != other


def on_cpu(wires, call):
    """Admit a batch on ranks that hold both ends, and compute on the CPU."""
    needs = InputNeeds(inputs=True, target=True, device=torch.device("cpu"))
    return found_by(admission_of(wires, BatchRule(2), needs), call)


def test_a_batch_on_another_device_than_the_stages_is_refused_on_all_ranks():
    calls = [StepRequest((torch.zeros(6, 2, device="meta"),), target=ROWS), StepRequest((ROWS,), target=ROWS)]

    first, second = on_ranks(2, lambda wires: error_of(on_cpu, wires, calls[wires.rank]))

    assert str(first).startswith("tensors of the inputs are on meta, but this rank computes on cpu; move them first")
    assert str(second) == f"rank 0 refuses the step: {first}"


def test_some_of_a_batch_may_stay_where_its_layers_take_it():
    lengths = torch.zeros(6, device="meta")

    [batch] = on_ranks(1, lambda wires: on_cpu(wires, StepRequest((ROWS, lengths), target=ROWS)))
    [scalar] = on_ranks(1, lambda wires: on_cpu(wires, StepRequest((torch.zeros((), device="meta"), 3.0), target=ROWS)))

    assert [microbatch.size for microbatch in (*batch.microbatches, *scalar.microbatches)] == [3] * 4


@pytest.mark.parametrize(("num_rows", "num_microbatches"), [(5, 2), (6, 1)])
def test_an_object_of_other_rows_or_for_a_single_microbatch_is_admitted_whole(num_rows, num_microbatches):
    batch = SimpleNamespace(x=torch.zeros(num_rows, 2))
    calls = [((batch,), {}, None), TARGET_ONLY]

    first, _ = on_ranks(2, lambda wires: admit(wires, calls, last_ranks=[1], num_microbatches=num_microbatches))

    assert all(microbatch.args[0] is batch for microbatch in first.microbatches)


WIDE = torch.arange(12.0).reshape(2, 6)
BATCH, MASK = (torch.ones(4, 2),), {"mask": torch.ones(4)}
UNFIT = {
    "uneven inputs": ([((torch.arange(5),), {}, None), TARGET_ONLY], {}, "do not divide evenly"),
    "other rows": (
        [INPUTS_ONLY, ((), {}, torch.arange(8))],
        {},
        "sizes: rank 0 has [3, 3], rank 1 has [4, 4]. These are the rows",
    ),
    "no keywords for layers that take them": (
        [(BATCH, MASK, None), (BATCH, {}, None)],
        {"keywords": frozenset({"mask"})},
        "rank 0 was given keyword arguments, rank 1 was not",
    ),
    "no sequence": (
        [INPUTS_ONLY, NOTHING],
        {"num_slices": 2},
        "nothing in the batch has a dimension 1 to cut into 2 slices",
    ),
    "a target without a sequence": (
        [((WIDE,), {}, None), ((), {}, torch.arange(2.0))],
        {"num_slices": 2, "last_ranks": [1]},
        "has no dimension 1 to cut into slices, so every slice's loss would count all of it",
    ),
    "a stream and a whole batch of the same rows": (
        [((Stream([(ROWS, ROWS)] * 2),), {}, None), ((ROWS,), {}, ROWS)],
        {"last_ranks": [1]},
        "different shapes or types",
    ),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_batch_that_does_not_fit_is_refused_on_every_rank(name):
    calls, options, text = UNFIT[name]

    for error in on_ranks(2, lambda wires: error_of(admit, wires, calls, **options)):
        assert type(error) is StepRefused
        assert text in str(error)


def test_slices_and_their_lengths_reach_every_rank():
    calls = [((WIDE,), {}, None), ((), {}, WIDE), NOTHING]

    first, middle, last = on_ranks(3, lambda wires: admit(wires, calls, num_slices=4, allow_ragged=True))

    sizes = [(1, 2), (1, 2), (1, 1), (1, 1)]
    for batch in (first, middle, last):
        assert [[(m.size, m.length) for m in slices] for slices in batch.slices] == [sizes] * 2
    assert [m.args[0].tolist() for m in first.slices[1]] == [[[6.0, 7.0]], [[8.0, 9.0]], [[10.0]], [[11.0]]]
    assert [m.target.tolist() for m in middle.slices[0]] == [[[0.0, 1.0]], [[2.0, 3.0]], [[4.0]], [[5.0]]]
    assert first.agreed.signature == middle.agreed.signature == last.agreed.signature
