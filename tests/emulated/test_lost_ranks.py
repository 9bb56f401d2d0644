"""A process that is killed while the devices of others wait for it is named in time."""

import signal

import pytest

from tests.emulated.failing_steps import Failing
from tests.emulated.lost_ranks import lose_a_rank
from tests.emulated.rank_processes import processes

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

DEADLINE_S = 1.0
CULPRIT = 1


@pytest.mark.feature("X6")
@pytest.mark.parametrize(("place", "run_ahead", "instruction"), [("forward", None, "1F2"), ("backward", 2, "1B2")])
def test_a_killed_rank_is_named_by_the_deadline(emulated_is_there, place, run_ahead, instruction):
    failing = Failing("dies", place, CULPRIT, run_ahead=run_ahead, deadline_s=DEADLINE_S)
    with processes(failing.num_ranks) as pool:
        outcome = pool.attempt(lose_a_rank, failing, timeout_s=60)

    assert outcome.exit_codes == {CULPRIT: -signal.SIGKILL}, str(outcome)
    assert sorted(outcome.results) == [0, 2], str(outcome)
    for early_reports, ended, next_error in outcome.results.values():
        assert early_reports == []
        assert (ended.blamed, ended.error) == (CULPRIT, "PeerLost")
        assert f"is gone, in {instruction}" in ended.text
        assert "the ranks could not start afresh" in next_error
