"""A pipeline is made by two exchanges, whatever it has; what is wrong on one rank is told on all by one of them."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.batch.microbatch import BatchSpec, Replicate, Split
from penstock.execute.control.collectives import Control
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import (
    difference,
    error_of,
    float_layers,
    float_task,
    on_ranks,
    pipeline_of,
    square_loss,
    step_task,
    token_task,
)
from tests.support.local_wires import ordered

CASES = {
    "a line": ("1f1b", {}),
    "tied": ("1f1b", {"tied": [("0.1.weight", "4.1.weight")]}),
    "two routes": ("dualpipe", {}),
    "everything": ("1f1b", {"seed": 3, "debug": "values", "main_gradients": True}),
}


@pytest.fixture
def gathers(monkeypatch):
    """The collectives of each rank, counted."""
    found = Counter()
    gather = Control._gather_texts

    def counted(control, value):
        found[control.rank] += 1
        return gather(control, value)

    monkeypatch.setattr(Control, "_gather_texts", counted)
    return found


@pytest.mark.parametrize("name", CASES)
def test_all_that_ranks_must_agree_on_takes_two_gathers(gathers, name):
    schedule, options = CASES[name]
    on_ranks(2, lambda wires: Pipeline(float_layers(), schedule, 4, square_loss, transport=wires, **options).close())

    assert gathers == {0: 2, 1: 2}


@pytest.mark.parametrize(
    ("options_of", "told"),
    [
        # Else the rank with the other schedule would complain of what follows from it.
        (lambda rank: {"split": [1, 3] if rank else [2, 2]}, "split: rank 0 has 2, 2, rank 1 has 1, 3"),
        (lambda rank: {"device": torch.device("meta" if rank else "cpu")}, "device: rank 0 has cpu, rank 1 has meta. "),
        (
            lambda rank: {"layers": float_layers(num_layers=4 + rank)},
            "layers: rank 0 has 0, 1, 2, 3, rank 1 has 0, 1",
        ),
    ],
    ids=["split", "device", "layers"],
)
def test_a_setup_that_differs_is_found_before_anything_is_assembled(options_of, told):
    def case(wires):
        options = {"layers": [nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.LazyLinear(6)], "main_gradients": True}
        options |= {"schedule": "1f1b", "microbatches": 4, "loss": square_loss} | options_of(wires.rank)
        return error_of(Pipeline, transport=wires, **options)

    for error in on_ranks(2, case):
        assert type(error) is PipelineError
        assert f"the ranks disagree on {told}" in str(error)


def weighted(target):
    """Counts so that the microbatches of `float_task` weigh differently."""
    return 1 + 3 * int(target.sum() > 0)


def do_nothing(*args):
    return None


TIED = ("0.1.weight", "4.1.weight")
DIFFERENT = {
    "split": ("1f1b", {}, {"split": [1, 4]}, "3, 2", "1, 4"),
    "seed": ("1f1b", {"seed": 0}, {"seed": 1}, "0", "1"),
    "reduction": ("1f1b", {}, {"reduction": "sum"}, "mean", "sum"),
    "scale_loss": ("1f1b", {"scale_loss": 1.0}, {"scale_loss": 2.0}, "1.0", "2.0"),
    "variable_shapes": ("1f1b", {}, {"variable_shapes": True}, "False", "True"),
    "check_batches": ("1f1b", {}, {"check_batches": False}, "True", "False"),
    "count": ("dualpipe", {}, {"count": weighted}, "none", "a function"),
    "allow_ragged": ("1f1b", {}, {"allow_ragged": True}, "False", "True"),
    "slice_dim": ("seq1f1b", {"slices": 2}, {"slices": 2, "slice_dim": 2}, "1", "2"),
    "specs": ("1f1b", {}, {"specs": BatchSpec(args=Split(-2))}, "none", "args=Split(dim=-2)"),
    "slice_specs": (
        "1f1b",
        {"slice_specs": BatchSpec(target=Split(1))},
        {"slice_specs": BatchSpec(target=Replicate())},
        "target=Split(dim=1)",
        "target=Replicate()",
    ),
    "tied on one rank": ("1f1b", {}, {"tied": [TIED]}, "none", "0.1.weight = 4.1.weight"),
    "tied": (
        "1f1b",
        {"tied": [TIED]},
        {"tied": [("0.1.weight", "3.1.weight")]},
        "0.1.weight = 4.1.weight",
        "0.1.weight = 3.1.weight",
    ),
    "tied in another order": (
        "1f1b",
        {"tied": [TIED, ("1.1.weight", "3.1.weight")]},
        {"tied": [("1.1.weight", "3.1.weight"), TIED]},
        "0.1.weight = 4.1.weight, 1.1.weight = 3.1.weight",
        "1.1.weight = 3.1.weight, 0.1.weight = 4.1.weight",
    ),
    "optimizer_step": ("1f1b", {}, {"optimizer_step": do_nothing}, "none", "a function"),
    "reduce_stage": ("dualpipe", {}, {"reduce_stage": do_nothing}, "none", "a function"),
}


@pytest.mark.feature("0.2")
@pytest.mark.parametrize("differing_rank", [0, 1])
@pytest.mark.parametrize("name", DIFFERENT)
def test_an_option_that_ranks_must_share_is_compared_before_anything_runs(name, differing_rank):
    schedule, usual, other, *shown = DIFFERENT[name]
    shown_by_rank = shown if differing_rank else shown[::-1]
    task = float_task(8)

    def case(wires):
        error = error_of(pipeline_of, wires, task, schedule, **(other if wires.rank == differing_rank else usual))
        pipeline_of(wires, task, schedule, **other).close()  # on all ranks it is no mistake
        return error

    for error in on_ranks(2, case):
        assert type(error) is PipelineError
        field = name.partition(" ")[0]
        assert f"disagree on {field}: rank 0 has {shown_by_rank[0]}, rank 1 has {shown_by_rank[1]}. " in str(error)


@pytest.mark.feature("E8")
def test_reductions_are_compared_only_where_ranks_hold_copies():
    """Elsewhere the stages of a rank are its own, and may have no replicas."""

    def case(wires):
        options = {} if wires.rank else {"reduce_stage": do_nothing}
        Pipeline(float_layers(), "1f1b", 4, square_loss, transport=wires, **options).close()

    on_ranks(2, case)


@pytest.mark.feature("0.2")
@pytest.mark.parametrize("counting_ranks", [[1], [0, 1]])
def test_only_ranks_that_compute_losses_need_a_count(counting_ranks):
    task = float_task(8)
    counted = replace(task, options={"count": weighted}).reference(4)[0].loss

    def case(wires):
        options = {"count": weighted} if wires.rank in counting_ranks else {}
        return step_task(pipeline_of(wires, task, **options), task).result.loss

    assert all(torch.equal(loss, counted) for loss in on_ranks(2, case))
    assert not torch.equal(counted, task.reference(4)[0].loss)


def test_either_name_of_a_tied_pair_may_come_first():
    task = float_task(8)

    def case(wires):
        tied = [TIED[::-1] if wires.rank else TIED]
        return step_task(pipeline_of(wires, task, tied=tied), task).gradients

    first, last = on_ranks(2, case)

    assert torch.equal(first[TIED[0]], last[TIED[1]])


def test_a_pipeline_is_equal_to_one_process_in_whichever_order_messages_arrive():
    task = token_task(7)

    def case(wires):
        with pipeline_of(wires, task, "zb-h1") as pipeline:
            outcomes = [step_task(pipeline, task) for _ in range(2)]
        return outcomes[0]

    expected = task.reference(4)
    found = {seed: difference(on_ranks(3, case, connect=ordered(seed)), expected) for seed in range(8)}
    assert {seed: wrong for seed, wrong in found.items() if wrong} == {}
