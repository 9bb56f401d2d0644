"""A branch that is made of weights alone belongs to W whole, whichever way it meets the activations."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils.checkpoint import checkpoint

from penstock.execute.backend import aot_eager
from penstock.execute.split.planner import SplitPlanner
from penstock.execute.split.wanted import wants_input_gradient, wants_weight_gradient
from penstock.execute.split.weight_branch import WeightBranch
from tests.exactness.features import Squared
from tests.execute.split.test_custom_function import RUNS, notes_of, settled
from tests.execute.split.test_deferred_weights import (
    any_size,
    assert_same,
    in_two_parts,
    left_by_input_part,
    two_parts,
    whole,
)
from tests.support.local_pipelines import WIDTH, is_same, settle, values
from tests.support.one_stage import run_weight_part
from tests.support.using import Product, Using, between, function_of, products, weights


class Noted(Squared):
    """weight ** 2, with a note of each backward."""

    @staticmethod
    def backward(ctx, gradient):
        RUNS.append("noted")
        return Squared.backward(ctx, gradient)


def backward_of_halves(ctx, first, second):
    RUNS.append("halves")
    return first * 2 + second * 3


Halves = function_of(lambda ctx, weight: (weight * 2, weight * 3), backward_of_halves)


class Choosy(torch.autograd.Function):
    """Gets None where an output is not used, and says which."""

    @staticmethod
    def forward(ctx, weight):
        ctx.set_materialize_grads(False)
        return weight * 2, weight * 3

    @staticmethod
    def backward(ctx, first, second):
        RUNS.append([first is None, second is None])
        return first * 2 if second is None else first * 2 + second * 3


class Looked(Product):
    """Data come to it, but only the table gets a gradient."""

    @staticmethod
    def backward(ctx, gradient):
        RUNS.append(("looked", wants_input_gradient(ctx), wants_weight_gradient(ctx)))
        return None, products(gradient, *ctx.saved_tensors)[1]


def mean(weight):
    return weight.mean(0)


def two_of(self, hidden):
    one, two = Halves.apply(self.first)
    return hidden * mean(one) + mean(two)


def views_of(self, hidden):
    one, two, three = Noted.apply(self.first).chunk(3)
    return hidden * mean(one) + mean(two) * mean(three)


def with_buffer(self, hidden):
    mask = (torch.arange(WIDTH * WIDTH).view(WIDTH, WIDTH) % 2).to(hidden.dtype)
    return hidden + mean(Noted.apply(self.first * mask) + mask)


def entered_within_another(self, hidden):
    made = Noted.apply(self.vector)
    return hidden * torch.tanh(made) + made


def through_three_products(self, hidden):
    return hidden @ (made := torch.tanh(self.first)) @ made @ made


USES = {
    "added": lambda self, x: x + mean(Noted.apply(self.first)),
    "multiplied": lambda self, x: x * torch.tanh(self.first).sum(0),
    "through attention": lambda self, x: torch.softmax(x @ x.mT, -1) @ x + Noted.apply(self.first)[0],
    "broadcast": lambda self, x: x + Noted.apply(self.vector),
    "behind a product": lambda self, x: x @ Noted.apply(self.first).t(),
    "behind a product and added": lambda self, x: x @ Noted.apply(self.first) + mean(Noted.apply(self.first)),
    "one made weight in both": lambda self, x: x @ (made := Noted.apply(self.first)) + mean(made),
    "two branches of one weight": lambda self, x: x * mean(torch.tanh(self.first)) + mean(self.first**2),
    "three branches of one weight": lambda self, x: (
        x * mean(torch.tanh(self.first)) + mean(self.first**2) + mean(torch.exp(self.first))
    ),
    "a branch and two products": lambda self, x: x @ self.first @ self.first + mean(Noted.apply(self.first)),
    "a branch, a product, and a use in I": lambda self, x: (
        x @ self.first + mean(Noted.apply(self.first)) + self.first[0]
    ),
    "a weight of two": lambda self, x: x * mean(self.first @ self.second) + mean(torch.tanh(self.second)),
    "a branch within another": lambda self, x: x * mean(made := Noted.apply(self.first)) + mean(torch.tanh(made)),
    "cast": lambda self, x: x + mean(self.first.double()).to(x.dtype),
    "views alone": lambda self, x: x + self.first.t()[1] + self.vector.expand(2, WIDTH)[0],
    "low rank": lambda self, x: x + (self.first[:, :2] @ self.second[:2])[0],
    "two outputs": two_of,
    "one of two outputs": lambda self, x: x * mean(Halves.apply(self.first)[0]),
    "views of a branch": views_of,
    "with constants": with_buffer,
    "an entry within another branch": entered_within_another,
    "one of two outputs at the entry": lambda self, x: x + Choosy.apply(self.vector)[0],
    "both outputs at the entry": lambda self, x: x * (both := Choosy.apply(self.vector))[0] + both[1],
    "three products of a made weight": through_three_products,
    "in place": lambda self, x: x + torch.relu_(Noted.apply(self.first)).mean(0),
}


@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("name", USES)
def test_both_parts_are_the_whole_backward_bit_for_bit(name, needs_gradient):
    assert_same(settled(USES[name]), values(1, 2, 3, WIDTH), needs_gradient=needs_gradient)


NORMED = {
    "weight norm": lambda: weight_norm(nn.Linear(WIDTH, WIDTH)),
    "spectral norm": lambda: spectral_norm(nn.Linear(WIDTH, WIDTH)),
    "a convolution": lambda: nn.Sequential(nn.Unflatten(-1, (2, 3)), weight_norm(nn.Conv1d(2, 2, 1)), nn.Flatten(-2)),
}


@pytest.mark.parametrize("name", NORMED)
def test_parametrized_layers_have_the_same_gradients(name):
    assert_same(settle(nn.Sequential(nn.Linear(WIDTH, WIDTH), NORMED[name]()), 1), values(1, 4, WIDTH))


def early_and_late(module, inputs, plan=None):
    """The notes that the two parts of a backward leave."""
    run_input, run_weight = two_parts(module, inputs, plan)
    return notes_of(run_input), notes_of(run_weight)


NUM_RUNS = {
    "added": [0, 1],
    "broadcast": [0, 1],
    "through attention": [0, 1],
    "behind a product": [0, 1],
    "behind a product and added": [0, 2],
    "one made weight in both": [0, 1],
    "a branch and two products": [1, 0],
    "a branch, a product, and a use in I": [1, 0],
    "a branch within another": [0, 1],
    "two outputs": [0, 1],
    "one of two outputs": [0, 1],
    "views of a branch": [0, 1],
    "with constants": [0, 1],
    "an entry within another branch": [1, 0],
    "one of two outputs at the entry": [1, 0],
    "both outputs at the entry": [0, 1],
}
"""How often the function of a use runs in I, and in W."""


@pytest.mark.feature("X18")
@pytest.mark.parametrize("needs_gradient", [True, False])
@pytest.mark.parametrize("name", NUM_RUNS)
def test_a_branch_runs_in_w_unless_sums_would_change(name, needs_gradient):
    found = early_and_late(settled(USES[name]), values(1, 2, 3, WIDTH).requires_grad_(needs_gradient))

    assert [len(each) for each in found] == NUM_RUNS[name]


def test_a_function_of_data_that_leads_to_weights_alone_runs_in_w_once_it_has_asked():
    module, plan = settled(lambda self, x: Looked.apply(x.detach(), self.first) + x), any_size()

    found = [early_and_late(module, values(1, 2, 3, WIDTH), plan) for _ in range(2)]

    assert found == [([("looked", True, True)], []), ([], [("looked", False, True)])]
    module.zero_grad()
    assert_same(module, values(1, 2, 3, WIDTH))


def test_hooks_see_each_gradient_once():
    module, found = settled(hooked), []
    for name, parameter in module.named_parameters():
        parameter.register_hook(lambda gradient, name=name: module.seen.append((name, gradient.sum().item())))
        parameter.register_post_accumulate_grad_hook(lambda _, name=name: module.seen.append((name, "accumulated")))
    for run in (whole, in_two_parts):
        module.seen, inputs = [], values(1, 2, 3, WIDTH).requires_grad_()
        inputs.register_hook(lambda gradient: module.seen.append(("inputs", gradient.sum().item())))
        module.zero_grad()
        run(module, inputs)
        gradients = [inputs.grad, module.made.grad, *(each.grad for each in module.parameters())]
        found.append((sorted(map(str, module.seen)), gradients))

    (expected, expected_gradients), (seen, gradients) = found
    assert seen == expected
    assert all(map(is_same, gradients, expected_gradients))


def hooked(self, hidden):
    self.made = Noted.apply(self.first)
    self.made.retain_grad()
    self.made.register_hook(lambda gradient: self.seen.append(("made", gradient.sum().item())) or gradient * 2)
    return hidden * mean(self.made)


def test_a_function_that_wants_to_know_what_is_not_used_is_told():
    module = settled(USES["one of two outputs at the entry"])

    assert early_and_late(module, values(1, 2, 3, WIDTH).requires_grad_()) == ([[False, True]], [])


@pytest.mark.parametrize("use", [lambda weight: weight, lambda weight: torch.tanh(weight)])
def test_a_module_with_hooks_in_a_branch_calls_them_once(use):
    layer, power, calls = nn.LayerNorm(WIDTH), Using(lambda self, weight: Noted.apply(weight)), []
    parametrize.register_parametrization(layer, "weight", power)
    power.register_full_backward_hook(lambda *args: calls.append(args[1][0].sum().item()))
    adding = nn.Sequential(nn.Linear(WIDTH, WIDTH), Using(lambda self, x: x + use(self.layer.weight), layer=layer))

    for run in (whole, in_two_parts):
        run(adding, values(1, 3, WIDTH).requires_grad_())

    assert len(calls) == 2
    assert calls[0] == calls[1]


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_branch_that_checkpointing_keeps_is_computed_in_i(use_reentrant):
    recomputed = Using(
        lambda self, x: checkpoint(self.layer, x, use_reentrant=use_reentrant), layer=between(USES["added"])
    )
    module = settle(nn.Sequential(nn.Linear(WIDTH, WIDTH), recomputed), 1)
    expected = (["noted"], []) if not use_reentrant else ([], ["noted"])

    assert early_and_late(module, values(1, 3, WIDTH).requires_grad_()) == expected
    module.zero_grad()
    assert_same(module, values(1, 3, WIDTH))


def test_a_branch_keeps_its_gradient_and_what_it_saved_and_no_more():
    deferred = left_by_input_part(settled(USES["added"]), values(1, 2, 3, WIDTH).requires_grad_())
    (branch,) = [each for each in deferred.entries if isinstance(each, WeightBranch)]
    shapes = [tuple(each.shape) for each in branch.held_tensors]
    run_weight_part(deferred)

    assert shapes == [(WIDTH,)]  # the weight that was saved is a parameter
    assert (branch.held_tensors, branch.node) == ([], None)


def test_a_backward_comes_to_what_waits_in_one_order():
    """An embedding at the beginning leads to its table alone, and is handed over with the branches."""
    module = settle(nn.Sequential(nn.Embedding(5, WIDTH), between(USES["added"])), 1)
    tokens = torch.tensor([[1, 2], [0, 4]])

    deferred = left_by_input_part(module, tokens)

    weights = [id(module[1].after.weight), id(module[1].first), id(module[1].before.weight), id(module[0].weight)]
    assert [id(each.parameters[0]) for each in deferred.entries] == weights
    module.zero_grad()
    assert_same(module, tokens)


@pytest.mark.slow
@pytest.mark.parametrize("num_blocks", [1, 2])
def test_a_compiled_block_at_the_beginning_runs_its_input_half_next_to_a_branch(num_blocks):
    """Its weights are all that it leads to, so a backward that hands gradients over has no reason to come to it."""
    torch.compiler.reset()
    blocks = [weights(lambda self, x: torch.tanh(x @ self.first)) for _ in range(num_blocks)]
    module = settle(nn.Sequential(*blocks, between(USES["added"])), 1)
    plan, other = any_size(), copy.deepcopy(module)
    for block in module[:num_blocks]:
        block.compile(backend=aot_eager)
    inputs = values(1, 2, 3, WIDTH)
    for _ in range(3):
        run_input, run_weight = two_parts(module, inputs, plan)
        before = [copy.deepcopy(block.first.grad) for block in blocks]
        run_input()
        after = [block.first.grad for block in blocks]
        assert all(one is two is None or torch.equal(one, two) for one, two in zip(before, after, strict=True))
        run_weight()
        whole(other, inputs)

    assert plan.mechanisms(module.named_parameters())["0.first"] == "compiled"
    for one, two in zip(module.parameters(), other.parameters(), strict=True):
        assert one.grad is two.grad is None or torch.allclose(one.grad, two.grad, rtol=1e-5, atol=1e-6)


def test_what_does_not_pay_is_computed_in_i():
    found = []
    for use in (lambda self, x: x * torch.sigmoid(self.vector), USES["views alone"], USES["multiplied"]):
        module, plan = settled(use), SplitPlanner(small=32 * WIDTH * WIDTH)
        inputs = values(1, 3, WIDTH).requires_grad_()
        in_two_parts(module, inputs, plan)
        deferred = left_by_input_part(module, inputs, plan)
        found.append(len([each for each in deferred.entries if isinstance(each, WeightBranch)]))

    assert found == [0, 0, 1]
