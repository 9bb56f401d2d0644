"""A forward leaves the gradients of its weights for later: each once, complete, and holding only what it needs."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn
from torch.autograd.graph import Node, save_on_cpu
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts
from torch.utils.flop_counter import FlopCounterMode

from penstock.execute.lost_device import living_instances
from penstock.execute.split.deferred_weights import DeferredWeights
from penstock.execute.split.graph_search import Survey
from penstock.execute.split.planner import SplitPlanner
from penstock.execute.split.products import Product
from tests.support.local_pipelines import WIDTH, settle, values
from tests.support.one_stage import Again, kept_by, run_input_part, run_weight_part
from tests.support.using import Product as CustomProduct
from tests.support.using import Using, between, weights


def made(self, hidden):
    """Compute the weights of two products from parameters, and scale what they give."""
    product = F.linear(hidden, torch.tanh(self.first) * 2)
    return F.linear(product, (self.second + 1).t()) * self.vector


def learned(self, hidden):
    """Add the same to everything: a learned vector through a layer."""
    return self.layer(hidden) + torch.relu_(self.layer(self.vector[None]))


def scores(self, hidden):
    """Multiply what one projection gives by itself."""
    projected = F.linear(hidden, self.first)
    return projected @ projected.transpose(1, 2) @ hidden


def moved_away(self, hidden):
    with save_on_cpu():
        return self.layers(hidden)


def nested(is_outer_reentrant):
    """Return layers of which two are recomputed within a recomputation of all, each in a way of its own."""

    def inner(self, hidden):
        return self.two(torch.tanh(self.one(hidden)))

    def outer(self, hidden):
        again = checkpoint(inner, self, hidden, use_reentrant=not is_outer_reentrant)
        return self.three(torch.tanh(again))

    return Using(
        lambda self, x: checkpoint(outer, self, x, use_reentrant=is_outer_reentrant),
        **{name: linear() for name in ("one", "two", "three")},
    )


def attend(self, hidden):
    scores = self.query(hidden) @ self.key(hidden).transpose(1, 2)
    return self.output(scores.softmax(-1) @ self.value(hidden)) + hidden


def attention():
    """Return self-attention from three projections of one input."""
    return Using(attend, **{name: linear() for name in ("query", "key", "value", "output")})


class Recomputed(nn.Module):
    """Keeps nothing of its layers, and counts how often they run."""

    def __init__(self, *layers, use_reentrant=False):
        super().__init__()
        self.layers, self.use_reentrant, self.num_runs = nn.Sequential(*layers), use_reentrant, 0

    def forward(self, hidden):
        return checkpoint(self.run, hidden, use_reentrant=self.use_reentrant)

    def run(self, hidden):
        self.num_runs += 1
        return self.layers(hidden)


class Selective(nn.Sequential):
    """Keeps what its matrix products return, and recomputes the rest."""

    def forward(self, hidden):
        contexts = partial(
            create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
        )
        return checkpoint(super().forward, hidden, use_reentrant=False, context_fn=contexts)


def force(self, hidden):
    """Add the gradient of an energy, taken within the forward, so that it is differentiated twice."""
    with torch.enable_grad():
        place = hidden if hidden.requires_grad else hidden.detach().requires_grad_()
        energy = self.second(torch.tanh(self.first(place)))
        (gradient,) = torch.autograd.grad(energy.sum(), place, create_graph=self.create_graph, retain_graph=True)
    return energy * hidden + gradient


def force_layer(create_graph=True):
    return Using(force, first=linear(), second=linear(WIDTH, 1), create_graph=create_graph)


def linear(*sizes):
    return nn.Linear(*(sizes or (WIDTH, WIDTH)))


def partly_frozen():
    layers = nn.Sequential(linear(), nn.Tanh(), linear())
    layers[0].weight.requires_grad_(False)
    layers[2].bias.requires_grad_(False)
    return layers


HIDDEN = {
    "linear": lambda: nn.Sequential(linear(), nn.GELU(), linear()),
    "in place": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear()),
    "norms": lambda: nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.RMSNorm(WIDTH)),
    "attention": attention,
    "scores of one projection": lambda: weights(scores),
    "torch's own attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True),
    "frozen": partly_frozen,
    "all frozen": lambda: linear().requires_grad_(False),
    "low rank": lambda: Using(
        lambda self, x: self.frozen(x) + self.up(self.down(x)),
        frozen=linear().requires_grad_(False),
        down=nn.Linear(WIDTH, 2, bias=False),
        up=nn.Linear(2, WIDTH, bias=False),
    ),
    "used twice": lambda: nn.Sequential(shared := linear(), nn.Tanh(), shared),
    "shared": lambda: weights(lambda self, x: torch.tanh(x @ self.first) @ self.first.t()),
    "made": lambda: weights(made),
    "a learned first input": lambda: weights(learned, layer=linear()),
    "convolutions": lambda: nn.Sequential(
        nn.Unflatten(-1, (2, 3)),
        nn.Conv2d(3, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 4, 2, bias=False, groups=2),
    ),
    "experts": lambda: Using(
        lambda self, x: torch.bmm(x.flatten(0, 1).expand(3, -1, -1), self.experts).mean(0),
        experts=nn.Parameter(torch.empty(3, WIDTH, WIDTH)),
    ),
    "custom": lambda: between(lambda self, x: CustomProduct.apply(x, self.first)),
    "recurrent": lambda: nn.Sequential(linear(), Using(lambda self, x: self.gru(x)[0], gru=nn.GRU(WIDTH, WIDTH))),
    "recomputed": lambda: nn.Sequential(linear(), Recomputed(linear(), nn.Tanh(), linear()), Recomputed(attention())),
    "recomputed within": lambda: Recomputed(linear(), Recomputed(linear(), nn.Tanh()), weights(made)),
    "moved away": lambda: nn.Sequential(
        Using(moved_away, layers=nn.Sequential(linear(), nn.Tanh(), linear())), linear()
    ),
    "without bias": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(inplace=True), linear()),
    "in place, kept by selective checkpointing": lambda: Selective(
        nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(inplace=True), linear(), nn.Tanh()
    ),
    "a sparse matrix": lambda: weights(lambda self, x: (x.flatten(0, -2) @ self.first.to_sparse()).view_as(x)),
    "a gradient within": lambda: nn.Sequential(linear(), force_layer()),
    "a gradient within, used at once": lambda: nn.Sequential(linear(), force_layer(create_graph=False)),
    "a gradient within, recomputed": lambda: Recomputed(linear(), force_layer()),
    "a gradient within, recomputed, used at once": lambda: Recomputed(linear(), force_layer(create_graph=False)),
    "a gradient within, recomputed in an older way": lambda: Recomputed(linear(), force_layer(), use_reentrant=True),
    "a gradient within, in an older way, used at once": lambda: Recomputed(
        linear(), force_layer(create_graph=False), use_reentrant=True
    ),
}


METHODS = {
    "matrices": lambda self, x: torch.tanh(x @ self.first) @ self.second,
    "matrices, then a function": lambda self, x: torch.tanh(torch.tanh(x @ self.first) @ self.second),
    "linear": lambda self, x: F.linear(torch.tanh(F.linear(x, self.second)), self.first),
    "one matrix twice": lambda self, x: F.linear(torch.tanh(x @ self.first), self.first) + self.second[0],
    "a transposed matrix": lambda self, x: F.linear(x, self.first.t()) @ (self.second + 1),
}


def recomputed_method(run):
    """Return a layer that recomputes a method which uses the layer's own matrices."""
    return weights(lambda self, x: x + checkpoint(run, self, x, use_reentrant=False))


