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


def _is_reused(rank, num_ranks, size, user):
    main, side = torch.accelerator.current_stream(), torch.Stream("emu")
    values = torch.empty(128, device="emu")
    address = values.data_ptr()
    if user in ("recorded", "passed"):
        side.wait_stream(main)
        with side:
            slow(values, 1.0)
        values.record_stream(side)
    del values
    assert torch.accelerator.memory_allocated() == 0
    if user == "passed":
        side.synchronize()
    with side if user == "another" else main:
        return torch.empty(size, device="emu").data_ptr() == address


@pytest.mark.parametrize(
    ("size", "user", "is_reused"),
    [
        (128, "none", True),
        (1, "none", True),
        (129, "none", False),
        (128, "another", False),
        (128, "recorded", False),
        (128, "passed", True),
    ],
)
def test_memory_is_reused_by_its_stream_and_size_once_recorded_streams_have_passed(emulated, size, user, is_reused):
    assert emulated.run(_is_reused, size, user, policy="lazy") == [is_reused]


_kept = []


def _keep(rank, num_ranks):
    _kept.append(torch.ones(4, device="emu"))


def _drop(rank, num_ranks):
    _kept.clear()
    return torch.accelerator.memory_allocated()


def test_a_tensor_that_survives_its_scenario_does_no_harm(emulated):
    emulated.run(_keep)

    assert emulated.run(_drop) == [0]
