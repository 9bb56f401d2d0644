"""How backwards are split follows from what earlier forwards have shown, and changes only as a step begins."""

import pytest
import torch
from torch import nn
from torch.overrides import has_torch_function
from torch.utils.checkpoint import CheckpointError, checkpoint

import penstock as ps
from bench.emulated_layer import EmulatedLayer
from penstock.errors import PipelineError
from penstock.execute.split import plan as plan_module
from penstock.execute.split.graph_search import search
from penstock.execute.split.plan import SMALL, SplitPlan
from penstock.execute.split.weight_grad_mode import RecomputeMismatch
from tests.local_pipelines import values
from tests.one_stage import run_weight_part

WIDTH = 4


def late_weights(plan, module, num_rows=2, *, begins=True):
    """Run a forward and its backward; return the matrices whose gradients came with the `W`."""
    if begins:
        plan.begin_step()
    module.zero_grad()
    hidden = values(1, num_rows, WIDTH).requires_grad_()
    deferred = plan.start(hidden.numel())
    with deferred.around_forward():
        output = module(hidden)
    deferred.backward_input([torch.autograd.graph.get_gradient_edge(output)], [torch.ones_like(output)])
    late = {name for name, each in module.named_parameters() if each.grad is None and each.requires_grad}
    run_weight_part(deferred)
    assert all(each.grad is not None for each in module.parameters() if each.requires_grad)
    return late


class Recomputed(nn.Sequential):
    """Runs again in the backward."""

    use_reentrant = False

    def forward(self, hidden):
        return checkpoint(super().forward, hidden, use_reentrant=self.use_reentrant)


class Borrowed(nn.Module):
    """Uses a weight that another module holds, under checkpointing."""

    def __init__(self):
        super().__init__()
        self.holder = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, hidden):
        return checkpoint(lambda x: nn.functional.linear(x, self.holder.weight), hidden, use_reentrant=False)


def test_a_small_weight_stays_whole_from_the_next_step_on():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False))
    plan = SplitPlan([module], small=2 * WIDTH * WIDTH + 1)

    assert late_weights(plan, module) == {"0.weight", "1.weight"}
    assert late_weights(plan, module, begins=False) == {"0.weight", "1.weight"}
    assert late_weights(plan, module) == {"1.weight"}
    assert late_weights(plan, module, begins=False) == {"1.weight"}
    assert [plan.is_small(layer.weight) for layer in module] == [True, False]


def test_sizes_are_looked_at_again_when_the_batch_grows():
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    plan = SplitPlan([module], small=4 * WIDTH * WIDTH)

    assert [late_weights(plan, module, rows) for rows in (2, 2, 3, 8, 8)] == [
        {"weight"},
        set(),
        set(),
        {"weight"},
        {"weight"},
    ]


def test_the_usual_border_leaves_small_weights_whole():
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    plan = SplitPlan([module])
    num_rows = SMALL // WIDTH**2

    assert [late_weights(plan, module, rows) for rows in (1, 1, num_rows, num_rows)] == [
        {"weight"},
        set(),
        {"weight"},
        {"weight"},
    ]


@pytest.mark.parametrize("make", [lambda: EmulatedLayer(0.0, 1e-9, weight_s=1e-9), lambda: nn.Conv1d(2, 2, 3)])
def test_what_takes_an_unknown_time_is_never_small(make):
    module = make()
    plan = SplitPlan([module])

    assert ["weight" in late_weights(plan, module) for _ in range(2)] == [True, True]


def test_what_is_recomputed_waits_from_the_next_step_on():
    module = nn.Sequential(Recomputed(nn.Linear(WIDTH, WIDTH)), nn.Linear(WIDTH, WIDTH))
    plan = SplitPlan([module], small=0)

    found, settled = [], []
    for _ in range(2):
        found.append(late_weights(plan, module))
        settled.append(plan.is_settled)

    assert found == [{"1.weight"}, {"0.0.weight", "1.weight"}]
    assert settled == [False, True]


def test_if_the_holder_of_a_weight_is_not_where_it_is_used_every_function_is_watched():
    module = Borrowed()
    plan = SplitPlan([module], small=0)

    assert [late_weights(plan, module) for _ in range(4)] == [set(), set(), {"holder.weight"}, {"holder.weight"}]


class Own(nn.Module):
    """Checkpoints part of its forward, in which it uses its own matrix."""

    def __init__(self, run=lambda hidden, weight: hidden @ weight):
        super().__init__()
        self.weight, self.run = nn.Parameter(torch.eye(WIDTH)), run

    def forward(self, hidden):
        return torch.tanh(checkpoint(self.run, hidden, self.weight, use_reentrant=False))


def test_matrices_of_the_users_own_layers_are_split_by_watching_every_function():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Own())
    plan = SplitPlan([module], small=0)

    assert [late_weights(plan, module) for _ in range(3)] == [{"0.weight"}, *[{"0.weight", "1.weight"}] * 2]
    assert plan.is_settled