def turned(self, hidden):
    """Give a layer rows that have to be copied first."""
    return self.layer(hidden.transpose(0, -2)).transpose(0, -2)


def two_ways(self, hidden):
    """Recompute the same layers by torch's checkpointing and by a function of the user's own."""
    return Again.apply(self.layers, checkpoint(self.layers, hidden * 1, use_reentrant=False))


RECOMPUTED_OTHERWISE = {
    **{f"a method: {name}": partial(recomputed_method, run) for name, run in METHODS.items()},
    "by a function of one's own too": lambda: Using(two_ways, layers=nn.Sequential(linear(), nn.Tanh(), linear())),
    "selectively": lambda: Selective(linear(), nn.Tanh(), linear(), nn.Tanh()),
    "selectively, a made weight": lambda: Selective(weight_norm(linear()), nn.Tanh(), linear(), nn.Tanh()),
    "selectively, copied rows": lambda: Selective(Using(turned, layer=linear()), nn.Tanh(), linear(), nn.Tanh()),
    "under vmap": lambda: Using(
        lambda self, x: x + checkpoint(torch.vmap(self.layer), x, use_reentrant=False), layer=linear()
    ),
    "nested, reentrant outside": partial(nested, True),
    "nested, reentrant inside": partial(nested, False),
}


