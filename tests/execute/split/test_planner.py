"""How backwards are split follows from what earlier forwards have shown, and changes only as a step begins."""

import math
import warnings
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from bench.emulated_layer import EmulatedLayer
from penstock.errors import PenstockWarning
from penstock.execute.split import planner as planner_module
from penstock.execute.split.graph_search import search
from penstock.execute.split.planner import SMALL, Reason, SplitPlanner
from tests.support.local_pipelines import values
from tests.support.one_stage import run_input_part, run_weight_part
from tests.support.using import AskingProduct, Product, Using

WIDTH = 4


def late_weights(plan, module, num_rows=2, *, begins=True, stage=None):
    """Run a forward and its backward; return the matrices whose gradients came with the `W`.

    With the number of a `stage`, the plan examines the backward.
    """
    if begins:
        plan.begin_step(list(module.parameters()))
    module.zero_grad()
    hidden = values(1, num_rows, WIDTH).requires_grad_()
    deferred = plan.start(hidden.numel())
    output = module(hidden)
    with nullcontext() if stage is None else plan.examining(stage, list(module.named_parameters())):
        run_input_part(deferred, [torch.autograd.graph.get_gradient_edge(output)], [torch.ones_like(output)])
    late = {name for name, each in module.named_parameters() if each.grad is None and each.requires_grad}
    run_weight_part(deferred)
    assert all(each.grad is not None for each in module.parameters() if each.requires_grad)
    return late


class Recomputed(nn.Sequential):
    """Runs again in the backward."""

    use_reentrant = False

    def forward(self, hidden):
        return checkpoint(super().forward, hidden, use_reentrant=self.use_reentrant)


def test_a_small_weight_stays_whole_from_the_next_step_on():
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False))
    plan = SplitPlanner(small=2 * WIDTH * WIDTH + 1)

    assert late_weights(plan, module) == {"0.weight", "1.weight"}
    assert late_weights(plan, module, begins=False) == {"0.weight", "1.weight"}
    assert late_weights(plan, module) == {"1.weight"}
    assert late_weights(plan, module, begins=False) == {"1.weight"}
    assert [plan.is_small(layer.weight) for layer in module] == [True, False]


def test_of_weights_that_have_become_small_none_is_said_to_wait():
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    plan = SplitPlanner(small=math.inf)

    assert [(late_weights(plan, module), plan.mechanisms(module.named_parameters())) for _ in range(2)] == [
        ({"weight"}, {"weight": "product"}),
        (set(), {}),
    ]


@pytest.mark.parametrize(("penalty", "late"), [(lambda w: w.pow(2), {"weight"}), (lambda w: w * w, set())])
def test_a_weight_waits_with_all_its_uses_where_their_sum_does_not_depend_on_the_order(penalty, late):
    weight = nn.Parameter(values(2, WIDTH, WIDTH))
    module = Using(lambda self, x: x @ self.weight + penalty(self.weight).sum(), weight=weight)

    assert late_weights(SplitPlanner(small=0), module) == late


def test_sizes_are_looked_at_again_when_the_batch_grows():
    module = nn.Linear(WIDTH, WIDTH, bias=False)
    plan = SplitPlanner(small=4 * WIDTH * WIDTH)

    assert [len(late_weights(plan, module, rows)) for rows in (2, 2, 3, 8, 8)] == [1, 0, 0, 1, 1]


@pytest.mark.parametrize("make", [lambda: EmulatedLayer(0.0, 1e-9, weight_s=1e-9), lambda: nn.Conv1d(2, 2, 3)])
def test_what_takes_an_unknown_time_is_never_small(make):
    module = make()
    plan = SplitPlanner()

    assert ["weight" in late_weights(plan, module) for _ in range(2)] == [True, True]


def own(run):
    """Return a layer that checkpoints part of its forward, in which it uses its own matrix."""
    weight = nn.Parameter(torch.eye(WIDTH))
    return Using(lambda self, x: torch.tanh(checkpoint(run, x, self.weight, use_reentrant=False)), weight=weight)


def mapped(hidden, weight):
    return torch.vmap(torch.matmul, (0, None))(hidden.unflatten(0, (1, -1)), weight)


@pytest.mark.parametrize(
    "make", [lambda: Recomputed(nn.Linear(WIDTH, WIDTH)), lambda: own(torch.matmul), lambda: own(mapped)]
)
def test_what_is_recomputed_waits(make):
    module = nn.Sequential(make(), nn.Linear(WIDTH, WIDTH))
    plan = SplitPlanner(small=0)

    matrices = {name for name, parameter in module.named_parameters() if parameter.dim() > 1}
    assert [late_weights(plan, module) for _ in range(2)] == [matrices] * 2
    assert plan.is_settled


@pytest.mark.parametrize(("small", "later"), [(0, {"1.0.weight"}), (SMALL, set())])
def test_reentrant_checkpointing_is_split_in_its_own_backward_where_weights_are_large(small, later):
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False), Recomputed(nn.Linear(WIDTH, WIDTH)))
    module[1].use_reentrant = True
    plan = SplitPlanner(small=small)

    assert [late_weights(plan, module) for _ in range(3)] == [{"1.0.weight"}, later, later]
    assert plan.is_settled


