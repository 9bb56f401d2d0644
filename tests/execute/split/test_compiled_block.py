"""The weight gradients of compiled blocks wait for W, and both parts give what the unsplit backward gives, in bits."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from penstock.errors import PipelineError
from penstock.execute.backend import aot_eager, penstock
from penstock.execute.split.compiled_block import BlockBackward, CompiledBlock, find_compiled_block
from penstock.execute.split.weight_graph import WeightGraph
from tests.execute.split.test_deferred_weights import begun
from tests.support.inductor import skip_without_inductor
from tests.support.local_pipelines import settle, values
from tests.support.one_stage import kept_by, run_input_part, run_weight_part
from tests.support.using import AskingProduct, Product, Using, function_of

pytestmark = pytest.mark.usefixtures("nothing_stays_compiled")

ROWS, WIDTH, TOKENS = 6, 8, 20
MLP_NAMES = ["down.weight", "up.weight"]
BLOCK_NAMES = ["block.down.weight", "block.up.weight"]


class Mlp(nn.Module):
    """Two products, biases and a norm; a skip past them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, features):
        return features + self.down(F.gelu(self.up(self.norm(features))))


def attention(self, features):
    heads = self.qkv(features).view(2, -1, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
    mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
    return self.out(mixed.transpose(1, 2).reshape(-1, WIDTH))


def counting(self, features):
    """Change a buffer in a forward."""
    self.total.add_(features.detach().sum(0))
    return self.linear(features)


def cast(self, features):
    """Compute in another type than the weights have."""
    with torch.autocast("cpu", torch.bfloat16):
        return self.block(features).float()


def looking(self, features):
    """Break the graph in two, each of which is a block by itself."""
    features = self.block(features)
    torch._dynamo.graph_break()
    return self.block(features)


def product_of(function):
    """Return a layer that calls a function of activations and a weight which computes both gradients."""
    weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))
    return Using(lambda self, x: function.apply(x, self.weight).tanh(), weight=weight)


def linear(num_features=WIDTH):
    return nn.Linear(WIDTH, num_features)


def convolutions():
    first, second = nn.Conv1d(1, 3, 3, padding=1), nn.Conv1d(3, 1, 3, padding=1)
    return Using(lambda self, x: self.second(F.gelu(self.first(x[:, None])))[:, 0], first=first, second=second)


def tied():
    """Return a layer with one matrix in two products."""
    one, other = linear(), linear()
    other.weight = one.weight
    return Using(lambda self, x: self.other(self.one(x).tanh()), one=one, other=other)


def again(block, features):
    return checkpoint(block, features, use_reentrant=False)


LAYERS = {
    "mlp": (Mlp, MLP_NAMES),
    "attention": (lambda: Using(attention, qkv=linear(3 * WIDTH), out=linear()), ["out.weight", "qkv.weight"]),
    "convolutions": (convolutions, ["first.bias", "first.weight", "second.bias", "second.weight"]),
    "custom": (lambda: product_of(Product), ["weight"]),
    "asking": (lambda: product_of(AskingProduct), ["weight"]),
    "tied": (tied, ["one.weight"]),
    "a weight made of two parameters": (
        lambda: Using(lambda self, x: self.linear(x), linear=parametrizations.weight_norm(linear())),
        ["linear.parametrizations.weight.original0", "linear.parametrizations.weight.original1"],
    ),
    "embedded": (
        lambda: Using(lambda self, x: self.linear(self.table(x)), table=nn.Embedding(TOKENS, WIDTH), linear=linear()),
        ["linear.weight", "table.weight"],
    ),
    "nothing but a table": (
        lambda: Using(lambda self, x: self.table(x), table=nn.Embedding(TOKENS, WIDTH)),
        ["table.weight"],
    ),
    "counting": (lambda: Using(counting, linear=linear(), total=nn.Buffer(torch.zeros(WIDTH))), ["linear.weight"]),
    "a part that runs again, which the compiler sees": (
        lambda: Using(lambda self, x: self.linear(again(self.block, x)), block=Mlp(), linear=linear()),
        [*BLOCK_NAMES, "linear.weight"],
    ),
    "cast": (lambda: Using(cast, block=Mlp()), BLOCK_NAMES),
    "looking": (lambda: Using(looking, block=Mlp()), BLOCK_NAMES),
    "a compiled block that runs again": (
        lambda: Using(lambda self, x: again(self.compiled, x), compiled=Mlp()),
        ["compiled.down.weight", "compiled.up.weight"],
    ),
}
"""By what is special of a layer: what makes it, and the names of the weights that wait."""
SLOW_AS_WELL = ("attention", "asking", "counting", "a part that runs again, which the compiler sees", "looking")
BACKENDS = [pytest.param(aot_eager, id="aot_eager"), pytest.param(penstock, id="penstock", marks=pytest.mark.slow)]


