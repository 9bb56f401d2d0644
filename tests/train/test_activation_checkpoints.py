"""The tensors that layers keep for their backward."""

from collections import Counter

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import ConfigError
from penstock.execute.observing.workspaces import StorageMeter
from penstock.models import cross_entropy_loss
from penstock.train.activation_checkpoints import checkpoint_layer, kinds_of_layers, with_checkpointing
from tests.sizing.models import LENGTH, ROWS, Block, reported
from tests.support.reference import reference_step
from tests.train.local_ranks import on_small_pipelines, random_batch, small_layers


def test_a_word_is_for_all_stages_and_a_list_for_each():
    stages = [range(2), range(2, 3), range(3, 5)]

    assert kinds_of_layers("full", stages) == ["full"] * 5
    assert kinds_of_layers(["full", "none", "selective"], stages) == ["full", "full", "none", "selective", "selective"]
    with pytest.raises(ConfigError, match="2 entries for 3 stages"):
        kinds_of_layers(["full", "none"], stages)


def test_names_stay_and_layers_of_one_module_are_left_alone():
    layers = small_layers()

    for plain, built in zip(layers, with_checkpointing(layers, ["full"] * len(layers)), strict=True):
        module = built()
        assert [name for name, _ in module.named_parameters()] == [name for name, _ in plain().named_parameters()]
        assert ("forward" in vars(module)) is plain.name.startswith("blocks.")


class Products(TorchDispatchMode):
    """Counts matrix products and the elementwise operation of SwiGLU."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.counts[function.overloadpacket] += 1
        return function(*args, **kwargs or {})


def counts_of(kind):
    layers = small_layers()
    modules = [layer() for layer in with_checkpointing(layers, [kind] * len(layers))]
    tokens, target = random_batch(0, size=2)
    with Products() as products:
        result = reference_step(modules, (tokens,), {}, target, loss=cross_entropy_loss, num_microbatches=1)
    gradients = [parameter.grad for module in modules for parameter in module.parameters()]
    return products.counts, result.loss, gradients


def test_full_runs_forwards_twice_and_selective_only_what_is_cheap():
    (none, loss, gradients), *others = [counts_of(kind) for kind in ("none", "full", "selective")]
    product, swiglu = torch.ops.aten.mm, torch.ops.aten.silu

    (full, *_), (selective, *_) = others
    assert full[product] > none[product]
    assert selective[product] == none[product]
    assert full[swiglu] == selective[swiglu] == 2 * none[swiglu] > 0
    for _, other_loss, other_gradients in others:
        assert torch.equal(other_loss, loss)
        assert all(map(torch.equal, other_gradients, gradients))


@pytest.mark.parametrize("kind", ["none", "full", "selective"])
def test_a_memory_report_counts_all_that_a_block_keeps(kind):
    """Selective checkpointing keeps results where autograd does not know of them."""
    block, meter = checkpoint_layer(Block(), kind), StorageMeter()
    inputs = torch.randn(ROWS, LENGTH, 64, requires_grad=True)
    with meter.watching():
        output = block(inputs)
    kept_bytes = meter.num_bytes() + inputs.nbytes - output.nbytes

    layers = [torch.nn.Embedding(512, 64), block, torch.nn.Linear(64, 512)]
    layer_bytes = reported(layers, [1, 2], schedule="1f1b", loss=cross_entropy_loss)

    assert layer_bytes["activation_bytes"][1] == kept_bytes


def gradients_of(pipeline):
    tokens, target = random_batch(0)
    pipeline.step(tokens, target=target)
    return {name: parameter.grad for name, parameter in pipeline.named_parameters()}


@pytest.mark.feature("X52")
@pytest.mark.parametrize(
    "schedule", ["zbv", *(pytest.param(name, marks=pytest.mark.slow) for name in ("1f1b", "zb-h1"))]
)
def test_checkpointing_changes_no_bit_of_the_gradients_under_a_schedule(schedule):
    none, mixed = (
        on_small_pipelines(2, gradients_of, with_checkpointing(small_layers(), kinds), schedule=schedule)
        for kinds in (["none"] * 7, ["none", "full", "full", "selective", "selective", "none", "full"])
    )

    for expected, found in zip(none, mixed, strict=True):
        assert expected.keys() == found.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)
