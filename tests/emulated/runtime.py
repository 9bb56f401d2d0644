"""What the extension asks: streams, events, memory and pinned memory of all devices of this process.

`RUNTIME` is the one object that `install` of the extension is given. Tests reset it for every scenario. Kernels, copies
and communicators call `launch`, which asks the checker and puts the operation into its queue.
"""

import threading
from collections import Counter

from tests.emulated.checker import FAILED, HANG, LEFT, Access, Checker
from tests.emulated.clocks import merge
from tests.emulated.memory import Memory
from tests.emulated.pinned import PinnedMemory
from tests.emulated.queues import KERNEL_S, Host, Item, Mark, Queues
from tests.emulated.stacks import capture


def _at_once():
    return 0.0


class Runtime:
    """The device as a whole; methods without a docstring are what torch calls by the same name."""

    def __init__(self):
        self.extension = None
        self.queues = Queues()
        self.lock = self.queues.lock
        self.checker = Checker()
        self.memory = Memory(self.queues, self.checker)
        self.pinned = None
        self._threads = threading.local()
        self._next_event = 1  # never reset: an event that survives its scenario keeps its number
        self.queues.on_hang = lambda text: self.checker.report(HANG, [], text)
        self.queues.on_learned = lambda host: self.pinned.settle()
        self._forget()

    def attach(self, extension):
        """Take the extension, which calls this object from now on."""
        self.extension = extension
        self.pinned = PinnedMemory(extension, self.checker)

    def reset(self, policy="lazy", seed=0, *, num_ranks=1, hang_s=20.0, is_alone=True):
        """Begin a scenario: nothing is queued, allocated or known; rank r is the host of device r."""
        with self.lock:
            self.checker = Checker()
            self.memory.reset(self.checker)
            self.pinned.reset(self.checker)
            self.queues.reset(policy, seed, hang_s=hang_s, is_alone=is_alone)
            self._forget(num_ranks)

    def _forget(self, num_ranks=1):
        self._events, self._next_stream = {}, 1
        self.communicators = []
        self.host_waits = Counter()
        """How often the host waited, by the operation that made it wait."""
        self.ranks = [Host(f"rank {rank}") for rank in range(num_ranks)]
        self.queues.hosts = list(self.ranks)

    def finish(self):
        """End a scenario: run what can run, and report what is left and what has failed without a word."""
        for queue in self.queues.drain():
            head = queue.items[0]
            if not any(report.kind == HANG for report in self.checker.reports):
                self.checker.report(LEFT, [head.name], f"{head.name} on {queue}, launched at {head.stack}, never ran")
        for device, text in self.queues.failures.items():
            if device not in self.queues.raised:
                self.checker.report(FAILED, [], text)

    # ---- hosts

    def be_rank(self, rank):
        """Make the calling thread one of a rank's host; threads of torch's autograd go by their device."""
        self._threads.host = self.ranks[rank]
        self.extension.set_device(rank)

    def leave_rank(self):
        """The calling thread, the last of its host, puts nothing more into queues."""
        with self.queues.changed:
            self.queues.hosts.remove(self._threads.host)
            self._threads.host = None
            self.queues.changed.notify_all()

    def host(self):
        own = getattr(self._threads, "host", None)
        if own is not None:
            return own
        device = self.extension.current_device()
        return self.ranks[device if device < len(self.ranks) else 0]

    # ---- operations

    def current_queue(self, device=-1):
        device = self.extension.current_device() if device < 0 else device
        return self.queues.of(device, self.extension.current_stream(device))

    def launch(
        self, queue, name, run, reads=(), writes=(), *, pinned=None, cost_s=KERNEL_S, earliest_s=_at_once, **hold
    ):
        """Put an operation into a queue; `reads` and `writes` are tensors of the device. Return its stack.

        `pinned` is the host's side of a copy that the host does not wait for. `hold` is what else an Item has:
        `is_ready`, `needs`, `is_wanted`.
        """
        with self.lock:
            host, stack = self.host(), capture()
            merge(queue.clock, host.clock)
            number = queue.count()
            for tensors, is_write in ((reads, False), (writes, True)):
                for tensor in tensors:
                    self._note(queue, number, tensor, is_write, name, stack)
            if pinned is not None:
                run = self._watched(run, queue, number, pinned, not writes, name, stack)
            launched_s = host.now_s
            hold["earliest_s"] = lambda: max(launched_s, earliest_s())
            self.queues.put(queue, Item(name, run, cost_s, stack=stack, **hold))
            return stack

    def _watched(self, copy, queue, number, tensor, is_download, name, stack):
        """Watch the pinned side of a copy from now on, and return the copy with that side open."""
        base, low, high = self.extension.span(tensor)
        if low == high:
            return copy
        access = Access(queue, number, low, high, is_download, name, stack, 0)
        use = self.pinned.begin(access, self.host(), base)

        def run():
            with self.pinned.opened(use):
                copy()

        return run

    def _note(self, queue, number, tensor, is_write, name, stack):
        base, low, high = self.extension.span(tensor)
        block = self.memory.live.get(base)
        if block is not None and low < high:
            tenant = block.place.tenant
            self.checker.note(block.place, Access(queue, number, low, high, is_write, name, stack, tenant))

    def wait_here(self, queue, why):
        """Let the host wait for all that is in a queue."""
        self.note_host_wait(why)
        self.queues.demand(self.host(), self.mark(queue, f"wait of the host: {why}"))

    def note_host_wait(self, why):
        with self.lock:  # ranks are threads
            self.host_waits[why] += 1

    def know_ended(self, queue):
        """Let the host of a queue know that its operations are over, and nothing of what they waited for."""
        with self.lock:
            if queue.index < len(queue.clock):
                host = self.ranks[queue.device if queue.device < len(self.ranks) else 0]
                merge(host.clock, [0] * queue.index + [queue.clock[queue.index]])

    # ---- streams and events

    def new_stream(self, device):
        with self.lock:
            self._next_stream += 1
            return self._next_stream - 1

    def record(self, event, device, stream):
        with self.lock:
            if not event:
                event, self._next_event = self._next_event, self._next_event + 1
            self._events[event] = self.mark(self._known_queue(device, stream))
            return event

    def mark(self, queue, name="record of an event"):
        """Put a mark at the end of a queue; as on a GPU, an idle stream comes to it when the host has put it there."""
        return self.queues.mark(queue, name, launched_s=self.host().now_s)

    def _known_queue(self, device, stream):
        """Return the queue, behind what the calling host knows."""
        queue = self.queues.of(device, stream)
        merge(queue.clock, self.host().clock)
        return queue

    def block(self, event, device, stream):
        mark = self._events.get(event)
        if mark is not None:
            self.queues.wait_for(self.queues.of(device, stream), mark)

    def query(self, event):
        mark = self._events.get(event)
        return mark is None or self.is_passed(mark)

    def is_passed(self, mark):
        """Let time pass by one operation, and tell whether a queue has come to a mark; if so, this host knows it.

        As on a GPU, every query says so once an operation of the device has failed.
        """
        with self.queues.changed:
            if not mark.is_done and self.queues.advance(mark.queue):
                self.queues.changed.notify_all()
            self.queues.raise_failure(mark.queue.device)
            if mark.is_done:
                self.queues.learn(self.host(), mark)
            else:
                # Where a rank has ended, it may be lost, which deadlines are for.
                are_all_there = len(self.queues.hosts) == len(self.ranks)
                self.queues.look_in_vain(self.host(), can_hang=are_all_there)
            return mark.is_done

    def synchronize_event(self, event):
        mark = self._events.get(event)
        if mark is not None:
            self.note_host_wait("synchronize")
            self.queues.demand(self.host(), mark)

    def destroy(self, event):
        self._events.pop(event, None)

    def elapsed_ms(self, begin, end):
        marks = [self._events[event] for event in (begin, end)]
        if not all(mark.is_done for mark in marks):
            raise RuntimeError("emulated: elapsed_time of an event that the device has not come to; synchronize first")
        return 1e3 * (marks[1].time_s - marks[0].time_s)

    def query_stream(self, device, stream):
        with self.queues.changed:
            queue = self.queues.of(device, stream)
            if self.queues.advance(queue):
                self.queues.changed.notify_all()
            if queue.items:
                return False
            self.queues.learn(self.host(), Mark(queue, list(queue.clock), is_done=True, time_s=queue.now_s))
            return True

    def synchronize_stream(self, device, stream):
        self.wait_here(self.queues.of(device, stream), "synchronize")

    def synchronize(self, device):
        for queue in [queue for queue in self.queues.all if queue.device == device]:
            self.wait_here(queue, "synchronize")

    # ---- memory

    def allocate(self, size, device, stream):
        with self.lock:
            return self.memory.allocate(size, self.queues.of(device, stream), self.host())

    def free(self, address):
        with self.lock:
            self.memory.free(address, self.host())

    def record_stream(self, address, device, stream):
        with self.lock:
            self.memory.record_stream(address, self.queues.of(device, stream))

    def empty_cache(self):
        with self.lock:
            self.memory.empty_cache()

    def statistics(self, device):
        found = self.memory.statistics_of(device)
        return [found.allocated, found.allocated_peak, found.reserved, found.reserved_peak]

    def reset_peak(self, device):
        self.memory.reset_peak(device)

    def touched(self, address):
        with self.lock:
            return self.pinned.touched(address)

    def guard_again(self, address):
        with self.lock:
            self.pinned.guard_again(address)

    def unpinned(self, base):
        with self.lock:
            self.pinned.unpinned(base)


RUNTIME = Runtime()
"""Kernels are registered with torch for the whole process, and so this is one object too."""