class Ways(nn.Module):
    """A weight for each way to wait, and for each reason not to."""

    def __init__(self):
        super().__init__()
        self.product, self.small = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1, bias=False)
        self.branch, self.behind, self.asks, self.silent = (nn.Parameter(torch.ones(WIDTH, WIDTH)) for _ in range(4))
        self.frozen = nn.Parameter(torch.ones(WIDTH), requires_grad=False)

    def forward(self, hidden):
        hidden = self.product(hidden) * torch.tanh(self.branch @ self.branch)[0] * self.frozen
        hidden = AskingProduct.apply(hidden @ torch.tanh(self.behind), self.asks)
        return self.small(Product.apply(hidden, self.silent))


def test_each_weight_waits_in_one_way_or_not_for_one_reason():
    module = Ways()
    plan, names = SplitPlanner(small=WIDTH * WIDTH + 1), list(module.named_parameters())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)
        for _ in range(3):
            late_weights(plan, module, stage=0)

    assert plan.mechanisms(names) == {
        "product.weight": "product",
        "branch": "weight branch",
        "behind": "weight branch",
        "asks": "custom function",
    }
    assert plan.immediate.reasons == {"small.weight": Reason.SMALL, "silent": Reason.NOT_TOLD_APART}
    assert plan._shown.sizes[id(module.product.weight)] == 2 * WIDTH * WIDTH
    assert plan._shown.sizes[id(module.small.weight)] == 2 * WIDTH
    assert plan._shown.sizes[id(module.asks)] == math.inf


def test_of_small_weights_it_is_said_also_where_hooks_of_users_keep_their_activations():
    def hooked(self, hidden):
        with saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return self.layer(hidden)

    def reasons(small):
        module = Using(hooked, layer=nn.Linear(WIDTH, WIDTH, bias=False))
        plan = SplitPlanner(small=small)
        for _ in range(2):
            with plan.examining(0, list(module.named_parameters())):
                late_weights(plan, module)
        return dict(plan.immediate.reasons)

    assert reasons(math.inf) == {"layer.weight": Reason.SMALL}
    with pytest.warns(PenstockWarning, match="take their gradients in the `I`"):
        assert reasons(0) == {"layer.weight": Reason.NOT_TOLD_APART}


def test_a_plan_looks_for_branches_while_it_does_not_know_and_where_there_are_any(monkeypatch):
    asked = []
    monkeypatch.setattr(
        planner_module, "search", lambda *args, **options: asked.append(options) or search(*args, **options)
    )
    for module in (nn.Linear(WIDTH, WIDTH), Ways()):
        plan = SplitPlanner(small=0)
        for _ in range(3):
            late_weights(plan, module)

    assert [each["finds_branches"] for each in asked] == [True, False, False, True, True, True]


def test_a_plan_logs_once_how_much_waits_and_why_the_rest_does_not(caplog):
    module = Ways()
    plan = SplitPlanner(small=WIDTH * WIDTH + 1)
    late_weights(plan, module)
    late_weights(plan, module)

    with caplog.at_level("DEBUG", logger="penstock"), pytest.warns(PenstockWarning, match="silent"):
        late_weights(plan, module, stage=3)

    assert [record.getMessage() for record in caplog.records if record.levelname != "WARNING"][:4] == [
        "stage 3: 76% of its weights wait for W; cannot be told apart 19%; small 5%",
        "stage 3: as weight branch wait branch, behind",
        "stage 3: as custom function wait asks",
        "stage 3: as product wait product.weight",
    ]
    assert plan.is_examined


def new_plans(plan, module, change):
    """Run six steps, in each of which all microbatches have one plan; return those that have another than before."""
    found = []
    for number in range(6):
        if number == 3:
            change()
        late_weights(plan, module)
        found.append(plan.plan)
        late_weights(plan, module, begins=False)
        assert plan.plan is found[-1]
    return [index for index, each in enumerate(found) if index and each != found[index - 1]]


class Newly(Product):
    """Has not run before, and asks from some step on."""

    asks = False

    @staticmethod
    def backward(ctx, gradient):
        return (AskingProduct if Newly.asks else Product).backward(ctx, gradient)


def test_a_new_plan_is_made_after_the_first_backward_and_when_a_function_asks_for_the_first_time(monkeypatch):
    module = Using(
        lambda self, x: Newly.apply(self.layer(x), self.matrix),
        layer=nn.Linear(WIDTH, WIDTH),
        matrix=nn.Parameter(torch.ones(WIDTH, WIDTH)),
    )

    assert new_plans(SplitPlanner(small=0), module, lambda: monkeypatch.setattr(Newly, "asks", True)) == [1, 4]


def test_a_new_plan_is_made_when_parameters_are_replaced_and_the_new_ones_wait():
    """Before, it was known that nothing could wait, and no graph was walked any more."""
    module = nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False))
    plan = SplitPlanner(small=WIDTH * WIDTH * 2 + 1)
    found = [late_weights(plan, module) for _ in range(3)]

    module[0] = nn.Linear(WIDTH, 2 * WIDTH, bias=False)
    found += [late_weights(plan, module) for _ in range(2)]

    assert found == [{"0.weight"}, set(), set(), {"0.weight"}, {"0.weight"}]


def test_a_new_plan_is_made_when_others_are_trained():
    module = nn.Sequential(nn.Linear(WIDTH, 1, bias=False), nn.Linear(1, WIDTH * WIDTH, bias=False))
    module[1].requires_grad_(False)
    plan = SplitPlanner(small=WIDTH * 2 + 1)

    assert new_plans(plan, module, lambda: module[1].requires_grad_(True)) == [1, 3, 4]
    assert late_weights(plan, module) == {"1.weight"}
