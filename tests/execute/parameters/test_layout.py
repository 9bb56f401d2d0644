"""Parameters that every replica holds as a whole need nothing done about them; a ticket waits for both of its parts."""

from types import SimpleNamespace

import pytest

from penstock.execute.parameters.layout import Launched, ParameterLayout


def test_whole_parameters_launch_nothing():
    layout = ParameterLayout()

    layout.begin_step(is_synced=True, sums_tied=True, is_training=True)

    assert not layout.launches
    assert (layout.unshard(), layout.reduce(0, is_last=True), layout.reshard()) == (None, None, None)


@pytest.mark.parametrize("exchange", [None, 3])
@pytest.mark.parametrize("has_buffers", [False, True])
def test_a_ticket_waits_for_its_exchange_and_then_for_the_buffers(exchange, has_buffers):
    said = []
    buffers = SimpleNamespace(wait=lambda: said.append("buffers")) if has_buffers else None

    Launched(SimpleNamespace(complete=said.append), exchange, buffers).wait()

    assert said == [exchange] * (exchange is not None) + ["buffers"] * has_buffers
