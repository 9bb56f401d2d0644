"""Tensors on a device that has failed live until the process ends."""

import weakref
from contextlib import suppress

import pytest
import torch

from penstock.execute import accelerator, lost_device
from penstock.execute.lost_device import has_failed, keeping_what_is_lost

CPU = torch.device("cpu")


class Event:
    """Of a device that has failed, or has not."""

    def __init__(self, fails):
        self._fails = fails

    def record(self):
        if self._fails == "record":
            raise RuntimeError("device-side assert triggered")

    def query(self):
        if self._fails == "query":
            raise RuntimeError("device-side assert triggered")
        return False


@pytest.fixture
def failing(monkeypatch):
    def fail(how):
        monkeypatch.setattr(lost_device, "is_queued", lambda device: True)
        monkeypatch.setattr(accelerator, "make_event", lambda device: Event(how))

    return fail


def lives_after(raises):
    tensor = torch.zeros(3)
    found = weakref.ref(tensor)
    with suppress(ValueError), keeping_what_is_lost(CPU):
        if raises:
            raise ValueError("planted")
    del tensor
    return found() is not None


@pytest.mark.parametrize("how", ["record", "query"])
def test_what_is_on_a_device_that_fails_is_kept(failing, how):
    failing(how)

    assert has_failed(CPU)
    assert lives_after(raises=True)


def test_nothing_is_kept_where_the_device_works_or_nothing_fails(failing):
    assert not has_failed(CPU)
    assert not lives_after(raises=True)

    failing(None)
    assert not has_failed(CPU)
    assert not lives_after(raises=True)

    failing("record")
    assert not lives_after(raises=False)
