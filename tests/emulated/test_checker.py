"""The checker reports what nothing orders, under every policy, and is silent where something does."""

import threading

import pytest
import torch

from tests.emulated.checker import FREED, REUSED, UNORDERED
from tests.emulated.scenarios import POLICIES

pytestmark = pytest.mark.emulated
all_policies = pytest.mark.parametrize(("policy", "seed"), POLICIES)


def _use_on_another_stream(rank, num_ranks, order, writes=False):
    side = torch.Stream("emu")
    values = torch.zeros(4, device="emu")
    torch.accelerator.synchronize()
    values.fill_(7.0)
    if writes:
        torch.accelerator.synchronize()
        doubled = values * 2
    if order == "event":
        event = torch.Event("emu")
        event.record()
        side.wait_event(event)
    elif order == "stream":
        side.wait_stream(torch.accelerator.current_stream())
    elif order == "host":
        torch.accelerator.synchronize()
    elif order == "early event":
        side.wait_event(early := torch.Event("emu"))  # never recorded, so there is nothing to wait for
        del early
    with side:
        found = values.zero_() if writes else (values * 2).cpu().tolist()
    torch.accelerator.current_stream().wait_stream(side)
    return doubled.cpu().tolist() if writes else found


@all_policies
@pytest.mark.parametrize("writes", [False, True], ids=["a read", "a write behind a read"])
@pytest.mark.parametrize("order", ["event", "stream", "host"])
def test_an_ordered_access_is_right_and_silent(emulated, policy, seed, order, writes):
    assert emulated.run(_use_on_another_stream, order, writes, policy=policy, seed=seed) == [[14.0] * 4]


@all_policies
@pytest.mark.parametrize("writes", [False, True], ids=["a read", "a write behind a read"])
@pytest.mark.parametrize("order", ["nothing", "early event"])
def test_a_missing_wait_is_found_with_both_lines(emulated, policy, seed, order, writes):
    outcome = emulated.attempt(_use_on_another_stream, order, writes, policy=policy, seed=seed)

    (report,) = outcome.reports
    assert report.kind == UNORDERED
    assert report.operations == (("mul.Tensor", "zero_.default") if writes else ("fill_.Scalar", "mul.Tensor"))
    assert "stream 0 of emu:0" in report.text
    assert "stream 1 of emu:0" in report.text
    assert report.text.count("tests/emulated/test_checker.py:") == 2
    assert report.text.count("_use_on_another_stream") == 2


def _write_other_halves(rank, num_ranks, begin):
    values = torch.zeros(8, device="emu")
    torch.accelerator.synchronize()
    values[:4].fill_(1.0)
    side = torch.Stream("emu")
    with side:
        values[begin:].fill_(2.0)
    torch.accelerator.current_stream().wait_stream(side)


def test_streams_may_write_different_parts_of_a_tensor(emulated):
    emulated.run(_write_other_halves, 4)

    assert emulated.attempt(_write_other_halves, 3).kinds() == [UNORDERED]


def _free_in_use(rank, num_ranks, order, does_reuse):
    main, side = torch.accelerator.current_stream(), torch.Stream("emu")
    values = torch.full((256,), 3.0, device="emu")
    side.wait_stream(main)
    with side:
        doubled = values * 2
    if order == "record_stream":
        values.record_stream(side)
    elif order == "wait":
        main.wait_stream(side)
    elif order == "host":
        side.synchronize()
    del values
    if order == "wait before it goes on":
        main.wait_stream(side)
    torch.full((256 if does_reuse else 1,), 5.0, device="emu")
    torch.accelerator.synchronize()
    with side:
        return doubled.cpu().tolist()[:2]


@pytest.mark.parametrize("order", ["record_stream", "wait", "host", "wait before it goes on"])
def test_memory_freed_in_order_is_right_and_silent(emulated, order):
    assert emulated.run(_free_in_use, order, True, policy="random", seed=1) == [[6.0, 6.0]]


@all_policies
def test_memory_freed_while_another_stream_uses_it_or_reused_too_early_is_found(emulated, policy, seed):
    (freed,) = emulated.attempt(_free_in_use, "nothing", False, policy=policy, seed=seed).reports
    outcome = emulated.attempt(_free_in_use, "nothing", True, policy=policy, seed=seed)

    assert (freed.kind, freed.operations) == (FREED, ("mul.Tensor", "free"))
    assert freed.text.count("tests/emulated/test_checker.py:") == 2
    assert outcome.kinds() == [FREED, REUSED]
    assert ("mul.Tensor", "fill_.Scalar") in [report.operations for report in outcome.reports if report.kind == REUSED]


_shared = {"both": threading.Barrier(2, timeout=20.0)}


def _use_what_another_rank_made(rank, num_ranks, does_wait):
    if rank == 0:
        _shared["values"] = torch.full((4,), 3.0, device="emu:0")
        torch.accelerator.synchronize()
        _shared["both"].wait()
        _shared["both"].wait()  # the other rank has ended; until then the memory is not freed
        _shared.pop("values")
        return None
    _shared["both"].wait()
    if does_wait:
        torch.accelerator.current_stream("emu:0").synchronize()
    with torch.Stream("emu:0"):
        found = (_shared["values"] * 2).cpu().tolist()
    _shared["both"].wait()
    return found


def test_a_rank_does_not_know_what_another_has_waited_for(emulated):
    """A lock between the ranks' threads orders nothing on the device, since ranks are processes elsewhere."""
    assert emulated.attempt(_use_what_another_rank_made, True, num_ranks=2).results[1] == [6.0] * 4

    kinds = [emulated.attempt(_use_what_another_rank_made, wait, num_ranks=2).kinds() for wait in (True, False)]
    assert [UNORDERED in found for found in kinds] == [False, True]
