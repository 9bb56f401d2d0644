"""What the proof accepts ends on the emulated device, by NCCL's rules; what it refuses hangs, at the row that it names.

A failure says the seed; `draw(seed)` makes its program again.
"""

from collections import Counter

import pytest

from tests.emulated.transport_models import MODELS, disagreements, draw, run_messages

pytestmark = [pytest.mark.emulated, pytest.mark.slow]

NUM_BLOCKS = 4
NUM_OF_BLOCK = 50
NUM_OF_FULL_BLOCK = 250


def run(emulated, drawn):
    return emulated.attempt(
        run_messages,
        drawn.program,
        drawn.model,
        drawn.host_waits,
        num_ranks=len(drawn.program),
        policy=drawn.policy,
        seed=drawn.seed,
    )


@pytest.mark.timeout(600)  # of as many as a full run draws
@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_the_proof_and_the_device_agree_on_random_programs(emulated, is_full, block):
    """200 programs, and 1,000 in `make test-full`."""
    found, counts = [], Counter()
    for number in range(NUM_OF_FULL_BLOCK if is_full else NUM_OF_BLOCK):
        drawn = draw(block * NUM_OF_FULL_BLOCK + number)
        differences = disagreements(drawn, run(emulated, drawn))
        counts[drawn.model, bool(drawn.violations)] += 1
        if differences:
            found.append("\n".join([str(drawn), *differences, *map(str, drawn.violations)]))

    assert not found, "\n\n".join(found)
    assert all(counts[model, is_refused] for model in MODELS for is_refused in (False, True))