def compiled(name, backend):
    layer = settle(LAYERS[name][0](), 0)
    getattr(layer, "compiled", layer).compile(backend=backend)
    return layer


def inputs_of(layer, rows=ROWS):
    if hasattr(layer, "table"):
        return torch.arange(rows) % TOKENS
    return values(1, rows, WIDTH).requires_grad_()


def run_input(outputs, deferred):
    """Run I of a backward; return what it leaves for W."""
    run_input_part(deferred, [get_gradient_edge(outputs)], [values(2, *outputs.shape)])
    return deferred


def gradients(layer):
    return {name: None if each.grad is None else each.grad.clone() for name, each in layer.named_parameters()}


def whole(layer, rows=ROWS):
    """Return the gradients of an unsplit backward."""
    layer.zero_grad()
    inputs = inputs_of(layer, rows)
    outputs = layer(inputs)
    outputs.backward(values(2, *outputs.shape))
    return {"inputs": inputs.grad, **gradients(layer)}


def parts(layer, rows=ROWS):
    """Return the gradients of both parts together, and the names of those that waited."""
    layer.zero_grad()
    inputs = inputs_of(layer, rows)
    deferred = run_input(*begun(layer, inputs))
    early = gradients(layer)
    run_weight_part(deferred)
    found = gradients(layer)
    return {"inputs": inputs.grad, **found}, sorted(name for name in found if early[name] is None is not found[name])


def same(one, other):
    assert one.keys() == other.keys()
    return all(each is other[name] or torch.equal(each, other[name]) for name, each in one.items())


@pytest.mark.feature("X52")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW_AS_WELL)) for name in LAYERS]
)
def test_both_parts_together_are_the_whole_backward_bit_for_bit(name, backend):
    layer = compiled(name, backend)
    wanted = whole(layer)

    found, waited = parts(layer)

    assert same(found, wanted)
    assert waited == LAYERS[name][1]


@pytest.mark.parametrize(
    ("backend", "name"), [(aot_eager, "aot_eager"), pytest.param(penstock, "inductor", marks=pytest.mark.slow)]
)
def test_a_whole_backward_is_that_of_torchs_backend_bit_for_bit(backend, name):
    if name == "inductor":
        skip_without_inductor()
    assert same(whole(compiled("mlp", backend)), whole(compiled("mlp", name)))


def test_layers_of_another_backend_are_not_split():
    layer = compiled("mlp", "aot_eager")
    wanted = whole(layer)

    found, waited = parts(layer)

    assert (same(found, wanted), waited) == (True, [])


def test_frozen_weights_and_other_shapes_have_halves_of_their_own():
    layer = compiled("mlp", aot_eager)
    assert parts(layer)[1] == MLP_NAMES

    layer.up.weight.requires_grad_(False)
    found, waited = parts(layer)
    assert same(found, whole(layer))
    assert waited == ["down.weight"]

    for rows in (ROWS + 1, ROWS + 2, 2):  # from the second one on, the rows are a symbol
        found, waited = parts(layer, rows)
        assert same(found, whole(layer, rows))
        assert waited == ["down.weight"]


