"""A wish that training stops."""

from penstock.train.stopping import StopRequest


def test_a_loop_looks_within_its_block_alone():
    stop = StopRequest()
    assert (stop.limit_s, stop.is_requested) == (None, False)

    with stop.watched(3.0):
        assert stop.limit_s == 3.0
        stop.request()

    assert (stop.limit_s, stop.is_requested) == (None, True)
