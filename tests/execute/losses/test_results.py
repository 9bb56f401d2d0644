"""A result says which losses there are, and has the outputs where they were asked for."""

import pickle

import numpy as np
import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.batch.microbatch import Microbatch, Stack, Sum
from penstock.execute.batch.step import Step
from penstock.execute.losses.loss import LossShares
from penstock.execute.losses.results import (
    MicrobatchLosses,
    NamedLosses,
    collect_outputs,
    collector_of,
    merge_slices_and_microbatches,
    reported_by_microbatch,
)
from penstock.execute.transport.messages import Messenger
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from tests.local_pipelines import on_ranks

CPU = torch.device("cpu")


def step_of(num_microbatches, weights, fractions=(1.0,)):
    slices = [[Microbatch(index, (), {}, None, 1) for _ in fractions] for index in range(num_microbatches)]
    return Step(slices, LossShares(weights, [fractions] * num_microbatches), None, keeps_outputs=False)


def test_a_result_says_which_losses_there_are():
    losses, named = MicrobatchLosses([torch.tensor(1.0), torch.tensor(2.0)]), NamedLosses(balance=torch.tensor(3.0))

    assert (float(losses[-1]), float(named["balance"])) == (2.0, 3.0)
    assert [float(loss) for loss in losses[1:]] == [2.0]
    for index in (2, -3):
        with pytest.raises(PipelineError, match=f"of microbatch {index}: there are those of microbatches 0 to 1"):
            _ = losses[index]
    with pytest.raises(PipelineError, match=r"no loss 'balanse': there are 'balance'. Did you mean"):
        _ = named["balanse"]
    with pytest.raises(PipelineError, match="no loss 'a': there are none with a name"):
        _ = NamedLosses()["a"]
    assert named.get("a") is None


def test_losses_travel_between_processes():
    losses, named = pickle.loads(pickle.dumps((MicrobatchLosses([1.0]), NamedLosses(a=2.0))))

    assert (type(losses), losses) == (MicrobatchLosses, [1.0])
    assert (type(named), named) == (NamedLosses, {"a": 2.0})


def test_reports_are_listed_per_microbatch_whose_loss_this_rank_has():
    step = step_of(3, [0.5, 0.25, 0.25])
    assert reported_by_microbatch(step) == []

    step.losses.update({(b, 0): torch.tensor(1.0) for b in (2, 0)})
    step.reported[2, 0] = "last"

    assert reported_by_microbatch(step) == [None, "last"]


def test_reports_of_slices_are_listed_per_microbatch():
    step = step_of(2, [0.5, 0.5], [0.5, 0.5])
    step.losses.update({(b, q): torch.tensor(1.0) for b in range(2) for q in range(2)})
    step.reported.update({(b, q): (b, q) for b in range(2) for q in range(2)})

    assert reported_by_microbatch(step) == [[(0, 0), (0, 1)], [(1, 0), (1, 1)]]


# ---- outputs

TWO_WAYS = Schedule.from_actions(
    "two ways",
    Placement.bidirectional(3),
    [[]] * 3,
    num_microbatches=4,
    num_slices=2,
    route_of_microbatch=np.array([0, 1, 1, 0]),
)


def test_outputs_of_both_routes_meet_on_the_rank_of_the_first_routes_last_stage():
    def case(wires):
        messenger = Messenger(wires, CPU)
        messenger.begin("batch")
        step = step_of(4, [0.25] * 4, [0.5, 0.5])
        mine = {0: (1, 2), 1: (), 2: (0, 3)}[wires.rank]
        step.outputs.update({(b, q): {"y": torch.tensor([[b, q]]), "rank": wires.rank} for b in mine for q in range(2)})
        collect_outputs(messenger, step, Program.from_schedule(TWO_WAYS), wires.rank)
        messenger.finish()
        return step.outputs

    first, middle, last = on_ranks(3, case)

    assert collector_of(TWO_WAYS.placement) == 2
    assert first == middle == {}
    assert {place: output["y"].tolist() for place, output in last.items()} == {
        (b, q): [[b, q]] for b in range(4) for q in range(2)
    }
    assert [last[b, 0]["rank"] for b in range(4)] == [2, 0, 0, 2]


def outputs_of(*slices):
    step = step_of(2, [0.5, 0.5], [0.5] * len(slices))
    step.outputs.update({(b, q): output for b in range(2) for q, output in enumerate(slices)})
    return step


def test_outputs_are_joined_along_the_sequence_and_then_along_the_samples():
    merged = merge_slices_and_microbatches(outputs_of(torch.zeros(3, 2, 5), torch.ones(3, 1, 5)), None, None, 1)

    assert merged.shape == (6, 3, 5)
    assert merged[:, :, 0].tolist() == [[0.0, 0.0, 1.0]] * 6


def test_outputs_without_a_sequence_get_a_dimension_of_slices():
    step = outputs_of(
        {"rows": torch.zeros(3), "n": 1, "one": torch.tensor(0.0)},
        {"rows": torch.ones(3), "n": 2, "one": torch.tensor(1.0)},
    )

    merged = merge_slices_and_microbatches(step, None, None, 1)

    assert merged["rows"].tolist() == [[0.0, 1.0]] * 6
    assert merged["one"].tolist() == [0.0, 1.0, 0.0, 1.0]
    assert merged["n"] == [[1, 1], [2, 2]]  # a list over slices of lists over microbatches


def test_outputs_are_joined_by_the_rules_of_the_caller():
    step = outputs_of(torch.tensor([1.0]), torch.tensor([2.0]))

    assert merge_slices_and_microbatches(step, Stack(), Sum(), 1).tolist() == [[3.0], [3.0]]


def test_outputs_of_slices_that_differ_in_form_are_an_error():
    with pytest.raises(PipelineError, match="the output of slice 1 has the form"):
        merge_slices_and_microbatches(outputs_of(torch.zeros(1, 1), (torch.zeros(1, 1),)), None, None, 1)