def test_several_forwards_wait_at_once():
    layer = compiled("mlp", aot_eager)
    wanted = whole(layer)
    layer.zero_grad()
    results = [begun(layer, inputs_of(layer)) for _ in range(2)]
    for outputs, deferred in results:
        run_input(outputs, deferred)
    for _, deferred in results:
        run_weight_part(deferred)

    assert all(torch.equal(each, 2 * wanted[name]) for name, each in gradients(layer).items())


def test_what_w_needs_is_told_and_freed():
    layer = compiled("mlp", aot_eager)
    deferred = run_input(*begun(layer, inputs_of(layer)))
    (block,) = deferred.entries

    sizes = sorted(each.numel() for each in kept_by(deferred))
    run_weight_part(deferred)

    # of both products the activations and the gradient of the output
    assert sizes == [ROWS * WIDTH] * 2 + [2 * ROWS * WIDTH] * 2
    assert isinstance(block, CompiledBlock)
    assert (block.held_tensors, block.node, kept_by(deferred)) == ([], None, [])


def test_w_computes_in_the_types_of_the_forward_whatever_is_cast_around_it():
    layer = compiled("mlp", aot_eager)
    wanted = whole(layer)
    layer.zero_grad()
    deferred = run_input(*begun(layer, inputs_of(layer)))
    with torch.autocast("cpu", torch.bfloat16):
        run_weight_part(deferred)

    assert all(torch.equal(each, wanted[name]) for name, each in gradients(layer).items())


def test_what_w_needs_must_not_be_changed_in_place():
    layer = compiled("mlp", aot_eager)
    deferred = run_input(*begun(layer, inputs_of(layer)))
    kept_by(deferred)[0].add_(1)

    with pytest.raises(PipelineError, match="was changed in place between I and W"):
        run_weight_part(deferred)


def test_a_backward_that_cannot_be_cut_stays_whole_and_says_so_once(told_warnings):
    drawing = function_of(
        lambda ctx, features: features.clone(), lambda ctx, gradient: gradient + 0 * torch.rand_like(gradient)
    )
    layer = Using(lambda self, x: drawing.apply(self.product(x)), product=settle(product_of(Product), 0))
    layer.compile(backend=aot_eager)
    (found, waited), _ = parts(layer), parts(layer)

    (told,) = told_warnings()
    assert "a compiled block's backward is not split" in told
    assert waited == []
    assert same(found, whole(layer))


def test_halves_that_do_not_compile_are_run_as_the_whole(monkeypatch, told_warnings):
    compile_half = BlockBackward._compile

    def failing(block, half):
        if half.extras:
            raise NotImplementedError("no kernel for this")
        return compile_half(block, half)

    monkeypatch.setattr(BlockBackward, "_compile", failing)
    layer = compiled("mlp", aot_eager)
    first, second = parts(layer), parts(layer)

    (told,) = told_warnings()
    assert "its halves do not compile (NotImplementedError: no kernel for this)" in told
    assert (first[1], second[1]) == (MLP_NAMES, [])
    assert all(same(found, whole(layer)) for found, _ in (first, second))


def test_an_output_that_takes_no_part_has_no_gradients():
    layer = compiled("mlp", aot_eager)
    outputs = layer(inputs_of(layer))
    block = find_compiled_block(outputs.grad_fn, WeightGraph())

    block.watch(found := [])
    block.release()

    assert found == []
    assert same({"inputs": None, **gradients(layer)}, {"inputs": None, **dict.fromkeys(gradients(layer))})


def test_a_copy_of_a_layer_shares_the_halves():
    layer = compiled("mlp", aot_eager)
    other = copy.deepcopy(layer)
    other.compile(backend=aot_eager)

    one, two = (find_compiled_block(each(inputs_of(each)).grad_fn, WeightGraph()) for each in (layer, other))

    assert one.halves is two.halves
