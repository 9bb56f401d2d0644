"""The log tells the plan at INFO and every message at DEBUG, and costs nothing where nobody reads it."""

import logging
import re

import pytest

from penstock.execute.observing.log import log_plan
from penstock.schedules import build
from tests.support.local_pipelines import float_task, on_pipelines, step_task, token_task


def lines(caplog, level):
    return [record.getMessage() for record in caplog.records if record.name == "penstock" and record.levelno == level]


OF_1F1B, OF_GPIPE = (build(name, ranks=4, microbatches=8) for name in ("1f1b", "gpipe"))


@pytest.mark.feature("A17")
@pytest.mark.parametrize(
    ("schedule", "rank", "stages", "counts"),
    [
        (OF_1F1B, 0, "4 stages, of which it holds 0", (4, 8, 4)),
        (OF_1F1B, 3, "4 stages, of which it holds 3", (1, 14, 1)),
        (OF_GPIPE, 0, "4 stages, of which it holds 0", (8, 0, 8)),
        (build("gpipe", ranks=2, microbatches=8, forward_only=True), 0, "2 stages, of which it holds 0", (8, 0, 0)),
        (build("interleaved-1f1b", ranks=2, microbatches=8), 1, "4 stages, of which it holds 1, 3", (3, 26, 3)),
    ],
    ids=["first rank", "last rank", "gpipe", "without backwards", "two stages"],
)
def test_the_plan_is_told_at_info_and_its_phases_at_debug(caplog, schedule, rank, stages, counts):
    caplog.set_level(logging.DEBUG, "penstock")

    log_plan(schedule, rank)

    plan = f"rank {rank} of {schedule.num_ranks}: {schedule.name}, 8 microbatches, 1 slice, {stages}"
    assert lines(caplog, logging.INFO) == [plan]
    assert lines(caplog, logging.DEBUG) == [
        "rank {}: {} actions in warm-up, {} steady, {} in cool-down".format(rank, *counts)
    ]


@pytest.mark.feature("A17")
def test_every_message_is_told_at_debug(caplog):
    task = float_task(4)

    with caplog.at_level(logging.DEBUG, "penstock"):
        on_pipelines(2, task, lambda pipeline: step_task(pipeline, task), num_microbatches=2)

    told = [line for line in lines(caplog, logging.DEBUG) if line.startswith("rank 1, step 0: ")]
    assert [line.removeprefix("rank 1, step 0: ") for line in told] == [
        "1RECV_F0 posted, from rank 0",
        "1RECV_F1 posted, from rank 0",
        "1RECV_F0 arrived, from rank 0",
        "1SEND_B0 posted, to rank 0",
        "1RECV_F1 arrived, from rank 0",
        "1SEND_B1 posted, to rank 0",
    ]


@pytest.mark.feature("H9")
def test_norms_are_told_per_parameter_and_once_over_all_ranks(caplog):
    task = token_task(8)

    def case(pipeline):
        step_task(pipeline, task)
        return {name: (parameter, parameter.grad) for name, parameter in pipeline.named_parameters()}

    with caplog.at_level(logging.DEBUG, "penstock"):
        held = on_pipelines(2, task, case, debug="values", tied=[("0.weight", "4.weight")])

    once = {**held[1], **held[0]}
    del once["4.weight"]  # the copy of 0.weight
    assert norms_in(lines(caplog, logging.INFO), "step 0: ") == pytest.approx(norms(once.values()), rel=1e-5)
    told = norms_in(lines(caplog, logging.DEBUG), "rank 1, step 0: 4.weight: ")
    assert told == pytest.approx(norms([held[1]["4.weight"]]), rel=1e-5)


def norms(pairs):
    """Return the norm of all parameters, and of all gradients."""
    columns = zip(*pairs, strict=True)
    return [sum(float(tensor.detach().square().sum()) for tensor in column) ** 0.5 for column in columns]


def norms_in(told, opening):
    [line] = [line for line in told if line.startswith(opening)]
    return [float(number) for number in re.findall(r"norm ([0-9.e-]+)", line)]
