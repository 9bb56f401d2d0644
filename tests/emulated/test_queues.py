"""Operations run behind the host's back, in the order of their stream, at simulated times."""

import pytest
import torch

from tests.emulated.checker import HANG
from tests.emulated.kernels import slow
from tests.emulated.runtime import RUNTIME

pytestmark = pytest.mark.emulated


def _host_goes_on(rank, num_ranks):
    values = torch.ones(4, device="emu")
    slow(values, 3600.0)  # an hour on the simulated clock
    values += 1
    return RUNTIME.queues.num_run, values.cpu().tolist()


@pytest.mark.parametrize(("policy", "expected"), [("lazy", 0), ("eager", 3)])
def test_the_host_returns_before_a_kernel_has_run_unless_all_run_at_once(emulated, policy, expected):
    assert emulated.run(_host_goes_on, policy=policy) == [(expected, [2.0] * 4)]


def _poll(rank, num_ranks):
    values, event = torch.ones(4, device="emu"), torch.Event("emu")
    for _ in range(3):
        values += 1
    event.record()
    answers = []
    while not answers or not answers[-1]:
        answers.append(event.query())
    return answers, torch.accelerator.current_stream().query()


def test_each_query_lets_one_operation_run(emulated):
    ((answers, is_idle),) = emulated.run(_poll, policy="lazy")

    assert answers == [False] * 4 + [True]  # ones, three additions, the record
    assert is_idle


def _times(rank, num_ranks):
    begin, end = torch.Event("emu", enable_timing=True), torch.Event("emu", enable_timing=True)
    values, side = torch.ones(4, device="emu"), torch.Stream("emu")
    torch.accelerator.synchronize()
    begin.record()
    slow(values, 0.25)
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        slow(values, 0.5)
    torch.accelerator.current_stream().wait_stream(side)
    end.record()
    try:
        early = begin.elapsed_time(end)
    except RuntimeError as error:
        early = str(error)
    end.synchronize()
    return begin.elapsed_time(end), early


def test_times_are_those_of_the_simulated_clock_and_an_error_where_they_are_read_too_early(emulated):
    ((elapsed_ms, early),) = emulated.run(_times, policy="lazy")

    assert elapsed_ms == pytest.approx(750.0)
    assert "must be completed" in early


def _dies_of_an_error(rank, num_ranks):
    """The tensor is freed while Python has the error in its hands."""
    with pytest.raises(TypeError, match="expected string"):
        ord(torch.ones(4, device="emu"))
    return torch.ones(4, device="emu").cpu().tolist()


def test_a_tensor_may_die_of_an_error(emulated):
    assert emulated.run(_dies_of_an_error, timeout_s=10) == [[1.0] * 4]


def _bad_index(rank, num_ranks, does_wait):
    table, index = torch.ones(4, 2, device="emu"), torch.tensor([7], device="emu")
    torch.nn.functional.embedding(index, table)
    torch.ones(1)  # the host has not noticed
    if does_wait:
        torch.accelerator.synchronize()


def test_an_error_in_a_kernel_is_raised_where_the_host_waits_and_reported_where_it_does_not(emulated):
    (text,) = emulated.attempt(_bad_index, True).tracebacks.values()
    (report,) = emulated.attempt(_bad_index, False).reports

    assert all(part in text for part in ("index_select", "index out of range", "torch.accelerator.synchronize()"))
    assert "index out of range" in report.text


def _wait_for_ever(rank, num_ranks):
    values = torch.ones(4, device="emu")
    queue = RUNTIME.current_queue()
    RUNTIME.launch(queue, "never", None, [values], is_ready=lambda: False)
    return values.cpu()


def test_a_hang_is_reported_with_the_head_of_the_queue_and_not_waited_for(emulated):
    outcome = emulated.attempt(_wait_for_ever, hang_s=60.0, timeout_s=30)

    (report,) = outcome.reports
    assert report.kind == HANG
    assert "head of stream 0 of emu:0: never, launched at tests/emulated/test_queues.py:" in report.text
    assert "host of rank 0 waits" in report.text
