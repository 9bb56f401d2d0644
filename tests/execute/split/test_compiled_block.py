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
from penstock.execute.split.wanted import wants_input_gradient, wants_weight_gradient
from penstock.execute.split.weight_graph import WeightGraph
from tests.execute.split.test_deferred_weights import begun
from tests.support.inductor import skip_without_inductor
from tests.support.local_pipelines import error_of, settle, values
from tests.support.one_stage import kept_by, run_input_part, run_weight_part

pytestmark = pytest.mark.usefixtures("nothing_stays_compiled")

ROWS, WIDTH, TOKENS = 6, 8, 20
MLP_NAMES = ["down.weight", "up.weight"]


class Mlp(nn.Module):
    """Two products, biases and a norm; a skip past them."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, features):
        return features + self.down(F.gelu(self.up(self.norm(features))))


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        heads = self.qkv(features).view(2, -1, 3, 2, WIDTH // 2).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.out(mixed.transpose(1, 2).reshape(-1, WIDTH))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Conv1d(1, 3, 3, padding=1), nn.Conv1d(3, 1, 3, padding=1)

    def forward(self, features):
        return self.second(F.gelu(self.first(features[:, None])))[:, 0]


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, features, weight):
        ctx.save_for_backward(features, weight)
        return features @ weight.T

    @staticmethod
    def backward(ctx, gradient):
        features, weight = ctx.saved_tensors
        return gradient @ weight, gradient.T @ features


class Custom(nn.Module):
    """A function of activations and a weight that computes both gradients."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, features):
        return Product.apply(features, self.weight).tanh()


class AskingProduct(Product):
    """Asks which half is wanted: both, where it is compiled."""

    @staticmethod
    def backward(ctx, gradient):
        features, weight = ctx.saved_tensors
        of_features = gradient @ weight if wants_input_gradient(ctx) else None
        return of_features, gradient.T @ features if wants_weight_gradient(ctx) else None


class Asking(Custom):
    def forward(self, features):
        return AskingProduct.apply(features, self.weight).tanh()


class Tied(nn.Module):
    """One matrix in two products."""

    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.other.weight = self.one.weight

    def forward(self, features):
        return self.other(self.one(features).tanh())


class Normalized(nn.Module):
    """A weight that is made of two parameters within the block."""

    def __init__(self):
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, features):
        return self.linear(features)


class Embedded(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.linear = nn.Embedding(TOKENS, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens):
        return self.linear(self.table(tokens))


class Table(nn.Module):
    """Leads to nothing but its weight."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(TOKENS, WIDTH)

    def forward(self, tokens):
        return self.table(tokens)


class Counting(nn.Module):
    """Changes a buffer in its forward."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, features):
        self.total.add_(features.detach().sum(0))
        return self.linear(features)


class Checkpointed(nn.Module):
    """Runs a compiled block again in the backward."""

    def __init__(self):
        super().__init__()
        self.block = Mlp()

    def forward(self, features):
        return checkpoint(self.block, features, use_reentrant=False)


class Recomputing(nn.Module):
    """Runs a part of itself again, which the compiler sees."""

    def __init__(self):
        super().__init__()
        self.block, self.linear = Mlp(), nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        return self.linear(checkpoint(self.block, features, use_reentrant=False))


class Casting(Mlp):
    """Computes in another type than its weights have."""

    def forward(self, features):
        with torch.autocast("cpu", torch.bfloat16):
            return super().forward(features).float()


class Looking(Mlp):
    """Breaks the graph in two, each of which is a block by itself."""

    def forward(self, features):
        features = super().forward(features)
        torch._dynamo.graph_break()
        return super().forward(features)


WAITING = {
    Mlp: MLP_NAMES,
    Attention: ["out.weight", "qkv.weight"],
    Convolutions: ["first.bias", "first.weight", "second.bias", "second.weight"],
    Custom: ["weight"],
    Asking: ["weight"],
    Tied: ["one.weight"],
    Normalized: ["linear.parametrizations.weight.original0", "linear.parametrizations.weight.original1"],
    Embedded: ["linear.weight", "table.weight"],
    Table: ["table.weight"],
    Counting: ["linear.weight"],
    Recomputing: ["block.down.weight", "block.up.weight", "linear.weight"],
    Casting: MLP_NAMES,
    Looking: MLP_NAMES,
    Checkpointed: ["block.down.weight", "block.up.weight"],
}
SLOW_AS_WELL = (Attention, Asking, Counting, Recomputing, Looking)
"""Those whose products, functions and graphs are like those of a quicker one."""
BACKENDS = [
    pytest.param(aot_eager, id="aot_eager"),
    pytest.param(penstock, id="penstock", marks=pytest.mark.slow),
]


def compiled(make, backend):
    layer = settle(make(), 0)
    (layer.block if make is Checkpointed else layer).compile(backend=backend)
    return layer


def inputs_of(layer, rows=ROWS):
    if isinstance(layer, Embedded | Table):
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
    "make", [pytest.param(make, marks=[pytest.mark.slow] * (make in SLOW_AS_WELL)) for make in WAITING]
)
def test_both_parts_together_are_the_whole_backward_bit_for_bit(make, backend):
    layer = compiled(make, backend)
    wanted = whole(layer)

    found, waited = parts(layer)

    assert same(found, wanted)
    assert waited == WAITING[make]


