"""One line each: the largest cause, a busy machine, and what to do next."""

from dataclasses import replace

import pytest

from penstock.cli.conclusion import busy_line, headline, next_step
from penstock.ir.action import Kind
from penstock.schedules import build
from penstock.searching.advice import advice_of
from penstock.searching.what_if import Change, Setting
from penstock.simulation.causes import Cause
from penstock.simulation.costs.costs import Spread
from penstock.simulation.losses import Loss
from penstock.train.watching.diagnosis import diagnose
from tests.cli.recorded_steps import recorded_step

SETTING = Setting(batch_size=16, family="1f1b", stages_per_rank=1)
SPLIT = Change("split", "split 4,3", -0.06, 0.0, ("pipeline.split=[4,3]",))
ZBV = Change("schedule", "zbv", -0.2, 0.8, ("pipeline.schedule=zbv",))
CHIMERA = Change("schedule", "chimera", -0.3, 0.4, ("pipeline.schedule=chimera",), copies_weights=True)
SMALL = Change("schedule", "gpipe", -0.002, 0.5, ("pipeline.schedule=gpipe",))
NOISY = (Spread(Kind.FORWARD, 1, 0.010, 0.0041),)


def diagnosis_of(*changes, spreads=(), schedule=None, **step):
    found = diagnose(recorded_step(schedule, **step), SETTING)
    return replace(found, changes=list(changes), spreads=spreads)


def line_of(*changes, **more):
    diagnosis = diagnosis_of(*changes, **more)
    return next_step(diagnosis, advice_of(diagnosis.changes))


def test_the_headline_names_cause_share_and_culprit():
    assert headline(diagnosis_of(forward_s=(1.0, 1.0, 1.0, 2.0))) == (
        "largest cause: imbalance, 26.2 % of the step (stage 3 on rank 3, 1.60 times the mean); "
        "then dependency, 18.8 % of the step (the order of 1f1b)"
    )


COMMAND = "penstock train RUN.toml --set 'pipeline.split=[4,3]' (split 4,3: 6.0 % less step time"
MORE = ". For more memory: zbv saves 20.0 % of the step with 80.0 % more activations"


UNLESS = "nothing, unless memory is left over"


@pytest.mark.parametrize(
    ("microbatches", "changes", "expected"),
    [
        # Data loading costs 2.8 %, which is less; with 32 microbatches nothing else costs 2 %.
        (8, [SPLIT, SMALL], f"{COMMAND})"),
        (8, [SPLIT, ZBV], f"{COMMAND}){MORE}"),
        (8, [replace(SPLIT, memory_change=0.05)], f"{COMMAND}, 5.0 % more activations)"),
        (32, [SMALL], "nothing; of 1 simulated change none saves 2 % of the step"),
        (32, [ZBV, CHIMERA], f"{UNLESS}: zbv saves 20.0 % of the step with 80.0 % more activations"),
        (
            32,
            [CHIMERA],
            f"{UNLESS}: chimera saves 30.0 % of the step with a second copy of the weights and 40.0 % more activations",
        ),
    ],
)
def test_the_last_line_gives_the_command_what_it_saves_and_what_more_memory_would(microbatches, changes, expected):
    schedule = build("1f1b", ranks=4, microbatches=microbatches)

    assert line_of(*changes, schedule=schedule) == f"do next: {expected}"


def test_a_cause_that_costs_more_than_the_best_change_saves_comes_first():
    """Rank 1 comes 60 s late for a step of 33 s."""
    line = line_of(SPLIT, late_s=60.0)

    assert line.startswith("do next: against straggler (62.5 % of the step, rank 1, late for the step): look for other")
    assert "; then penstock train RUN.toml --set 'pipeline.split=[4,3]'" in line


def test_a_busy_machine_is_named_with_its_figure_to_measure_again_and_an_idle_one_is_not_mentioned():
    line = line_of(SPLIT, spreads=NOISY)

    assert line.startswith("do next: measure again on an idle machine. If the result is the same: penstock train")
    assert busy_line(NOISY, (0, 3)) == (
        "busy machine: the middle half of equal computations of stage 1 on rank 3 spreads over 41.0 % of their median "
        "(expected: under 15 %); measure again on an idle machine"
    )
    for spreads in ((), (Spread(Kind.FORWARD, 0, 0.010, 0.0014),)):
        assert busy_line(spreads, (0,)) == ""


@pytest.mark.parametrize(("family", "has_fewer"), [("1f1b", False), ("interleaved-1f1b", True)])
def test_fewer_stages_are_advised_only_where_a_rank_has_several(family, has_fewer):
    found = diagnose(recorded_step(build(family, ranks=4, microbatches=8)), Setting(batch_size=16))
    transfer = Loss(Cause.TRANSFER, 0.2 * found.step_s, "rank 0 to rank 1")

    line = next_step(replace(found, losses=[transfer]), advice_of([SMALL]))

    assert line.startswith("do next: against transfer (20.0 % of the step, rank 0 to rank 1): use a faster link")
    assert line.endswith("faster link between neighbours" + ", or fewer stages per rank" * has_fewer)
