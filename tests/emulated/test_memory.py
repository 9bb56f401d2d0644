"""The allocator's pools and figures are those of a caching allocator, to the byte."""

import pytest
import torch

from tests.emulated.kernels import slow

pytestmark = pytest.mark.emulated


def _figures(rank, num_ranks):
    def now():
        names = ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved")
        return tuple(getattr(torch.accelerator, name)() for name in names)

    found = [now()]
    first, second = torch.empty(100, device="emu"), torch.empty(129, device="emu")
    found.append(now())
    del first
    found.append(now())
    torch.accelerator.reset_peak_memory_stats()
    found.append(now())
    third = torch.empty(128, device="emu")  # 512 bytes, as the first one had
    found.append(now())
    del second, third
    torch.accelerator.empty_cache()
    found.append(now())
    return found


def test_figures_are_exact_to_the_byte(emulated):
    (found,) = emulated.run(_figures)

    assert found == [
        (0, 0, 0, 0),
        (1536, 1536, 1536, 1536),
        (1024, 1536, 1536, 1536),
        (1024, 1024, 1536, 1536),
        (1536, 1536, 1536, 1536),
        (0, 1536, 0, 1536),
    ]


def _addresses(rank, num_ranks, size, on_side):
    side = torch.Stream("emu")
    values = torch.empty(128, device="emu")
    address = values.data_ptr()
    del values
    if on_side:
        with side:
            return torch.empty(size, device="emu").data_ptr() == address
    return torch.empty(size, device="emu").data_ptr() == address


@pytest.mark.parametrize(
    ("size", "on_side", "is_same"), [(128, False, True), (1, False, True), (129, False, False), (128, True, False)]
)
def test_memory_is_reused_by_the_same_stream_and_size_only(emulated, size, on_side, is_same):
    assert emulated.run(_addresses, size, on_side) == [is_same]


def _held_back(rank, num_ranks, does_pass):
    side, values = torch.Stream("emu"), torch.zeros(128, device="emu")
    address = values.data_ptr()
    side.wait_stream(torch.accelerator.current_stream())
    with side:
        slow(values, 1.0)
    values.record_stream(side)
    del values
    allocated = torch.accelerator.memory_allocated()
    if does_pass:
        side.synchronize()
    return torch.empty(128, device="emu").data_ptr() == address, allocated


@pytest.mark.parametrize("does_pass", [False, True])
def test_record_stream_holds_memory_back_until_the_stream_has_passed(emulated, does_pass):
    assert emulated.run(_held_back, does_pass, policy="lazy") == [(does_pass, 0)]


_kept = []


def _keep(rank, num_ranks):
    _kept.append(torch.ones(4, device="emu"))


def _drop(rank, num_ranks):
    _kept.clear()
    return torch.accelerator.memory_allocated()


def test_a_tensor_that_survives_its_scenario_does_no_harm(emulated):
    emulated.run(_keep)

    assert emulated.run(_drop) == [0]