def any_size():
    """A plan by which no weight is too small."""
    return SplitPlanner(small=0)


def begun(module, inputs, plan=None):
    """Run a module forward in a new step; return its output, and what defers weight gradients."""
    plan = plan or any_size()
    plan.begin_step(list(module.parameters()))
    deferred = plan.start(inputs.numel())
    return module(inputs), deferred


def left_by_input_part(module, inputs, plan=None):
    """Run a forward, and I of its backward; return what that leaves for W."""
    output, deferred = begun(module, inputs, plan)
    edge = torch.autograd.graph.get_gradient_edge(output)
    run_input_part(deferred, [edge], [torch.ones_like(output)])
    return deferred


def two_parts(module, inputs, plan=None):
    """Run a module forward; return the two parts of its backward."""
    output, deferred = begun(module, inputs, plan)
    gradient = values(9, *output.shape, dtype=output.dtype)
    root = torch.autograd.graph.get_gradient_edge(output)
    return partial(run_input_part, deferred, [root], [gradient]), partial(run_weight_part, deferred)


def in_two_parts(module, inputs, plan=None):
    seen = []
    watch = module.register_forward_hook(lambda *args: seen.append(args[-1].detach()))
    run_input, run_weight = two_parts(module, inputs, plan)
    watch.remove()
    run_input()
    run_weight()
    return seen[0]


def whole(module, inputs):
    output = module(inputs)
    output.backward(values(9, *output.shape, dtype=output.dtype))
    return output.detach()


def results(run, module, inputs, *plan, needs_gradient=True):
    inputs = inputs.clone().requires_grad_(needs_gradient and inputs.is_floating_point())
    return [run(module, inputs, *plan), inputs.grad, *(parameter.grad for parameter in module.parameters())]


def differing(module, other, inputs, plan, **options):
    """Run a step in two parts, and an unsplit one on `other`; return which results differ."""
    found = results(in_two_parts, module, inputs, plan, **options)
    expected = results(whole, other, inputs, **options)
    pairs = enumerate(zip(found, expected, strict=True))
    return [index for index, (one, two) in pairs if not (one is two is None or torch.equal(one, two))]


def assert_same(module, inputs, **options):
    other, plan = copy.deepcopy(module), any_size()
    for number in range(3):  # gradients add up, and the plan learns
        assert differing(module, other, inputs, plan, **options) == [], number


@pytest.mark.feature("X18", "X19")
@pytest.mark.parametrize("name", HIDDEN)
def test_both_parts_are_the_whole_backward_bit_for_bit(name):
    assert_same(settle(HIDDEN[name](), 1), values(1, 2, 3, WIDTH))


@pytest.mark.parametrize(
    "shape", [(WIDTH, WIDTH), (2, WIDTH, WIDTH), pytest.param((3, WIDTH), marks=pytest.mark.slow)], ids=str
)
@pytest.mark.parametrize("name", RECOMPUTED_OTHERWISE)
def test_layers_recomputed_in_other_ways_have_the_same_gradients(name, shape):
    """Where rows and columns are as many, tensors that are mistaken for each other have the right sizes."""
    layers = nn.Sequential(linear(), *(RECOMPUTED_OTHERWISE[name]() for _ in range(2)), linear())

    assert_same(settle(layers, 1).double(), values(1, *shape, dtype=torch.float64))


