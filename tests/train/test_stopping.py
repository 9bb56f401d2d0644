"""A wish that training stops."""

import sys

import pytest

from penstock.errors import PipelineError
from penstock.train.stopping import StopRequest, refusing_exit


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
