"""What `penstock doctor` says of a step that was recorded on the simulated clock is what was planted in it.

Even stages take 1 s for a forward and 2 s for a backward, and no other planted seconds:

    gpipe   rank 0   F0 F1 F2 F3 .  .  .  B0=== B1=== B2=== B3===      rank 0 waits for 3 s in the middle,
            rank 1   .  F0 F1 F2 F3 B0=== B1=== B2=== B3=== .  .       rank 1 for 1 s at the begin and 2 s at the end
"""

from dataclasses import dataclass, field, replace

import pytest

import penstock as ps
from penstock.cli.conclusion import headline
from penstock.searching.what_if import Setting
from penstock.simulation.causes import NAME_OF_CAUSE, Cause
from penstock.train.watching.diagnosis import diagnose
from tests.emulated.timed_pipelines import MESSAGE_BYTES, Plan, recorded_of, timed_step

pytestmark = pytest.mark.emulated

TOLERANCE = 0.001
"""Of the makespan."""
ORDER = [{"dependency": 3.0}, {"dependency": 1.0, "synchronisation": 2.0}]
"""The idle time of both orders, gpipe and 1f1b, where nothing is planted."""


def costs_of(forward_s, *, transfer_s=0.0, **options):
    """Stages whose input gradients and weight gradients take as long as their forwards."""
    forward_s = tuple(forward_s)
    return ps.Costs(
        forward_s=forward_s,
        backward_input_s=forward_s,
        backward_weight_s=forward_s,
        message_bytes=(MESSAGE_BYTES,),
        bandwidth_bytes_per_s=MESSAGE_BYTES / transfer_s if transfer_s else float("inf"),
        **options,
    )


EVEN = Plan("gpipe", 2, 4, costs_of([1.0, 1.0]))
OF_1F1B = replace(EVEN, family="1f1b")
REDUCING = Plan("interleaved-1f1b", 2, 4, costs_of([1.0] * 4, reduce_s=(0.0, 0.0, 3.0, 0.0)))
LATE, SLOW = "which begins later than it could", "slower than it usually is"


@dataclass(frozen=True)
class Case:
    """What is planted, and what is to be found."""

    plan: Plan
    idle_s: list
    """By rank."""
    cause: Cause
    costs_s: float
    """How much shorter the step would be without the cause; of the order, what the mean rank is idle for it alone."""
    culprit: str
    memory_limit: int | None = None
    others_s: dict = field(default_factory=dict)
    """What other causes cost."""


CASES = {
    "warm-up and drain of gpipe": Case(EVEN, ORDER, Cause.DEPENDENCY, 3.0, "gpipe"),
    "warm-up and drain of 1f1b": Case(OF_1F1B, ORDER, Cause.DEPENDENCY, 3.0, "1f1b"),
    # Rank 0 holds F0 and F1 when F2 could run, from 2 to 4 s.
    "memory": Case(
        OF_1F1B, [{"dependency": 1.0, "memory limit": 2.0}, ORDER[1]], Cause.DEPENDENCY, 3.0, "1f1b", memory_limit=2
    ),
    # Rank 1 computes from 1 to 25 s without a break. Above the mean stage are 0.5 s of each of its forwards and 1 s of
    # each of its backwards; rank 0 waits through these of one forward and four backwards.
    "slow stage": Case(
        replace(OF_1F1B, costs=costs_of([1.0, 2.0])),
        [{"dependency": 10.5, "imbalance": 4.5}, ORDER[1]],
        Cause.IMBALANCE, 4.5, "stage 1 on rank 1, 1.33 times the mean", others_s={Cause.DEPENDENCY: 4.5},
    ),
    # One message there, one back: all others come while their rank computes.
    "transfer": Case(
        replace(EVEN, costs=costs_of([1.0, 1.0], transfer_s=0.5)),
        [{"dependency": 3.5, "transfer": 0.5}, {"dependency": 1.0, "transfer": 0.5, "synchronisation": 2.5}],
        Cause.TRANSFER, 1.0, "rank 0 to rank 1, 500 ms a message",
    ),
    # The host needs 0.4 s for each computation, of which the device runs for 0.25 s: 7 of 8 wait, and the first one's
    # launch is before the step.
    "launch": Case(
        Plan("gpipe", 1, 4, replace(costs_of([0.125]), forward_s=(0.25,)), launch_s=0.4),
        [{"launch": 7 * 0.15, "synchronisation": 0.4}], Cause.LAUNCH, 7 * 0.15, "",
    ),
    "host that stops within a layer": Case(
        replace(EVEN, run_ahead=1, stalls_inside_s={(0, 3): 2.5}),
        [ORDER[0], {"dependency": 1.0, "straggler": 2.5, "synchronisation": 2.0}],
        Cause.STRAGGLER, 2.5, f"rank 0, {SLOW}",
    ),
    "slow computation": Case(
        replace(EVEN, slow_s={(1, 2): 1.5}),
        [{"dependency": 3.0, "straggler": 1.5}, ORDER[1]], Cause.STRAGGLER, 1.5, f"rank 1, {SLOW}",
    ),
    # The host of rank 0 is 2 s ahead of its device when it begins to wait for 5 s.
    "data of a microbatch": Case(
        replace(EVEN, data_s={2: 5.0}),
        [{"dependency": 3.0, "data loading": 3.0}, {"dependency": 2.0, "data loading": 2.0, "synchronisation": 2.0}],
        Cause.DATA, 3.0, "rank 0, for microbatches within the step",
    ),
    "batch of rank 1": Case(
        replace(EVEN, loading_s={1: 5.0}),
        [{"dependency": 3.0, "data loading": 5.0}, {**ORDER[1], "data loading": 5.0}], Cause.DATA, 5.0, "rank 1",
    ),
    "rank that comes late to the step": Case(
        replace(EVEN, late_s={1: 5.0}),
        [{"dependency": 3.0, "straggler": 5.0}, ORDER[1]], Cause.STRAGGLER, 5.0, "rank 1, late for the step",
    ),
    # Rank 0 reduces its second stage before the last two backwards of its first one; rank 1 has ended by then.
    "reduction that holds its rank up": Case(
        replace(REDUCING, has_blocking_reductions=True),
        [{"dependency": 3.0, "synchronisation": 3.0}, {"dependency": 1.0, "synchronisation": 5.0}],
        Cause.SYNCHRONISATION, 3.0, "", others_s={Cause.STRAGGLER: 0.0},
    ),
    "reduction beside its rank": Case(REDUCING, ORDER, Cause.DEPENDENCY, 3.0, "interleaved-1f1b"),
}  # fmt: skip


