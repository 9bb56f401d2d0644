"""What several tests of moving/ need."""

import pytest

from tests.ranks import RankPool


@pytest.fixture(scope="module")
def pool():
    """Two processes, which a file of tests shares."""
    with RankPool(2) as pool:
        yield pool
