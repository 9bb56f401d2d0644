"""Planted faults beside the messages: losses, checkpoints, offloads, the throttle's markers, recorded times.

Each function under `plant` takes what the name stands for, and returns what it stands for with the fault.
"""

from contextlib import contextmanager

import torch

from penstock.execute.stages.offloading import _bytes_in
from tests.emulated.checker import FREED, PINNED, UNORDERED
from tests.emulated.planting import AHEAD, HOST_WAITS, RECORDED, does_nothing, table

FAULTS, plant = table()
EXCHANGE = "penstock.execute.losses.exchange:"
STAGING = "penstock.checkpoints.staging:"
HELD_BACK = "throttled", "penstock.execute.observing.run_ahead:Throttle._holding_back", AHEAD, "0F", "0F"
RECORDER = "penstock.execute.observing.recorder:DeviceRecorder."
OFFLOADING = "penstock.execute.stages.offloading:"
READ_EARLY, WRITTEN_EARLY = (PINNED, "copy to the host", "the host"), (PINNED, "copy to the device", "the host")


def _side():
    return torch.Stream("emu")


# ---- losses

plant(
    "losses go to the device from memory that is not pinned",
    "following",
    f"{EXCHANGE}is_queued",
    HOST_WAITS,
    "copy to the device",
    make=lambda original: lambda device: False,
)


@plant("each loss is read by itself", "following", f"{EXCHANGE}_report", HOST_WAITS, "item")
def _(original):
    def told(own):
        own.computed = {place: torch.tensor(loss.item(), dtype=loss.dtype) for place, loss in own.computed.items()}
        return original(own)

    return told


@plant(
    "the pinned memory of the losses is used again too early",
    "following",
    f"{EXCHANGE}LossExchange._on_device",
    *WRITTEN_EARLY,
)
def _(original):
    buffers = {}

    def on_device(exchange, losses):
        buffer = buffers.setdefault(str(exchange._device), torch.zeros(len(losses[0]), pin_memory=True))
        buffer.copy_(torch.tensor(losses[0]))
        buffer.to(exchange._device, non_blocking=True)
        buffer.zero_()
        return original(exchange, losses)

    return on_device


@plant("losses are read from pinned memory before they are there", "following", f"{EXCHANGE}_report", *READ_EARLY)
def _(original):
    def told(own):
        for place, loss in own.computed.items():
            found = torch.empty((), dtype=loss.dtype, pin_memory=True)
            found.copy_(loss.detach(), non_blocking=True)
            own.computed[place] = torch.tensor(found.item())
        return original(own)

    return told


# ---- checkpoints

plant(
    "a checkpoint is written before its copies are there",
    "saved_checkpoints",
    f"{STAGING}synchronize",
    *READ_EARLY,
    make=does_nothing,
)


@plant("a checkpoint waits for its first copy only", "saved_checkpoints", f"{STAGING}Staging.copy", *READ_EARLY)
def _(original):
    def copy(staging, parts):
        staged = {}
        marker = torch.Event("emu")
        for part, tensors in parts.items():
            staged[part] = {name: torch.empty(held.shape, pin_memory=True) for name, held in tensors.items()}
            for name, held in tensors.items():
                staged[part][name].copy_(held.local, non_blocking=True)
                if len(staged) == 1 and name == next(iter(tensors)):
                    marker.record()
        marker.synchronize()
        return staged

    return copy


@plant(
    "a checkpoint is copied by a stream that does not wait for the step",
    "saved_checkpoints",
    f"{STAGING}Staging.copy",
    UNORDERED,
    "add_",
    "copy to the host",
)
def _(original):
    def copy(staging, parts):
        with _side():
            return original(staging, parts)

    return copy


@plant(
    "a checkpoint is copied while the next step changes the weights",
    "saved_checkpoints",
    f"{STAGING}Staging.copy",
    UNORDERED,
    "copy to the host",
    "add_",
)
def _(original):
    def copy(staging, parts):
        side, staged = _side(), {}
        side.wait_stream(torch.accelerator.current_stream())
        with side:
            for part, tensors in parts.items():
                staged[part] = {name: torch.empty(each.shape, pin_memory=True) for name, each in tensors.items()}
                for name, held in tensors.items():
                    staged[part][name].copy_(held.local, non_blocking=True)
        return {part: {name: torch.zeros(each.shape) for name, each in found.items()} for part, found in staged.items()}

    return copy