def test_layers_that_begin_to_be_recomputed_later_and_in_the_other_way_have_the_same_gradients():
    module = settle(nn.Sequential(linear(), Recomputed(linear(), nn.Tanh(), linear())), 1)
    other, plan, inputs = copy.deepcopy(module), any_size(), values(1, WIDTH, WIDTH)
    recomputed, run = module[1], module[1].run
    for is_recomputed, use_reentrant in [(False, False), (True, False), (True, True), (True, False)]:
        recomputed.forward = Recomputed.forward.__get__(recomputed) if is_recomputed else run
        recomputed.use_reentrant = use_reentrant

        for _ in range(2):
            assert differing(module, other, inputs, plan) == []


@pytest.mark.parametrize("recompute", [nn.Sequential, Recomputed])
def test_a_stage_without_differentiable_inputs_has_the_same_gradients(recompute):
    layers = recompute(nn.Embedding(5, WIDTH, padding_idx=1), nn.Tanh(), linear())

    assert_same(settle(layers, 1), torch.tensor([[1, 2, 4], [4, 0, 4]]))


@pytest.mark.parametrize(
    "name", ["in place", "without bias", "attention", "scores of one projection", "low rank", "recomputed"]
)
def test_the_batch_itself_needs_no_gradient(name):
    assert_same(settle(HIDDEN[name](), 1), values(1, 2, 3, WIDTH), needs_gradient=False)


def test_autocast_gives_the_same_gradients():
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(settle(nn.Sequential(linear(), nn.LayerNorm(WIDTH), attention()), 1), values(1, 2, 3, WIDTH))


def test_matrices_wait_for_the_weight_part_and_vectors_do_not():
    module = settle(nn.Sequential(nn.LayerNorm(WIDTH), linear(), attention()), 1)
    run_input, run_weight = two_parts(module, values(1, 2, 3, WIDTH).requires_grad_())

    run_input()

    late = {name for name, parameter in module.named_parameters() if parameter.grad is None}
    assert late == {name for name, parameter in module.named_parameters() if parameter.dim() > 1}
    run_weight()
    assert all(parameter.grad is not None for parameter in module.parameters())


@pytest.mark.parametrize("first", [linear, lambda: weight_norm(linear())])
def test_a_recomputation_takes_place_once_and_in_the_input_part(first):
    module = Recomputed(first(), nn.Tanh(), linear(), nn.Tanh(), linear())
    run_input, run_weight = two_parts(module, values(1, 3, WIDTH).requires_grad_())
    assert module.num_runs == 1

    run_input()
    assert module.num_runs == 2

    run_weight()
    assert module.num_runs == 2


def scaled(self, hidden):
    """Multiply by a function of a parameter, whose gradient I hands over."""
    return hidden * torch.tanh(self.first @ self.first)[0]


@pytest.mark.parametrize("recompute", [Recomputed, Selective])
def test_a_first_product_that_is_recomputed_is_read_in_its_turn(recompute):
    """No gradient leads on from it, and it would be computed again if it were handed over."""
    layers = recompute(nn.Linear(WIDTH, WIDTH, bias=False), nn.Tanh(), linear())
    module = settle(nn.Sequential(layers, weights(scaled)), 1)

    assert_same(module, values(1, 3, WIDTH), needs_gradient=False)
    if recompute is Recomputed:
        assert layers.num_runs == 6


@pytest.mark.parametrize(("use_reentrant", "num_products"), [(False, 5), (True, 6)])
def test_recomputed_layers_leave_their_weights_for_later_and_out_the_last_product(use_reentrant, num_products):
    """Two gradients of each, and one product again; in the older way of torch both are."""
    module = Recomputed(linear(), nn.Tanh(), linear(), use_reentrant=use_reentrant)
    run_input, run_weight = two_parts(module, values(1, 3, WIDTH).requires_grad_())

    with FlopCounterMode(display=False) as counter:
        run_input()
        assert [parameter.grad is None for parameter in module.parameters()] == [True, False, True, False]
        run_weight()

    assert counter.get_total_flops() == num_products * 2 * 3 * WIDTH**2


def test_hooks_of_a_weight_used_twice_see_one_gradient():
    module, seen = HIDDEN["used twice"](), []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
        parameter.register_hook(lambda gradient: seen.append(gradient.shape))

    in_two_parts(module, values(1, 3, WIDTH).requires_grad_())

    assert sorted(seen) == sorted([module[0].weight.shape, module[0].bias.shape] * 2)


