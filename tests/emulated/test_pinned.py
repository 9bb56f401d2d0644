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
    if waits:
        torch.accelerator.synchronize()
    return staging.tolist()


@all_policies
def test_a_download_that_is_read_too_early_is_found(emulated, policy, seed):
    assert emulated.run(_download, True, policy=policy, seed=seed) == [[2.0] * 4]

    (report,) = emulated.attempt(_download, False, policy=policy, seed=seed).reports
    assert (report.kind, report.operations) == (PINNED, ("copy to the host", "the host"))
    assert report.text.count("tests/emulated/test_pinned.py:") == 2


def test_whoever_reads_too_early_sees_no_plausible_number(emulated):
    ((first, *_),) = emulated.attempt(_download, False, policy="lazy").results

    assert first != first  # NaN


def _upload(rank, num_ranks, waits):
    staging = torch.ones(4).pin_memory()
    values = staging.to("emu", non_blocking=True)
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


def _read_while_uploaded(rank, num_ranks):
    staging = torch.ones(4).pin_memory()
    values = staging.to("emu", non_blocking=True)
    total = staging.sum().item()
    return total, values.cpu().tolist()


def test_the_host_may_read_what_is_being_uploaded(emulated):
    assert emulated.run(_read_while_uploaded) == [(4.0, [1.0] * 4)]


def _write_the_other_half(rank, num_ranks, begin):
    staging = torch.ones(8).pin_memory()
    values = torch.empty(4, device="emu")
    values.copy_(staging[:4], non_blocking=True)
    staging[4:].fill_(5.0)  # on the same page
    staging[begin:].fill_(6.0)
    return values.cpu().tolist()


def test_the_free_part_of_a_page_may_be_written(emulated):
    assert emulated.run(_write_the_other_half, 4) == [[1.0] * 4]


def test_the_needed_part_of_a_page_may_not_be_written_behind_the_free_one(emulated):
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
@all_policies
def test_a_download_is_found_behind_a_read_of_another_one_on_its_page(emulated, policy, seed):
    assert emulated.run(_two_downloads, True, policy=policy, seed=seed) == [(2.0, 3.0, [2.0, 3.0])]

    (report,) = emulated.attempt(_two_downloads, False, policy=policy, seed=seed).reports
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


@all_policies
def test_copies_of_two_streams_by_way_of_pinned_memory_must_be_ordered(emulated, policy, seed):
    assert emulated.run(_there_and_back, True, policy=policy, seed=seed) == [[3.0] * 4]

    (report,) = emulated.attempt(_there_and_back, False, policy=policy, seed=seed).reports
    assert report.kind == UNORDERED


def _drop_the_source(rank, num_ranks):
    values = torch.ones(4).pin_memory().to("emu", non_blocking=True)
    return values.cpu().tolist(), torch.empty(3, pin_memory=True).is_pinned()


def test_a_copy_keeps_its_pinned_source(emulated):
    assert emulated.run(_drop_the_source) == [([1.0] * 4, True)]


def _pageable(rank, num_ranks):
    source = torch.ones(4)
    values = source.to("emu", non_blocking=True)
    source.fill_(9.0)
    return values.cpu().tolist()


def test_the_host_waits_for_copies_of_pageable_memory(emulated):
    outcome = emulated.attempt(_pageable)

    assert outcome.results == [[1.0] * 4]
    assert outcome.host_waits == {"copy to the device": 1, "copy to the host": 1}
