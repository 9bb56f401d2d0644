"""Tensors on a device that has failed live until the process ends."""

import threading
import weakref
from contextlib import suppress

import pytest
import torch

from penstock.execute import accelerator, lost_device
from penstock.execute.lost_device import has_failed, keeping_what_is_lost, living_instances

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


class HandsOver(torch.Tensor):
    """A tensor that lets another thread come to its end, where it is asked for its device."""

    turn = None

    @property
    def device(self):
        if self.turn is not None:
            self.turn()
        return CPU


def lives_after(raises):
    tensor = torch.zeros(3)
    found = weakref.ref(tensor)
    with suppress(ValueError), keeping_what_is_lost(CPU):
        if raises:
            raise ValueError("planted")
    del tensor
    return found() is not None


def test_what_is_on_a_device_is_kept_where_it_fails_and_a_step_too(failing):
    assert not has_failed(CPU)
    assert not lives_after(raises=True)

    for how in (None, "record", "query"):
        failing(how)
        assert has_failed(CPU) is (how is not None)
        assert lives_after(raises=True) is (how is not None)
        assert not lives_after(raises=False)


def test_another_thread_fills_its_tuple_while_tensors_are_kept(failing):
    failing("record")
    has_begun, may_end, lengths = threading.Event(), threading.Event(), []

    def numbers():
        has_begun.set()
        may_end.wait(60)
        yield from range(100)  # more than the tuple has room for at first

    thread = threading.Thread(target=lambda: lengths.append(len(tuple(numbers()))))
    tensor = torch.zeros(3).as_subclass(HandsOver)
    thread.start()
    has_begun.wait(60)
    tensor.turn = lambda: (may_end.set(), thread.join(60))

    with suppress(ValueError), keeping_what_is_lost(CPU):
        raise ValueError("planted")

    tensor.turn = None
    assert lengths == [100]


def test_all_instances_are_found_and_no_others():
    class Value:
        pass

    class Special(Value):
        pass

    values = [Value(), Special(), [Value() for _ in range(1000)]]

    assert len(living_instances(Value)) == 1002
    assert living_instances(Special) == [values[1]]
    del values[:]
    assert living_instances(Value) == []