plant(
    "checkpoints are copied to memory that is not pinned",
    "saved_checkpoints",
    f"{STAGING}has_queue",
    HOST_WAITS,
    "copy to the host",
    make=lambda original: lambda tensor: False,
)


# ---- how far the host is ahead


def _holding_back(make_and_record, wait=lambda throttle: throttle._await(throttle._pending.popleft().query)):
    @contextmanager
    def holding_back(throttle, step):
        while len(throttle._pending) >= throttle._limit:
            wait(throttle)
        marker = throttle._make_marker()
        with make_and_record(marker):
            yield
        throttle._pending.append(marker)

    return holding_back


@contextmanager
def _before(marker):
    marker.record()
    yield


@contextmanager
def _behind(marker):
    yield
    marker.record()


@contextmanager
def _elsewhere(marker):
    yield
    marker.record(_side())


@contextmanager
def _never(marker):
    yield


plant(
    "the throttle's marker is recorded before its computation", *HELD_BACK, make=lambda original: _holding_back(_before)
)

plant("the throttle's marker is never recorded", *HELD_BACK, make=lambda original: _holding_back(_never))

plant(
    "the throttle's marker is recorded on another stream", *HELD_BACK, make=lambda original: _holding_back(_elsewhere)
)

plant(
    "the throttle forgets a marker instead of waiting for it",
    *HELD_BACK,
    make=lambda original: _holding_back(_behind, lambda throttle: throttle._pending.popleft()),
)

plant(
    "the throttle lets the stream wait, and not the host",
    *HELD_BACK,
    make=lambda original: _holding_back(_behind, lambda throttle: throttle._pending.popleft().wait()),
)


# ---- recorded times


def _timing(start_in, end_in):
    @contextmanager
    def timing(recorder, row, step):
        start, end = recorder._make_event(), recorder._make_event()
        recorder._events[row] = start, end
        with start_in(start), end_in(end):
            yield

    return timing


plant(
    "the end of a computation is recorded before it",
    "recorded",
    f"{RECORDER}_timing",
    RECORDED,
    "0F",
    make=lambda original: _timing(_before, _before),
)

plant(
    "the begin of a computation is recorded behind it",
    "recorded",
    f"{RECORDER}_timing",
    RECORDED,
    "0F",
    make=lambda original: _timing(_behind, _behind),
)

plant(
    "the end of a computation is recorded on another stream",
    "recorded",
    f"{RECORDER}_timing",
    RECORDED,
    "",
    make=lambda original: _timing(_before, _elsewhere),
)


# ---- offloads


@plant(
    "activations are copied to the host by a stream that does not wait for them",
    "offloaded",
    f"{OFFLOADING}_emptied",
    UNORDERED,
    "",
    "copy to the host",
)
def _(original):
    def emptied(storage):
        with _side():
            return original(storage)

    return emptied


@plant(
    "the memory of activations is freed before their copy has ended",
    "offloaded",
    f"{OFFLOADING}_emptied",
    FREED,
    "copy to the host",
    "free",
)
def _(original):
    def emptied(storage):
        side, own = _side(), _bytes_in(storage)
        side.wait_stream(torch.accelerator.current_stream())
        copy = torch.empty(own.shape, dtype=own.dtype, pin_memory=True)
        with side:
            copy.copy_(own, non_blocking=True)
        del own
        storage.resize_(0)
        return storage, copy

    return emptied


@plant(
    "a backward does not wait until activations are back",
    "offloaded",
    f"{OFFLOADING}MovablePart.reload",
    UNORDERED,
    "copy to the device",
    "",
)
def _(original):
    def reload(part):
        side, moved = _side(), list(part._moved)
        side.wait_stream(torch.accelerator.current_stream())
        original_copies = [(storage, copy.pin_memory()) for storage, copy in moved]
        for storage, copy in original_copies:
            storage.resize_(copy.nbytes)
            side.wait_stream(torch.accelerator.current_stream())
            with side:
                _bytes_in(storage).copy_(copy, non_blocking=True)
        part._moved.clear()
        part._mark({})
        part.is_on_host = False

    return reload


@plant(
    "the pinned memory of activations is used again before they are back",
    "offloaded",
    f"{OFFLOADING}MovablePart.reload",
    *WRITTEN_EARLY,
)
def _(original):
    def reload(part):
        for storage, copy in part._moved:
            pinned = copy.pin_memory()
            storage.resize_(copy.nbytes)
            _bytes_in(storage).copy_(pinned, non_blocking=True)
            pinned.zero_()
        original(part)

    return reload