QUICK = ("warm-up and drain of gpipe", "slow stage", "transfer", "launch", "host that stops within a layer")
QUICK += ("data of a microbatch", "reduction that holds its rank up")
"""One case for each cause."""


def diagnosis_of(emulated, plan, memory_limit=None):
    ranks = emulated.run(timed_step, plan, num_ranks=plan.num_ranks, timeout_s=60)
    return diagnose(recorded_of(ranks), Setting(batch_size=plan.num_microbatches), memory_limit=memory_limit)


@pytest.mark.feature("H11")
@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_a_planted_cause_is_named_with_its_seconds(emulated, name):
    case = CASES[name]

    diagnosis = diagnosis_of(emulated, case.plan, case.memory_limit)

    near = TOLERANCE * diagnosis.timeline.makespan_s
    for row, idle_s in zip(diagnosis.idle.by_rank, case.idle_s, strict=True):
        found = {NAME_OF_CAUSE[cause]: row[cause] for cause in Cause if row[cause] > near}
        assert found == pytest.approx(idle_s, abs=near)
    losses = {loss.cause: loss for loss in diagnosis.losses}
    assert losses[case.cause].duration_s == pytest.approx(case.costs_s, abs=near)
    assert losses[case.cause].culprit == case.culprit
    assert NAME_OF_CAUSE[case.cause] in headline(diagnosis)
    for cause, seconds in case.others_s.items():
        assert losses[cause].duration_s == pytest.approx(seconds, abs=near)


@pytest.mark.parametrize(("run_ahead", "lead_s"), [(2, 1.0), (None, 3.0), pytest.param(1, 0.0, marks=pytest.mark.slow)])
def test_a_host_that_stops_costs_what_it_stops_for_less_its_lead(emulated, run_ahead, lead_s):
    """It stops for 2.5 s before the fourth forward, when its device has so many forwards before it still to run."""
    stopped_s = 2.5

    diagnosis = diagnosis_of(emulated, replace(EVEN, run_ahead=run_ahead, stalls_s={"0F3": stopped_s}))

    straggler = next(loss for loss in diagnosis.losses if loss.cause is Cause.STRAGGLER)
    costs_s, near = max(stopped_s - lead_s, 0.0), TOLERANCE * diagnosis.timeline.makespan_s
    assert diagnosis.idle.by_rank[0, Cause.STRAGGLER] == pytest.approx(costs_s, abs=near)
    assert straggler.duration_s == pytest.approx(costs_s, abs=near)
    if costs_s:
        assert straggler.culprit == f"rank 0, {LATE}"
