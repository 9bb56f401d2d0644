"""Which accesses to memory nothing orders, found from what was launched, and not from what happened to run when.

Every operation has a number in its stream. Every stream has a vector clock of what is ordered before its next
operation: launches raise its own entry, waits merge the clock of the mark, and what the host knows to have ended is
merged at each launch. Two accesses of the same bytes race if one of them writes and neither is in the other's clock. So
the checker finds a race under every policy, in a run that gave the right numbers too.
"""

from dataclasses import dataclass, field

from tests.emulated.clocks import knows

UNORDERED, FREED, REUSED, USED_AFTER_FREE, PINNED, DIFFER, HANG, LEFT, FAILED = (
    "unordered accesses",
    "freed while in use",
    "reused too early",
    "used after free",
    "pinned memory",
    "collectives differ",
    "hang",
    "left in a queue",
    "failed kernel",
)


@dataclass(frozen=True)
class Report:
    """One fault: its kind, the operations of both sides, and the text with their streams and stacks."""

    kind: str
    operations: tuple
    text: str

    def __str__(self):
        return f"{self.kind}: {self.text}"


@dataclass(eq=False, slots=True)
class Access:
    """One operation's access to a range of bytes."""

    queue: object
    number: int
    low: int
    high: int
    is_write: bool
    name: str
    stack: object
    tenant: int

    def __str__(self):
        return f"{self.name} ({'writes' if self.is_write else 'reads'}) on {self.queue} at {self.stack}"


@dataclass(eq=False)
class Place:
    """Memory with one beginning: the accesses that a later one may race with."""

    what: str
    accesses: list = field(default_factory=list)
    tenant: int = 0
    """Counts the tensors that have had this memory."""
    is_free: bool = False


class Checker:
    """The reports of one scenario."""

    def __init__(self):
        self.reports = []
        self._known = set()
        self._freed = {}
        """By queue, the accesses to its freed memory that it may have to wait for."""

    def report(self, kind, operations, text):
        """Note a fault once, however often it happens."""
        if (kind, text) not in self._known:
            self._known.add((kind, text))
            self.reports.append(Report(kind, tuple(operations), text))

    def note(self, place, access):
        """Compare an access with the earlier ones, and keep it for the later ones."""
        if place.is_free:
            self.report(USED_AFTER_FREE, [access.name], f"{access} uses {place.what}, which was freed")
        clock, kept = access.queue.clock, []
        for other in place.accesses:
            is_ordered = other.queue is access.queue or knows(clock, other.queue.index, other.number)
            if not is_ordered and _collide(access, other):
                self._report_race(place, access, other)
            if not (is_ordered and _supersedes(access, other)):
                kept.append(other)
        kept.append(access)
        place.accesses = kept

    def note_free(self, place, queue, recorded, stack):
        """Remember what other streams may still do with memory that goes back to the pool of `queue`."""
        self._freed.setdefault(queue, []).extend(
            (access, f"{place.what} of {queue} is freed at {stack}")
            for access in place.accesses
            if access.queue is not queue and access.queue not in recorded and access.tenant == place.tenant
        )

    def note_allocation(self, queue, host_clock):
        """Look whether `queue`, which may get any freed memory of its own now, waits for those that still use it.

        Not before: a stream that waits for the others before it goes on, as around an overlapped pair, needs no more.
        """
        for access, freed in self._freed.pop(queue, ()):
            ends = access.queue.index, access.number
            if not (knows(queue.clock, *ends) or knows(host_clock, *ends)):
                text = (
                    f"{freed}; {access} is not known to have ended when {queue} allocates again. "
                    f"Call record_stream, or let {queue} wait before"
                )
                self.report(FREED, [access.name, "free"], text)

    def _report_race(self, place, access, other):
        kind = UNORDERED if access.tenant == other.tenant else REUSED
        self.report(kind, [other.name, access.name], f"{place.what}: {access}; nothing orders it behind {other}")


def _collide(access, other):
    return (access.is_write or other.is_write) and other.low < access.high and access.low < other.high


def _supersedes(access, other):
    """Whether a later operation that races with `other` races with `access` too."""
    return access.low <= other.low and other.high <= access.high and (access.is_write or not other.is_write)
