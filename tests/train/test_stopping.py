"""A wish that training stops, and a held-out loss that does not fall any more."""

import sys

import pytest

from penstock.errors import PipelineError
from penstock.train.stopping import EarlyStop, StopRequest, refusing_exit


def test_a_loop_looks_within_its_block_alone():
    stop = StopRequest()
    assert (stop.limit_s, stop.is_requested) == (None, False)

    with stop.watched(3.0):
        assert stop.limit_s == 3.0
        stop.request()

    assert (stop.limit_s, stop.is_requested) == (None, True)


def test_an_exit_of_user_code_is_a_failure_with_its_place():
    text = r"^step 3: sys.exit\(0\) at .*test_stopping.py:\d+ ended the run"
    with pytest.raises(PipelineError, match=text), refusing_exit("step 3"):
        sys.exit(0)


def test_it_ends_after_so_many_evaluations_in_a_row_without_a_lower_loss():
    stop = EarlyStop(2)

    assert [stop.note(loss) for loss in (3.0, None, 3.5, 2.9, None, 2.9, 2.95)] == [False] * 6 + [True]
    assert stop.describe() == "2 evaluations in a row without a held-out loss below 2.9000"


def test_without_patience_it_never_ends():
    stop = EarlyStop(0)

    assert not any(stop.note(loss) for loss in (1.0, 2.0, 3.0, 4.0))
