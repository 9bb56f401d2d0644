"""A forward leaves the gradients of its weights for later: each once, complete, and holding only what it needs."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.execute.deferred_weights import DeferredWeights
from tests.local_pipelines import settle, values

WIDTH = 6
IMAGES = (2, 4, 5, 5)


class Attention(nn.Module):
    """Self-attention from three projections of one input."""

    def __init__(self):
        super().__init__()
        self.query, self.key, self.value, self.output = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, hidden):
        scores = self.query(hidden) @ self.key(hidden).transpose(1, 2)
        return self.output(scores.softmax(-1) @ self.value(hidden)) + hidden


class LowRank(nn.Module):
    """A frozen layer with a trained difference of low rank (LoRA)."""

    def __init__(self):
        super().__init__()
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down, self.up = nn.Linear(WIDTH, 2, bias=False), nn.Linear(2, WIDTH, bias=False)

    def forward(self, hidden):
        return self.frozen(hidden) + self.up(self.down(hidden))


class Shared(nn.Module):
    """One weight twice: as it is, and transposed."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, hidden):
        return torch.tanh(hidden @ self.weight) @ self.weight.t()


class Made(nn.Module):
    """The weight is computed from parameters; the last parameter is a scale."""

    def __init__(self):
        super().__init__()
        self.left, self.right = (nn.Parameter(torch.empty(WIDTH, WIDTH)) for _ in range(2))
        self.scale = nn.Parameter(torch.empty(WIDTH))

    def forward(self, hidden):
        made = nn.functional.linear(hidden, torch.tanh(self.left) * 2)
        return nn.functional.linear(made, (self.right + 1).t()) * self.scale


class Learned(nn.Module):
    """Adds the same to everything: a learned vector through a layer."""

    def __init__(self):
        super().__init__()
        self.vector, self.layer = nn.Parameter(torch.empty(1, WIDTH)), linear()

    def forward(self, hidden):
        return self.layer(hidden) + torch.relu_(self.layer(self.vector))


class Experts(nn.Module):
    """One matrix per expert."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(3, WIDTH, WIDTH))

    def forward(self, hidden):
        return torch.bmm(hidden.flatten(0, 1).expand(3, -1, -1), self.weight).mean(0)


class Squared(torch.autograd.Function):
    """hidden * weight ** 2, as a function of the user's own."""

    @staticmethod
    def forward(ctx, hidden, weight):
        ctx.save_for_backward(hidden, weight)
        return hidden @ weight**2

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        return gradient @ (weight**2).t(), hidden.flatten(0, -2).t() @ gradient.flatten(0, -2) * 2 * weight