def test_hooks_of_modules_and_activations_run_once_and_count():
    module, seen = settle(nn.Sequential(linear(), Using(doubling), linear()), 1), []
    other = copy.deepcopy(module)
    module[0].register_full_backward_hook(lambda *_: seen.append("module"))

    assert differing(module, other, values(1, 3, WIDTH), any_size()) == []
    assert seen == ["module"]


def doubling(self, hidden):
    """Double the gradient as it passes."""
    if hidden.requires_grad:
        hidden.register_hook(lambda gradient: gradient * 2)
    return hidden


def test_between_the_parts_only_what_the_weights_need_is_alive():
    module = nn.Sequential(linear(WIDTH, 5), nn.Tanh(), nn.Softmax(-1), nn.Linear(5, WIDTH), nn.Sigmoid())
    alive = [None] * len(module)
    for index, layer in enumerate(module):
        layer.register_forward_hook(lambda _, args, out, index=index: alive.__setitem__(index, storage(out)))
    run_input, run_weight = two_parts(module, values(1, 3, WIDTH).requires_grad_())
    assert [watched() is not None for watched in alive] == [False, True, True, False, True]

    run_input()
    assert [watched() is not None for watched in alive] == [False, False, True, False, False]

    run_weight()
    assert [watched() is not None for watched in alive] == [False] * 5


def test_what_is_kept_between_the_parts_is_told_and_no_parameter():
    module, inputs = nn.Sequential(linear(), weights(made)), values(1, 3, WIDTH).requires_grad_()
    output, deferred = begun(module, inputs)
    assert kept_by(deferred) == []

    run_input_part(deferred, [torch.autograd.graph.get_gradient_edge(output)], [torch.ones_like(output)])
    kept = kept_by(deferred)
    run_weight_part(deferred)

    assert sorted(tuple(each.shape) for each in kept) == [(3, WIDTH)] * 6  # activations and gradients of three products
    assert any(each.data_ptr() == inputs.data_ptr() for each in kept)
    assert kept_by(deferred) == []


def storage(tensor):
    """A reference to the memory of a tensor that does not keep it alive."""
    return weakref.ref(tensor.untyped_storage())


@pytest.mark.slow
def test_the_weight_part_lets_go_of_everything():
    module, inputs = nn.Sequential(linear(), Recomputed(linear())), values(1, 3, WIDTH).requires_grad_()
    plan = any_size()
    in_two_parts(module, inputs, plan)  # torch keeps frames of the first run, in which it imports what it needs
    gc.collect()
    gc.disable()
    try:
        before = {id(each) for each in kept_by_splits()}
        for _ in range(3):
            in_two_parts(module, inputs, plan)

        assert [each for each in kept_by_splits() if id(each) not in before] == []
    finally:
        gc.enable()


def kept_by_splits():
    return [value for kind in (DeferredWeights, Product, Survey, Node) for value in living_instances(kind)]


def test_activations_changed_in_place_are_noticed():
    module, seen = nn.Sequential(Using(lambda self, x: x + 1), linear()), []
    module[1].register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    run_input, _ = two_parts(module, values(1, 3, WIDTH).requires_grad_())
    seen[0].detach().add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        run_input()


@pytest.mark.parametrize(("width", "is_alive"), [(600, True), (6, False)])
def test_large_weights_are_done_one_by_one_and_small_ones_together(width, is_alive):
    module = nn.Sequential(nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width))
    inputs, seen = [], []
    module[1].register_forward_pre_hook(lambda _, args: inputs.append(storage(args[0])))
    module[3].weight.register_hook(lambda _: seen.append(inputs[0]() is not None))

    in_two_parts(module, values(1, 3, width).requires_grad_())

    assert seen == [is_alive]


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"fullgraph": True}])
@pytest.mark.parametrize("wrapped", [nn.Sequential, Recomputed])
def test_what_is_compiled_has_the_same_gradients(wrapped, options):
    own = Using(lambda self, x: self.layers(x) + 1, layers=nn.Sequential(linear(), nn.Tanh()))
    module = settle(wrapped(own, linear()), 1)
    other, plan = copy.deepcopy(module), any_size()
    own.compile(backend="aot_eager", **options)

    for _ in range(3):
        assert differing(module, other, values(1, 3, WIDTH), plan) == []
