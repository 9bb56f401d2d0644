"""A copy is ordered behind what is queued, and before what comes behind its wait; the host waits for none."""

import pytest
import torch

from penstock.execute.stages.copy_stream import copy_stream_of


def test_a_device_that_computes_at_once_has_no_stream_for_copies():
    assert copy_stream_of(torch.device("cpu")) is None
    assert copy_stream_of(torch.device("meta"), one_stream=True) is None


def to_the_host_and_back(device, one_stream):
    """Copy what was queued a moment ago to the host, overwrite it, and bring it back."""
    copies, finished = copy_stream_of(device, one_stream=one_stream), []
    values = torch.ones(1000, device=device)
    values += 1
    on_host = torch.empty(1000, pin_memory=True)
    leaving = copies.launch(lambda: on_host.copy_(values, non_blocking=True), lambda: finished.append("left"))
    assert finished == []
    leaving.wait()
    values.zero_()
    arriving = copies.launch(lambda: values.copy_(on_host, non_blocking=True), lambda: finished.append("back"))
    arriving.wait()
    values *= 3
    return finished, values.cpu().unique().tolist()


@pytest.mark.feature("H1")
@pytest.mark.parametrize("one_stream", [False, True])
def test_what_was_queued_before_a_copy_is_copied_and_what_comes_behind_its_wait_finds_it(on_device, one_stream):
    assert on_device(to_the_host_and_back, one_stream) == (["left", "back"], [6.0])


def failing_copy(device):
    """Queue a copy, and fail before the next one."""
    copies, values = copy_stream_of(device), torch.ones(1000, device=device)
    on_host = torch.empty(1000, pin_memory=True)

    def copy():
        on_host.copy_(values, non_blocking=True)
        raise MemoryError("no more pinned memory")

    with pytest.raises(MemoryError):
        copies.launch(copy, lambda: None)
    values.zero_()  # ordered behind the copy that was queued
    torch.accelerator.synchronize()
    return on_host.unique().tolist()


def test_copies_before_one_that_cannot_be_queued_are_ordered_all_the_same(on_device):
    assert on_device(failing_copy) == [1.0]
