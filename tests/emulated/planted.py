"""The table of planted faults of ordering and lifetime, and the call by which a scenario runs with one of them.

Those with a reason in `missed` show by wrong numbers or not at all, and do not count.
"""

from tests.emulated import (
    planted_beside,
    planted_inputs,
    planted_messages,
    planted_shards,
    planted_users,
    planted_waits,
)
from tests.emulated.planting import run_scenario_with

ALL = {
    **planted_messages.FAULTS,
    **planted_beside.FAULTS,
    **planted_inputs.FAULTS,
    **planted_users.FAULTS,
    **planted_waits.FAULTS,
    **planted_shards.FAULTS,
}
FOUND = [fault for fault in ALL.values() if not fault.missed]
MISSED = [fault for fault in ALL.values() if fault.missed]


def run_planted(rank, num_ranks, scenario, name):
    """Run a scenario on one rank with the fault of a name; with none where it is None."""
    return run_scenario_with(rank, num_ranks, scenario, None if name is None else ALL[name])
