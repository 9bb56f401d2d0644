"""The kept process returns results and errors, is bounded in time, and is clean for every scenario."""

import os
import threading

import pytest
import torch

from tests.emulated.kept_process import ScenarioFailed

pytestmark = pytest.mark.emulated


def _process(rank, num_ranks, given):
    return os.getpid(), rank, num_ranks, given, torch.accelerator.current_device_index()


def test_ranks_are_threads_of_one_process_that_is_kept(emulated):
    first, second = [emulated.run(_process, "x", num_ranks=2) for _ in range(2)]

    assert first == second
    assert [result[1:] for result in first] == [(rank, 2, "x", rank) for rank in range(2)]
    assert os.getpid() not in {result[0] for result in first}
    assert torch._C._get_privateuse1_backend_name() == "privateuseone", "this process must not have the device"


def _raise_on_one(rank, num_ranks):
    if rank == 1:
        raise ValueError("on purpose")
    values = torch.empty(2, device="emu")
    from tests.emulated.rank_threads import communicator

    communicator().recv([values], 1).wait()
    values.cpu()


def test_an_error_comes_with_its_traceback_and_ends_the_waits_of_other_ranks(emulated):
    outcome = emulated.attempt(_raise_on_one, num_ranks=2)

    assert list(outcome.tracebacks) == [1]
    assert 'raise ValueError("on purpose")' in outcome.tracebacks[1]
    with pytest.raises(ScenarioFailed, match="on purpose"):
        emulated.run(_raise_on_one, num_ranks=2)


def _sleep(rank, num_ranks):
    threading.Event().wait()


def _die(rank, num_ranks):
    os._exit(7)


@pytest.mark.slow
def test_a_scenario_that_does_not_end_or_ends_its_process_is_named_and_the_next_one_gets_another(emulated):
    ((before, *_),) = emulated.run(_process, "")

    with pytest.raises(ScenarioFailed, match=r"_sleep did not end in 0\.2 s"):
        emulated.run(_sleep, timeout_s=0.2)
    with pytest.raises(ScenarioFailed, match="_die ended its process with exit code 7"):
        emulated.run(_die)

    ((after, *_),) = emulated.run(_process, "")
    assert before != after
