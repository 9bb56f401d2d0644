"""`forward-only`: its order as recorded from another system."""

import pytest

from tests.schedules.golden import built, recorded


@pytest.mark.feature("B11")
@pytest.mark.parametrize(("key", "ranks"), recorded("torch", "exec/forward_only"))
def test_the_order_is_what_torch_runs(key, ranks):
    assert built("forward-only", key) == ranks