class Custom(nn.Module):
    """Calls the user's own function."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

    def forward(self, hidden):
        return Squared.apply(hidden, self.weight)


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


def linear(*sizes):
    return nn.Linear(*(sizes or (WIDTH, WIDTH)))


def convolutions():
    return nn.Sequential(
        nn.Conv2d(4, 6, 3, padding=1),
        nn.BatchNorm2d(6),
        nn.ReLU(inplace=True),
        nn.Conv2d(6, 4, 3, bias=False, groups=2),
    )


def used_twice():
    shared = linear()
    return nn.Sequential(shared, nn.Tanh(), shared)


def partly_frozen():
    layers = nn.Sequential(linear(), nn.Tanh(), linear())
    layers[0].weight.requires_grad_(False)
    layers[2].bias.requires_grad_(False)
    return layers


HIDDEN = {
    "linear": lambda: nn.Sequential(linear(), nn.GELU(), linear()),
    "in place": lambda: nn.Sequential(linear(), nn.ReLU(inplace=True), linear()),
    "norms": lambda: nn.Sequential(nn.LayerNorm(WIDTH), linear(), nn.RMSNorm(WIDTH)),
    "attention": Attention,
    "torch's own attention": lambda: nn.TransformerEncoderLayer(WIDTH, 2, 8, 0.0, batch_first=True),
    "frozen": partly_frozen,
    "all frozen": lambda: linear().requires_grad_(False),
    "low rank": LowRank,
    "used twice": used_twice,
    "shared": Shared,
    "made": Made,
    "a learned first input": Learned,
    "experts": Experts,
    "custom": lambda: nn.Sequential(linear(), Custom(), linear()),
    "recurrent": lambda: nn.Sequential(linear(), nn.GRU(WIDTH, WIDTH), First()),
    "recomputed": lambda: nn.Sequential(linear(), Recomputed(linear(), nn.Tanh(), linear()), Recomputed(Attention())),
    "recomputed in an older way": lambda: nn.Sequential(
        linear(), Recomputed(linear(), nn.Tanh(), linear(), use_reentrant=True)
    ),
    "recomputed within": lambda: Recomputed(linear(), Recomputed(linear(), nn.Tanh()), Made()),
}


class First(nn.Module):
    """The first of what it is given."""

    def forward(self, pair):
        return pair[0]


def two_parts(module, inputs):
    """Run a module forward; return the two parts of its backward."""
    with DeferredWeights() as deferred:
        output = module(inputs)
    gradient = values(9, *output.shape, dtype=output.dtype)
    root = torch.autograd.graph.get_gradient_edge(output)

    def input_part():
        with deferred:
            torch.autograd.backward([root], [gradient])

    return input_part, deferred.add_gradients


def in_two_parts(module, inputs):
    seen = []
    watch = module.register_forward_hook(lambda *args: seen.append(args[-1].detach()))
    input_part, weight_part = two_parts(module, inputs)
    watch.remove()
    input_part()
    weight_part()
    return seen[0]


def whole(module, inputs):
    output = module(inputs)
    output.backward(values(9, *output.shape, dtype=output.dtype))
    return output.detach()


def results(run, module, inputs):
    inputs = inputs.clone()
    if inputs.is_floating_point():
        inputs.requires_grad_()
    return [run(module, inputs), inputs.grad, *(parameter.grad for parameter in module.parameters())]


def assert_same(module, inputs):
    other = copy.deepcopy(module)
    for number in range(2):  # gradients add up
        found, expected = results(in_two_parts, module, inputs), results(whole, other, inputs)
        for one, two in zip(found, expected, strict=True):
            assert (one is None and two is None) or torch.equal(one, two), number


@pytest.mark.parametrize("name", HIDDEN)
def test_both_parts_are_the_whole_backward_bit_for_bit(name):
    assert_same(settle(HIDDEN[name](), 1), values(1, 2, 3, WIDTH))


def test_convolutions_and_batch_norms_have_the_same_gradients():
    assert_same(settle(convolutions(), 1), values(1, *IMAGES))


@pytest.mark.parametrize("recompute", [nn.Sequential, Recomputed])
def test_a_stage_without_differentiable_inputs_has_the_same_gradients(recompute):
    layers = recompute(nn.Embedding(5, WIDTH, padding_idx=1), nn.Tanh(), linear())

    assert_same(settle(layers, 1), torch.tensor([[1, 2, 4], [4, 0, 4]]))


@pytest.mark.parametrize("name", ["in place", "attention", "low rank", "recomputed"])
def test_the_batch_itself_needs_no_gradient(name):
    module = settle(HIDDEN[name](), 1)
    other = copy.deepcopy(module)

    in_two_parts(module, values(1, 2, 3, WIDTH))
    whole(other, values(1, 2, 3, WIDTH))

    gradients = [[p.grad for p in each.parameters() if p.requires_grad] for each in (module, other)]
    assert all(map(torch.equal, *gradients))


def test_an_output_of_a_first_layer_without_bias_may_be_changed_in_place():
    module = settle(nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(inplace=True), linear()), 1)
    other = copy.deepcopy(module)

    in_two_parts(module, values(1, 3, WIDTH))
    whole(other, values(1, 3, WIDTH))

    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_autocast_gives_the_same_gradients():
    with torch.autocast("cpu", torch.bfloat16):
        assert_same(settle(nn.Sequential(linear(), nn.LayerNorm(WIDTH), Attention()), 1), values(1, 2, 3, WIDTH))


def test_matrices_wait_for_the_weight_part_and_vectors_do_not():
    module = settle(nn.Sequential(nn.LayerNorm(WIDTH), linear(), Attention()), 1)
    input_part, weight_part = two_parts(module, values(1, 2, 3, WIDTH).requires_grad_())

    input_part()

    late = {name for name, parameter in module.named_parameters() if parameter.grad is None}
    assert late == {name for name, parameter in module.named_parameters() if parameter.dim() > 1}
    weight_part()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_a_recomputation_takes_place_once_and_in_the_input_part():
    module = Recomputed(linear(), nn.Tanh(), linear(), nn.Tanh(), linear())
    input_part, weight_part = two_parts(module, values(1, 3, WIDTH).requires_grad_())
    assert module.num_runs == 1

    input_part()
    assert module.num_runs == 2

    weight_part()
    assert module.num_runs == 2


def test_a_recomputation_leaves_out_the_last_product():
    module, ends = Recomputed(linear(), nn.Tanh(), linear()), []
    module.layers[-1].register_forward_hook(lambda *_: ends.append("last"))

    in_two_parts(module, values(1, 3, WIDTH).requires_grad_())

    assert (module.num_runs, ends) == (2, ["last"])


def test_recomputed_layers_leave_their_weights_for_later_too():
    module = Recomputed(linear(), nn.Tanh(), linear())
    input_part, _ = two_parts(module, values(1, 3, WIDTH).requires_grad_())

    input_part()

    assert [parameter.grad is None for parameter in module.parameters()] == [True, False, True, False]


def test_hooks_of_a_weight_used_twice_see_one_gradient():
    module, seen = used_twice(), []
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: seen.append(p.shape))
        parameter.register_hook(lambda gradient: seen.append(gradient.shape))

    in_two_parts(module, values(1, 3, WIDTH).requires_grad_())

    assert sorted(seen) == sorted([module[0].weight.shape, module[0].bias.shape] * 2)


def test_hooks_of_modules_and_activations_run_once_and_count():
    module, seen = settle(nn.Sequential(linear(), Doubling(), linear()), 1), []
    other = copy.deepcopy(module)
    module[0].register_full_backward_hook(lambda *_: seen.append("module"))

    found, expected = (
        results(run, each, values(1, 3, WIDTH)) for run, each in ((in_two_parts, module), (whole, other))
    )

    assert all(map(torch.equal, found, expected))
    assert seen == ["module"]


class Doubling(nn.Module):
    """Doubles the gradient as it comes by."""

    def forward(self, hidden):
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 2)
        return hidden


def test_between_the_parts_only_what_the_weights_need_is_alive():
    module = nn.Sequential(linear(WIDTH, 5), nn.Tanh(), nn.Softmax(-1), nn.Linear(5, WIDTH), nn.Sigmoid())
    alive = [None] * len(module)
    for index, layer in enumerate(module):
        layer.register_forward_hook(lambda _, args, out, index=index: alive.__setitem__(index, storage(out)))
    input_part, weight_part = two_parts(module, values(1, 3, WIDTH).requires_grad_())
    assert [watched() is not None for watched in alive] == [False, True, True, False, True]

    input_part()
    assert [watched() is not None for watched in alive] == [False, False, True, False, False]

    weight_part()
    assert [watched() is not None for watched in alive] == [False] * 5


def storage(tensor):
    """A reference to the memory of a tensor that does not keep it alive."""
    return weakref.ref(tensor.untyped_storage())


@pytest.mark.slow
def test_the_weight_part_lets_go_of_everything():
    gc.collect()
    gc.disable()
    try:
        with DeferredWeights() as deferred:
            output = linear()(values(1, 3, WIDTH).requires_grad_())
        output.sum().backward()
        deferred.add_gradients()
        watched = weakref.ref(deferred)
        del deferred, output

        assert watched() is None
        assert [each for each in gc.get_objects() if type(each).__module__ == DeferredWeights.__module__] == []
    finally:
        gc.enable()


def test_activations_changed_in_place_are_noticed():
    module, inputs = linear(), values(1, 3, WIDTH).requires_grad_()
    with DeferredWeights():
        hidden = inputs * 2
        output = module(hidden)
    hidden.detach().add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


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
def test_a_compiled_function_stays_whole(options):
    module = settle(nn.Sequential(linear(), nn.Tanh(), linear()), 1)
    other = copy.deepcopy(module)
    module[0].compile(backend="eager", **options)

    found, expected = (
        results(run, each, values(1, 3, WIDTH)) for run, each in ((in_two_parts, module), (whole, other))
    )

    assert all(map(torch.equal, found, expected))


def test_without_gradients_nothing_is_left():
    module = linear()

    with DeferredWeights() as deferred, torch.no_grad():
        output = module(values(1, 3, WIDTH))

    assert not output.requires_grad
    assert deferred.uses == []
