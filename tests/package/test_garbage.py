"""Garbage stays while somebody wants it to."""

import gc

import pytest

from penstock.garbage import garbage_left


def test_nothing_is_collected_until_the_last_is_out():
    with garbage_left():
        with garbage_left():
            assert not gc.isenabled()
        assert not gc.isenabled()
    assert gc.isenabled()


def test_an_error_does_not_leave_it_off():
    with pytest.raises(ZeroDivisionError), garbage_left():
        _ = 1 / 0

    assert gc.isenabled()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with garbage_left():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
