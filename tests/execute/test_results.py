"""Every rank gets every loss, bit for bit, whatever the type."""

import numpy as np
import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.loss import LossShares
from penstock.execute.messages import Messenger
from penstock.execute.microbatch import Microbatch, Stack, Sum
from penstock.execute.results import collect_outputs, collector_of, merge_slices_and_microbatches, share_losses
from penstock.execute.step import Step
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.placement import Placement
from tests.local_pipelines import on_ranks

CPU = torch.device("cpu")


def share(wires, losses, weights, holders=(-1,)):
    step = step_of(len(losses), weights)
    for microbatch, loss in enumerate(losses):
        if holders[microbatch % len(holders)] % wires.num_ranks == wires.rank:
            step.losses[microbatch, 0] = loss
    return share_losses(wires, step, CPU)


def step_of(num_microbatches, weights, fractions=(1.0,)):
    slices = [[Microbatch(index, (), {}, None, 1) for _ in fractions] for index in range(num_microbatches)]
    return Step(slices, LossShares(weights, [fractions] * num_microbatches), None, keeps_outputs=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_losses_arrive_with_their_bits_and_type(dtype):
    losses = [(torch.rand(3, dtype=torch.float64) / 3).to(dtype)[index] for index in range(3)]

    for result in on_ranks(3, share, losses, [0.25, 0.25, 0.5]):
        assert all(map(torch.equal, result.losses, losses))
        assert result.loss.dtype == dtype
        assert torch.equal(result.loss, losses[0] * 0.25 + losses[1] * 0.25 + losses[2] * 0.5)


def test_losses_may_lie_on_different_ranks():
    losses = [torch.tensor(1.5), torch.tensor(2.5)]

    for result in on_ranks(2, share, losses, [0.5, 0.5], (0, 1)):
        assert [float(loss) for loss in result.losses] == [1.5, 2.5]
        assert float(result.loss) == 2.0


def test_a_loss_that_is_not_finite_stays_so_unless_it_weighs_nothing():
    losses = [torch.tensor(float("nan")), torch.tensor(2.0), torch.tensor(float("inf"))]

    weightless = on_ranks(2, share, losses[:2], [0.0, 1.0])
    weighed = on_ranks(2, share, losses[1:], [0.5, 0.5])

    assert [float(result.loss) for result in weightless] == [2.0, 2.0]
    assert all(result.losses[0].isnan() for result in weightless)
    assert [float(result.loss) for result in weighed] == [float("inf")] * 2


def test_without_losses_there_is_no_loss():
    results = on_ranks(2, lambda wires: share_losses(wires, step_of(2, [0.5, 0.5]), CPU))

    assert [(result.loss, result.losses, result.outputs) for result in results] == [(None, [], None)] * 2


def test_the_loss_of_a_microbatch_is_made_of_those_of_its_slices():
    def case(wires):
        step = step_of(2, [0.25, 0.75], [0.5, 0.5, 0.0])
        if wires.rank == 1:
            found = [[1.0, 3.0, float("nan")], [2.0, 6.0, 9.0]]
            step.losses.update({(b, q): torch.tensor(found[b][q]) for b in range(2) for q in range(3)})
        return share_losses(wires, step, CPU)

    for result in on_ranks(2, case):
        assert [float(loss) for loss in result.losses] == [2.0, 4.0]
        assert float(result.loss) == 3.5


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
