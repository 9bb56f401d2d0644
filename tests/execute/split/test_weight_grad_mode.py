"""A product that is split in the forward defers its weight gradients where a search finds it, and nowhere else."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import GradientEdge, get_gradient_edge, save_on_cpu
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from penstock.execute.split.graph_search import search
from penstock.execute.split.weight_grad_mode import RecomputeMismatch, WeightGradMode
from tests.local_pipelines import WIDTH, settle, values


def layer():
    return settle(nn.Linear(WIDTH, WIDTH), 1)


def hidden():
    return values(1, 3, WIDTH).requires_grad_()


def mode_of(module):
    return WeightGradMode(frozenset(map(id, module.parameters())))


def split(module, inputs):
    with mode_of(module):
        return module(inputs)


def left_by(output):
    """Return what a backward leaves that does without the gradients of the products that a search finds."""
    edges, late = [get_gradient_edge(output)], []
    survey = search(edges, frozenset())
    for product in survey.waiting:
        product.watch(late)
    ends = [end for product in survey.waiting for end in product.ends(hands_over=False)]
    inputs = [GradientEdge(node, 0) for node in survey.immediate] + ends
    torch.autograd.backward(edges, [torch.ones_like(output)], inputs=inputs)
    for product in survey.waiting:
        product.release()
    return late


def gradients(module, inputs, run):
    """The gradients after a backward of what `run` returns."""
    leaf = inputs.detach().requires_grad_()
    run(module, leaf).sum().backward()
    return [leaf.grad, *(parameter.grad for parameter in module.parameters())]


@pytest.mark.parametrize("needs_gradient", [True, False])
def test_the_gradient_of_the_weight_waits_if_a_search_finds_the_product(needs_gradient):
    module, other = layer(), layer()
    inputs = hidden().detach().requires_grad_(needs_gradient)

    (left,) = left_by(split(module, inputs))
    other(inputs.detach()).sum().backward()

    assert module.weight.grad is None
    assert torch.equal(module.bias.grad, other.bias.grad)
    assert left.parameters == [module.weight]
    assert torch.equal(*left.gradients(), other.weight.grad)


@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (layer, values(1, 3, WIDTH)),
        (lambda: nn.Conv1d(3, 2, 2), values(1, 2, 3, WIDTH)),
        (lambda: nn.Sequential(nn.Embedding(5, WIDTH), layer()), torch.tensor([1, 2, 4])),
    ],
)
def test_any_other_backward_gets_all_gradients_bit_for_bit(make, inputs):
    module, other = settle(make(), 1), settle(make(), 1)

    split(module, inputs).sum().backward()
    other(inputs).sum().backward()

    assert all(torch.equal(a.grad, b.grad) for a, b in zip(module.parameters(), other.parameters(), strict=True))


def test_gradients_of_gradients_are_right():
    def penalty(run):
        module, leaf = layer(), hidden()
        output = run(module, leaf)
        (slope,) = torch.autograd.grad((output**2).sum(), leaf, create_graph=True)
        (slope**2).sum().backward()
        return [leaf.grad, module.weight.grad]

    for found, expected in zip(penalty(split), penalty(lambda module, leaf: module(leaf)), strict=True):
        assert torch.allclose(found, expected, rtol=1e-12)


def test_products_of_other_weights_stay_as_they_are():
    with WeightGradMode(frozenset()):
        output = layer()(hidden())

    assert output.grad_fn.name() == "AddmmBackward0"


def test_a_product_whose_weight_is_made_of_what_others_keep_stays_as_it_is():
    module = weight_norm(layer())
    with mode_of(module), save_on_cpu():
        output = module(hidden())

    assert output.grad_fn.name() == "AddmmBackward0"


def test_an_output_that_takes_no_part_leaves_nothing():
    module = nn.ModuleList([layer(), layer()])
    with mode_of(module):
        output = torch.stack([each(hidden()) for each in module])[0]

    assert [each.parameters for each in left_by(output)][-1:] == [[module[0].weight]]


def test_without_gradients_it_is_the_function_itself():
    with torch.no_grad():
        output = split(layer(), hidden())

    assert output.grad_fn is None


def test_the_output_may_be_changed_in_place():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.ReLU(inplace=True))

    (left,) = left_by(split(module, values(1, 2, 3, WIDTH)))

    assert left.parameters == [module[0].weight]


def test_where_functions_of_ones_own_are_not_allowed_the_product_is_a_plain_one():
    module, other = layer(), layer()

    with mode_of(module):
        found = gradients(module, values(1, 2, 3, WIDTH), lambda each, leaf: torch.vmap(each)(leaf))
    expected = gradients(other, values(1, 2, 3, WIDTH), lambda each, leaf: torch.vmap(each)(leaf))

    assert all(map(torch.equal, found, expected))


def test_what_a_recomputation_runs_has_all_gradients_too():
    """As a function of the user's own needs it, that runs layers again and a backward through them."""
    module, other = layer(), layer()
    mode = mode_of(module)
    mode.is_in_backward = True

    with mode:
        found = gradients(module, hidden(), lambda each, leaf: each(leaf))
    expected = gradients(other, hidden(), lambda each, leaf: each(leaf))

    assert all(map(torch.equal, found, expected))


