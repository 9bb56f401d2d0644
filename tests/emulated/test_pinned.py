"""The host's access to pinned memory while a copy still needs it is seen, with both lines."""

import ctypes
import platform

import pytest
import torch

from tests.emulated.checker import PINNED, UNORDERED
from tests.emulated.scenarios import POLICIES

pytestmark = pytest.mark.emulated
CAN_STEP = platform.machine() == "x86_64"
"""Whether a page of pinned memory may be opened for one instruction."""
all_policies = pytest.mark.parametrize(("policy", "seed"), POLICIES)


def _download(rank, num_ranks, waits):
    values = torch.full((4,), 2.0, device="emu")
    staging = torch.zeros(4, pin_memory=True)
    staging.copy_(values, non_blocking=True)
    dropped = torch.ones(4).pin_memory().to("emu", non_blocking=True)  # a copy keeps its pinned source
    if waits:
        torch.accelerator.synchronize()
        assert dropped.cpu().tolist() == [1.0] * 4
    return staging.tolist()


@all_policies
def test_a_download_that_is_read_too_early_is_found_and_gives_no_plausible_number(emulated, policy, seed):
    assert emulated.run(_download, True, policy=policy, seed=seed) == [[2.0] * 4]

    outcome = emulated.attempt(_download, False, policy=policy, seed=seed)
    (report,), ((number, *_),) = outcome.reports, outcome.results
    assert (report.kind, report.operations) == (PINNED, ("copy to the host", "the host"))
    assert policy != "lazy" or number != number  # NaN
    assert report.text.count("tests/emulated/test_pinned.py:") == 2


def _upload(rank, num_ranks, waits):
    staging = torch.ones(4).pin_memory()
    values = staging.to("emu", non_blocking=True)
    assert staging.sum().item() == 4.0  # the host may read what is being uploaded
    if waits:
        torch.accelerator.current_stream().synchronize()
    staging.fill_(9.0)
    return values.cpu().tolist()


@all_policies
def test_an_upload_whose_source_changes_too_early_is_found(emulated, policy, seed):
    assert emulated.run(_upload, True, policy=policy, seed=seed) == [[1.0] * 4]

    (report,) = emulated.attempt(_upload, False, policy=policy, seed=seed).reports
    assert (report.kind, report.operations) == (PINNED, ("copy to the device", "the host"))
    assert report.text.count("_upload") == 2


def _write_the_other_half(rank, num_ranks, begin):
    staging = torch.ones(8).pin_memory()
    values = torch.empty(4, device="emu")
    values.copy_(staging[:4], non_blocking=True)
    staging[4:].fill_(5.0)  # on the same page
    staging[begin:].fill_(6.0)
    return values.cpu().tolist()


def test_the_free_part_of_a_page_may_be_written_and_the_needed_one_behind_it_may_not(emulated):
    assert emulated.run(_write_the_other_half, 4) == [[1.0] * 4]

    (report,) = emulated.attempt(_write_the_other_half, 3, policy="lazy").reports

    assert report.kind == PINNED
    assert report.text.count("_write_the_other_half") == 2 if CAN_STEP else "has changed what" in report.text


def _write_across(rank, num_ranks):
    staging = torch.ones(16, dtype=torch.uint8).pin_memory()
    values = torch.empty(8, dtype=torch.uint8, device="emu")
    values.copy_(staging[8:], non_blocking=True)
    ctypes.memset(staging.data_ptr(), 6, 16)  # with one instruction, which begins in the free part
    return values.cpu().tolist()


def test_bytes_that_an_instruction_changes_beyond_its_first_are_found_when_the_copy_runs(emulated):
    (report,) = emulated.attempt(_write_across, policy="lazy").reports

    assert report.kind == PINNED
    assert "the host has changed what" in report.text


def _two_downloads(rank, num_ranks, waits):
    found, copied = torch.zeros(2, pin_memory=True), torch.Event("emu")
    for number in range(2):
        found[number : number + 1].copy_(torch.full((1,), number + 2.0, device="emu"), non_blocking=True)
        if number == 0 or waits:
            copied.record()
    copied.synchronize()
    return found[0].item(), found[1].item(), found.tolist()


@pytest.mark.skipif(not CAN_STEP, reason="needs a processor that stops behind one instruction")
def test_a_download_is_found_behind_a_read_of_another_one_on_its_page(emulated):
    assert emulated.run(_two_downloads, True) == [(2.0, 3.0, [2.0, 3.0])]

    (report,) = emulated.attempt(_two_downloads, False).reports
    assert (report.kind, report.operations) == (PINNED, ("copy to the host", "the host"))


def _there_and_back(rank, num_ranks, waits):
    staging, side = torch.zeros(4, pin_memory=True), torch.Stream("emu")
    values = torch.full((4,), 3.0, device="emu")
    staging.copy_(values, non_blocking=True)
    if waits:
        side.wait_stream(torch.accelerator.current_stream())
    with side:
        again = torch.empty(4, device="emu")
        again.copy_(staging, non_blocking=True)
        return again.cpu().tolist()


def test_copies_of_two_streams_by_way_of_pinned_memory_must_be_ordered(emulated):
    assert emulated.run(_there_and_back, True) == [[3.0] * 4]

    (report,) = emulated.attempt(_there_and_back, False).reports
    assert report.kind == UNORDERED
