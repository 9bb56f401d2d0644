"""`CopyStream`: the stream of a rank on which activations go to the host and come back, beside its computations.

    current stream   F0 ..... F1 ......... F2 ......... B0 ......
    copies                    OFFLOAD 0    RELOAD 0
    pinned memory             |____________________|

A copy begins when the current stream has come to where it was launched: then the activation is whole, or the memory
that takes it is no longer in use. Whoever needs the copy lets the current stream wait for its end; the host waits for
none. All memory of the device is the current stream's and is used again in its order, so nothing waits until the
allocator learns that a stream has passed.

The host's side is pinned, without which a copy would hold the host up. Its pool is torch's allocator of pinned memory,
which uses a block again when the copies to and from it have ended: activations of later steps have the same sizes, so
only the first step asks the system for memory.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch

from penstock.execute.accelerator import is_queued, make_event, make_stream


@dataclass(frozen=True, slots=True, eq=False)
class LaunchedCopy:
    """A copy that is under way on a device."""

    device: torch.device
    stream: torch.Stream
    """The stream on which it runs."""
    has_ended: torch.Event
    finish: Callable[[], None]
    """Called once the current stream waits for the copy."""

    def wait(self) -> None:
        """Let the current stream wait for the copy, and the host go on."""
        self.give_up()
        self.finish()

    def give_up(self) -> None:
        """Order the copy before whatever the current stream does next with the memory that it uses."""
        torch.accelerator.current_stream(self.device).wait_event(self.has_ended)


class CopyStream:
    """Copies between the memory of a device and that of its host, one after another."""

    def __init__(self, device: torch.device, stream: torch.Stream | None) -> None:
        """Use `stream`, or for None whichever is current at a copy."""
        self._device, self._stream = device, stream

    def launch(self, copy: Callable[[], None], finish: Callable[[], None]) -> LaunchedCopy:
        """Call `copy`, which queues copies, behind all that the current stream has queued; the host waits for none."""
        current = torch.accelerator.current_stream(self._device)
        stream = current if self._stream is None else self._stream
        is_ready = make_event(self._device)
        is_ready.record(current)
        stream.wait_event(is_ready)
        launched = LaunchedCopy(self._device, stream, make_event(self._device), finish)
        try:
            with stream:
                copy()
        except BaseException:  # the copies that were queued before it are under way all the same
            launched.has_ended.record(stream)
            launched.give_up()
            raise
        launched.has_ended.record(stream)
        return launched


def copy_stream_of(device: torch.device, *, one_stream: bool = False) -> CopyStream | None:
    """Return the copies of a rank that run beside computations, or with `one_stream` among them.

    None where a device computes at once, or has no streams: then a copy is over when its row is.
    """
    if not is_queued(device):
        return None
    stream = make_stream(device)
    return None if stream is None else CopyStream(device, None if one_stream else stream)
