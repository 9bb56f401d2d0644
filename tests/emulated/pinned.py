"""Pinned memory of the host while a queued copy still needs it.

From its launch until the host knows that it has ended, a copy guards the pages of its pinned side: a download forbids
all access, an upload forbids writing. The host's access then faults, the extension calls `touched`, and the report has
the stacks of both sides; whether the copy has run by then makes no difference. Two copies may share a page. Where the
host touches the free part of such a page, the guard goes for one instruction, on x86-64; on other processors it goes
for good. What one instruction does beyond the byte at which it begins is not seen, so the bytes of an upload are
compared between launch and execution as well. A system call that meets a guarded page returns EFAULT, which Python
raises. The extension's handlers must be the last ones that were installed: faulthandler, enabled later, takes their
place and ends the process.
"""

import ctypes
import zlib
from contextlib import contextmanager
from dataclasses import dataclass

from tests.emulated.checker import PINNED, Access, Place
from tests.emulated.clocks import knows
from tests.emulated.memory import POISON
from tests.emulated.stacks import capture

FORBID_ALL, FORBID_WRITING, ALLOW = 0, 1, 2  # as guard_pages of the extension has them
PAGE = 4096
"""At least the size of a page, to see which uses may share one."""


@dataclass(eq=False)
class Use:
    """A queued copy's claim on pinned bytes."""

    access: Access
    """The device's access: a download writes these bytes."""
    host: object
    base: int
    checksum: int | None = None

    @property
    def size(self):
        return self.access.high - self.access.low

    def is_known_to_have_ended(self):
        return knows(self.host.clock, self.access.queue.index, self.access.number)

    def shares_pages(self, low, high):
        return self.access.low // PAGE <= high // PAGE and low // PAGE <= self.access.high // PAGE


class PinnedMemory:
    """The uses of all pinned memory."""

    def __init__(self, extension, checker):
        self._guard_pages = extension.guard_pages
        self.reset(checker)

    def reset(self, checker):
        for use in getattr(self, "uses", []):
            self._guard_pages(use.access.low, use.size, ALLOW)
        self._checker, self.uses, self._places = checker, [], {}

    def begin(self, access, host, base):
        """Note the pinned side of a copy at its launch, and guard it."""
        place = self._places.setdefault(base, Place("pinned memory"))
        self._checker.note(place, access)
        use = Use(access, host, base)
        # Where an earlier copy is still to use these bytes, they may change, and must not be changed here.
        is_first = not any(other.access.low < access.high and access.low < other.access.high for other in self.uses)
        with self._open_pages(use):
            if is_first and access.is_write:
                ctypes.memset(access.low, POISON, use.size)  # whoever reads too early, and is not seen, reads NaN
            elif is_first:
                use.checksum = _checksum(use)
        self.uses.append(use)
        self._guard(access.low, access.high)
        return use

    @contextmanager
    def opened(self, use):
        """Let the copy itself run."""
        with self._open_pages(use):
            if use.checksum is not None and use.checksum != _checksum(use) and use in self.uses:
                self._checker.report(
                    PINNED, [use.access.name, "the host"], f"the host has changed what {use.access} before it ran"
                )
            yield

    def settle(self):
        """Open what hosts know to have been copied."""
        over = [use for use in self.uses if use.is_known_to_have_ended()]
        for use in over:
            self.uses.remove(use)
            self._guard(use.access.low, use.access.high)

    def touched(self, address):
        """Report the host's access to a guarded page, and open the page; return whether others still need a guard."""
        found = [use for use in self.uses if use.access.low <= address < use.access.high]
        for use in found:
            did = "reads or writes" if use.access.is_write else "writes"
            text = f"the host {did} pinned memory at {capture()}; nothing orders it behind {use.access}"
            self._checker.report(PINNED, [use.access.name, "the host"], text)
            self.uses.remove(use)
        self._guard_pages(address, 1, ALLOW)
        return any(use.shares_pages(address, address) for use in self.uses)

    def guard_again(self, address):
        """Guard a page that was open for one instruction."""
        self._guard(address, address + 1)

    def unpinned(self, base):
        """Forget memory that is given back; the copy that held it is over."""
        self._places.pop(base, None)
        self.uses = [use for use in self.uses if use.base != base]

    @contextmanager
    def _open_pages(self, use):
        self._guard_pages(use.access.low, use.size, ALLOW)
        try:
            yield
        finally:
            self._guard(use.access.low, use.access.high)

    def _guard(self, low, high):
        """Set the pages of these bytes to what the uses that share them need, the strictest last."""
        self._guard_pages(low, high - low, ALLOW)
        for access, is_download in ((FORBID_WRITING, False), (FORBID_ALL, True)):
            for use in self.uses:
                if use.access.is_write == is_download and use.shares_pages(low, high):
                    self._guard_pages(use.access.low, use.size, access)


def _checksum(use):
    return zlib.crc32(ctypes.string_at(use.access.low, use.size))