def test_what_no_watching_parts_stays_whole_and_is_watched_no_more():
    watched = []

    def run(hidden, weight):
        watched.append(has_torch_function((hidden,)))
        return torch.vmap(torch.matmul, (0, None))(hidden.unflatten(0, (1, -1)), weight)

    module = Own(run)
    plan = SplitPlan([module], small=0)

    assert [late_weights(plan, module) for _ in range(4)] == [set()] * 4
    assert watched[::2] == watched[1::2] == [False, True, False, False]
    assert plan.is_settled


def test_reentrant_checkpointing_is_split_in_its_own_backward():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Recomputed(nn.Linear(WIDTH, WIDTH)))
    module[1].use_reentrant = True
    plan = SplitPlan([module], small=0)

    assert [late_weights(plan, module) for _ in range(2)] == [{"1.0.weight"}] * 2
    assert plan.is_settled


def test_small_weights_under_it_stay_whole():
    module = Recomputed(nn.Linear(WIDTH, WIDTH))
    module.use_reentrant = True
    plan = SplitPlan([module])

    assert [late_weights(plan, module) for _ in range(3)] == [{"0.weight"}, set(), set()]


@pytest.mark.parametrize(("num_rows", "cause"), [(2, CheckpointError), (WIDTH, RecomputeMismatch)])
def test_after_a_recomputation_that_went_another_way_nothing_is_split_in_the_forward(num_rows, cause):
    """With as many rows as columns the sizes of what was saved are alike."""
    again = []
    module = Own(lambda hidden, weight: (torch.tanh(hidden) if again else hidden) @ weight)
    plan = SplitPlan([module], small=0)
    late_weights(plan, module)
    plan.begin_step()
    deferred = plan.start(num_rows * WIDTH)
    with deferred.around_forward():
        output = module(values(1, num_rows, WIDTH).requires_grad_())
    again.append(True)

    with pytest.raises(PipelineError, match=r"deferred weight gradients of Own\.weight") as caught:
        deferred.backward_input([torch.autograd.graph.get_gradient_edge(output)], [torch.ones_like(output)])

    assert isinstance(caught.value.__cause__, cause)
    assert late_weights(plan, module) == set()


def test_modules_are_as_they_were_between_the_parts():
    module = Recomputed(nn.Linear(WIDTH, WIDTH))
    plan = SplitPlan([module], small=0)

    for _ in range(3):
        late_weights(plan, module)

    assert all("forward" not in each.__dict__ for each in module.modules())


class Double(torch.autograd.Function):
    """Asks or not: of activations and a weight."""

    @staticmethod
    def forward(ctx, hidden, weight, asks):
        ctx.save_for_backward(hidden, weight)
        ctx.asks = asks
        return hidden @ weight

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        if ctx.asks and not ps.wants_weight_gradient(ctx):
            return gradient @ weight.t(), None, None
        return gradient @ weight.t(), hidden.t() @ gradient, None


class Silent(Double):
    """Never asks."""


class Rungs(nn.Module):
    """A weight on each rung."""

    def __init__(self):
        super().__init__()
        self.product, self.small = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1, bias=False)
        self.branch, self.behind, self.asks, self.silent = (nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(4))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, hidden):
        hidden = self.product(hidden) * torch.tanh(self.branch @ self.branch)[0] * self.frozen
        hidden = Double.apply(hidden @ torch.tanh(self.behind), self.asks, True)
        return self.small(Silent.apply(hidden, self.silent, False))


def test_each_weight_is_on_a_rung():
    module = Rungs()
    plan = SplitPlan([module], small=WIDTH * WIDTH + 1)
    for _ in range(2):
        late_weights(plan, module)

    found = plan.rungs(list(module.named_parameters()))

    assert {name: str(each.rung) for name, each in found.items()} == {
        "product.weight": "product",
        "product.bias": "small",
        "small.weight": "small",
        "branch": "weight branch",
        "behind": "weight branch",
        "asks": "custom function",
        "silent": "opaque",
    }
    assert found["product.weight"].multiplications == 2 * WIDTH * WIDTH
    assert found["small.weight"].multiplications == 2 * WIDTH
    assert found["asks"].multiplications is None


def test_a_plan_looks_for_branches_while_it_does_not_know_and_where_there_are_any(monkeypatch):
    asked = []
    monkeypatch.setattr(
        plan_module, "search", lambda *args, **options: asked.append(options) or search(*args, **options)
    )
    for module in (nn.Linear(WIDTH, WIDTH), Rungs()):
        plan = SplitPlan([module], small=0)
        for _ in range(3):
            late_weights(plan, module)

    assert [each["finds_branches"] for each in asked] == [True, False, False, True, True, True]


def test_a_plan_logs_once_by_what_weights_wait(caplog):
    module = nn.Linear(WIDTH, WIDTH)
    plan, hidden = SplitPlan([module], small=0), values(1, 2, WIDTH).requires_grad_()
    deferred = plan.start(hidden.numel())
    with deferred.around_forward():
        output = module(hidden)

    with caplog.at_level("INFO", logger="penstock"), plan.examining(3, list(module.named_parameters())):
        edge = torch.autograd.graph.get_gradient_edge(output)
        deferred.backward_input([edge], [torch.ones_like(output)])

    told = [record.getMessage() for record in caplog.records]
    assert told == ["stage 3: 100 % of its weights wait for W: product 100%"]
    assert plan.is_examined
