"""`forward-only`: its order as recorded from another system."""

import pytest

from tests.schedules.golden import assert_recorded


@pytest.mark.feature("B11")
def test_the_order_is_what_torch_runs():
    assert_recorded("forward-only", "torch", "exec/forward_only")