def test_a_change_in_place_of_what_a_recomputation_keeps_is_noticed():
    module, inputs = layer(), hidden() * 1
    mode = mode_of(module)
    mode.is_in_backward = True
    with mode:
        output = module(inputs)

    inputs.detach().add_(1)

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_activations_that_are_not_what_was_kept_are_refused():
    """With as many rows as columns, a recomputation that is not split saves tensors of the same sizes."""
    module = settle(nn.Linear(WIDTH, WIDTH, bias=False), 1)
    inputs = values(1, WIDTH, WIDTH).requires_grad_()
    with mode_of(module):
        output = torch.tanh(checkpoint(module, inputs, use_reentrant=False))

    with pytest.raises(RecomputeMismatch, match="saved other tensors"):
        output.sum().backward()


class Within(nn.Module):
    """Takes a gradient within its forward, for which checkpointed layers run again."""

    def __init__(self, take):
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.empty(WIDTH, WIDTH)) for _ in range(2))
        self.take = take

    def run(self, place):
        return torch.tanh(torch.tanh(place @ self.first) @ self.second)

    def forward(self, inputs):
        place = inputs.detach().requires_grad_()
        self.take(checkpoint(self.run, place, use_reentrant=False).sum(), place)
        return inputs * place.grad


def take(energy, place):
    (place.grad,) = torch.autograd.grad(energy, place)


@pytest.mark.parametrize(
    "how",
    [
        take,
        lambda energy, place: energy.backward(inputs=[place]),
        lambda energy, place: energy.backward(torch.tensor(2.0), True, False, [place]),
        lambda energy, place: torch.autograd.backward(energy, inputs=place),
        lambda energy, place: torch.autograd.backward([energy], [torch.ones(())], inputs=[place]),
    ],
)
def test_layers_that_run_again_for_a_backward_within_a_forward_are_split_alike(how):
    module, other = settle(Within(how), 1), settle(Within(how), 1)

    found, expected = split(module, values(1, WIDTH, WIDTH)), other(values(1, WIDTH, WIDTH))

    assert torch.equal(found, expected)
    assert [parameter.grad for parameter in module.parameters()] == [None, None]


class Casting(nn.Linear):
    """Computes in another type than that of its weight."""

    def forward(self, inputs):
        return nn.functional.linear(inputs.double(), self.weight.double())


def test_a_copy_of_a_weight_is_not_kept_for_its_gradient():
    module, inputs = settle(Casting(WIDTH, WIDTH), 1), hidden()
    _, expected, _ = gradients(module, inputs, lambda module, leaf: module(leaf))

    (left,) = left_by(split(module, inputs))

    assert sorted(each.numel() for each in left.kept) == [0, inputs.numel(), inputs.numel()]
    (found,) = left.gradients()
    assert found.dtype == torch.float64
    assert torch.equal(found.float(), expected)


def test_a_kernel_is_kept_for_its_gradient():
    module, inputs = settle(weight_norm(nn.Conv1d(3, 3, 3)), 1), values(1, 2, 3, 8).requires_grad_()
    made = module.weight.numel()

    (left,) = left_by(split(module, inputs))

    assert made in [each.numel() for each in left.kept]
    assert left.gradients()[0].shape == (3, 3, 3)