@pytest.mark.parametrize(
    ("backend", "name"),
    [(aot_eager, "aot_eager"), pytest.param(penstock, "inductor", marks=pytest.mark.slow)],
)
def test_a_whole_backward_is_that_of_torchs_backend_bit_for_bit(backend, name):
    if name == "inductor":
        skip_without_inductor()
    assert same(whole(compiled(Mlp, backend)), whole(compiled(Mlp, name)))


def test_layers_of_another_backend_are_not_split():
    layer = compiled(Mlp, "aot_eager")
    wanted = whole(layer)

    found, waited = parts(layer)

    assert same(found, wanted)
    assert waited == []


def test_frozen_weights_and_other_shapes_have_halves_of_their_own():
    layer = compiled(Mlp, aot_eager)
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
    layer = compiled(Mlp, aot_eager)
    wanted = whole(layer)
    layer.zero_grad()
    results = [begun(layer, inputs_of(layer)) for _ in range(2)]
    for outputs, deferred in results:
        run_input(outputs, deferred)
    for _, deferred in results:
        run_weight_part(deferred)

    assert all(torch.equal(each, 2 * wanted[name]) for name, each in gradients(layer).items())


def test_what_w_needs_is_told_and_freed():
    layer = compiled(Mlp, aot_eager)
    deferred = run_input(*begun(layer, inputs_of(layer)))
    (block,) = deferred.entries

    sizes = sorted(each.numel() for each in kept_by(deferred))
    run_weight_part(deferred)

    # of both products the activations and the gradient of the output
    assert sizes == [ROWS * WIDTH] * 2 + [2 * ROWS * WIDTH] * 2
    assert isinstance(block, CompiledBlock)
    assert (block.held_tensors, block.node, kept_by(deferred)) == ([], None, [])


def test_w_computes_in_the_types_of_the_forward_whatever_is_cast_around_it():
    layer = compiled(Mlp, aot_eager)
    wanted = whole(layer)
    layer.zero_grad()
    deferred = run_input(*begun(layer, inputs_of(layer)))
    with torch.autocast("cpu", torch.bfloat16):
        run_weight_part(deferred)

    assert all(torch.equal(each, wanted[name]) for name, each in gradients(layer).items())


def test_what_w_needs_must_not_be_changed_in_place():
    layer = compiled(Mlp, aot_eager)
    deferred = run_input(*begun(layer, inputs_of(layer)))
    kept_by(deferred)[0].add_(1)

    error = error_of(run_weight_part, deferred)

    assert isinstance(error, PipelineError)
    assert "was changed in place between I and W" in str(error)


def test_a_backward_that_cannot_be_cut_stays_whole_and_says_so_once(told_warnings):
    class Drawing(torch.autograd.Function):
        @staticmethod
        def forward(ctx, features):
            return features.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient + 0 * torch.rand_like(gradient)

    class Layer(Custom):
        def forward(self, features):
            return Drawing.apply(super().forward(features))

    layer = compiled(Layer, aot_eager)
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
    layer = compiled(Mlp, aot_eager)
    first, second = parts(layer), parts(layer)

    (told,) = told_warnings()
    assert "its halves do not compile (NotImplementedError: no kernel for this)" in told
    assert (first[1], second[1]) == (MLP_NAMES, [])
    assert all(same(found, whole(layer)) for found, _ in (first, second))


def test_an_output_that_takes_no_part_has_no_gradients():
    layer = compiled(Mlp, aot_eager)
    outputs = layer(inputs_of(layer))
    block = find_compiled_block(outputs.grad_fn, WeightGraph())

    block.watch(found := [])
    block.release()

    assert found == []
    assert same({"inputs": None, **gradients(layer)}, {"inputs": None, **dict.fromkeys(gradients(layer))})


def test_a_copy_of_a_layer_shares_the_halves():
    layer = compiled(Mlp, aot_eager)
    other = copy.deepcopy(layer)
    other.compile(backend=aot_eager)

    one, two = (find_compiled_block(each(inputs_of(each)).grad_fn, WeightGraph()) for each in (layer, other))

    assert one.halves is two.halves
