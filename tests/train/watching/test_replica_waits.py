"""What a recorded step waited for its replicas."""

from dataclasses import replace

import pytest

from penstock.ir.program import Program
from penstock.simulation import Costs, simulate
from penstock.train.watching.replica_waits import ReplicaWaits, replica_waits
from tests.simulation.blocking import with_blocking_reductions


def measured(*ranks, **costs):
    program = Program.from_csv("\n".join(row.replace(" ", ",") for row in ranks), name="replicas")
    return replace(simulate(program, Costs.uniform(**costs)), source="measured")


def test_sums_that_end_behind_the_last_computation_make_the_step_longer():
    """Rank 1 sums from 4 to 5.5, while rank 0 computes until 7, and then sums until 9."""
    timeline = measured(
        "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD",
        "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD",
        backward=2.0,
        reduce_s=(2.0, 1.5),
    )

    assert replica_waits(timeline) == ReplicaWaits(0.0, 0, 2.0, 0)


def test_sums_that_end_before_it_cost_nothing():
    timeline = measured(
        "0F0 0SEND_F0 0RECV_B0 0B0 0REDUCE_GRAD",
        "1RECV_F0 1F0 1B0 1SEND_B0 1REDUCE_GRAD",
        backward=2.0,
        reduce_s=(0.0, 1.5),
    )

    assert replica_waits(timeline).behind_s == 0.0


def test_a_gather_counts_from_when_the_rank_had_all_else():
    """The gather of stage 1 begins with 0F0, at 0, and ends at 3; rank 1 has its input at 1."""
    timeline = measured(
        "0F0 0SEND_F0 0RECV_B0 0B0",
        "1UNSHARD 1RECV_F0 1F0 1B0 1SEND_B0 1RESHARD",
        unshard_s=(3.0,),
    )

    found = replica_waits(timeline)

    assert (found.within_s, found.within_rank) == (pytest.approx(2.0), 1)
    assert found.behind_s == 0.0


def test_sums_that_hold_their_rank_up_count_within():
    program = Program.from_csv("0F0,1F0,1B0,1REDUCE_GRAD,0B0,0REDUCE_GRAD", name="held up")

    found = replica_waits(with_blocking_reductions(program, Costs.uniform(reduce_s=(0.5, 0.75))))

    assert (found.within_s, found.behind_s) == (0.75, 0.5)
