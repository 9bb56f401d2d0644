"""Streams as queues: the host puts operations into them, and they run when a policy or somebody's demand says so.

    lazy     an operation runs only when the host, or another stream that the host waits for, demands it
    eager    every operation runs as soon as what it waits for has run
    random   after every launch the heads of randomly chosen queues run, as a seed says

The same program must give the same numbers under each; what differs is what goes wrong where a wait is missing. All
runs under one lock, so that one operation is executed at a time. Every stream has a simulated clock: an operation
begins when the stream is free, the host has launched it and what it waits for has ended, and takes its cost.
"""

import random
import threading
import time
from collections import deque
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial

import torch
from torch.utils._python_dispatch import _disable_current_modes

from tests.emulated.clocks import merge
from tests.emulated.stacks import capture

POLICIES = ("lazy", "eager", "random")
KERNEL_S = 10e-6
"""What a kernel takes on the simulated clock unless it says otherwise."""
MAX_WAIT_S = 0.02
"""How long a host that can run nothing sleeps at most before it looks again."""
MOST_IN_VAIN = 500
"""How often all hosts look at a device in vain, while nothing is launched or run, until that is a hang."""
MOST_AT_ONCE = 3
"""How many heads the policy `random` runs at most after a launch."""


class DeviceHangs(RuntimeError):
    """A host waits for what can never run."""


class DeviceStopped(RuntimeError):
    """Another rank of the scenario has failed, so that this one's wait is in vain."""


class KernelFailed(RuntimeError):
    """An operation raised when it ran; as on a GPU, a later wait of the host says so."""


@dataclass(eq=False, slots=True)
class Item:
    """One operation in a queue."""

    name: str
    run: object
    """Called without arguments when the queue comes to it; None where there is nothing to compute."""
    cost_s: float = 0.0
    is_ready: object = None
    """Whether it can run now; None where nothing but its place in the queue holds it."""
    needs: object = None
    """Returns the queues that have to go on before it can run."""
    earliest_s: object = None
    """Returns the simulated time before which it cannot begin."""
    is_wanted: object = None
    """Whether another process waits for it; only messages have this."""
    stack: object = None


@dataclass(eq=False, slots=True)
class Mark:
    """A place in a queue: one recording of an event, or the end of an operation."""

    queue: object
    clock: list
    """What has ended once the queue has come to it."""
    stack: object = None
    is_done: bool = False
    time_s: float = 0.0


@dataclass(eq=False)
class Queue:
    """One stream."""

    device: int
    stream: int
    index: int
    """Its entry in clocks."""
    items: deque = field(default_factory=deque)
    clock: list = field(default_factory=list)
    """What is ordered before the next operation that is put into it."""
    now_s: float = 0.0

    def __str__(self):
        return f"stream {self.stream} of emu:{self.device}"

    def count(self):
        """Number the next operation, and return the number."""
        self.clock.extend([0] * (self.index + 1 - len(self.clock)))
        self.clock[self.index] += 1
        return self.clock[self.index]


@dataclass(eq=False)
class Host:
    """The threads of one rank: what they know to have ended, and when it is for them on the simulated clock."""

    name: str
    clock: list = field(default_factory=list)
    now_s: float = 0.0
    waits_for: Mark | None = None
    """Set while it can do nothing else; a wait with a limit does not count."""
    message: str = ""
    """Why its wait ends with an error."""
    num_vain: int = 0
    """How often it has looked in vain since `seen`."""
    seen: int = -1
    """`num_changes` when it last looked."""


class Queues:
    """All streams of this process."""

    def __init__(self):
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.on_hang = lambda text: None
        self.on_learned = lambda host: None
        self.reset()

    def reset(self, policy="lazy", seed=0, *, hang_s=20.0, is_alone=True):
        """Forget all streams. `is_alone`: nobody outside this process can bring a queue forward."""
        assert policy in POLICIES, f"unknown policy {policy!r}; expected one of {', '.join(POLICIES)}"
        with self.lock:
            self.policy, self.hang_s, self.is_alone = policy, hang_s, is_alone
            self.random = random.Random(seed)
            self.by_stream, self.all, self.hosts = {}, [], []
            self.failures, self.raised = {}, set()
            self.num_run = self.num_changes = 0
            self._is_running = False

    def of(self, device, stream):
        with self.lock:
            queue = self.by_stream.get((device, stream))
            if queue is None:
                queue = self.by_stream[device, stream] = Queue(device, stream, len(self.all))
                self.all.append(queue)
            return queue

    # ---- what hosts put into queues

    def put(self, queue, item):
        with self.changed:
            queue.items.append(item)
            self.num_changes += 1
            if self._is_running:
                return  # by a destructor, while an operation runs; the operation's own caller goes on
            if self.policy == "eager":
                while self.advance_any():
                    pass
            elif self.policy == "random":
                for _ in range(self.random.randrange(MOST_AT_ONCE + 1)):
                    self.advance_any(is_shuffled=True)
            self.changed.notify_all()

    def mark(self, queue, name="record of an event", *, launched_s=0.0):
        """Put a mark at the end of a queue, which comes to it when the host has launched it at the earliest."""
        with self.lock:
            mark = Mark(queue, list(queue.clock), capture())
            self.put(queue, Item(name, partial(_pass, mark), earliest_s=lambda: launched_s, stack=mark.stack))
            return mark

    def wait_for(self, queue, mark, name="wait for an event"):
        """Let a queue wait for a mark; the host goes on."""
        with self.lock:
            merge(queue.clock, mark.clock)
            if mark.is_done and queue.now_s >= mark.time_s:
                return
            item = Item(
                name,
                None,
                is_ready=lambda: mark.is_done,
                needs=lambda: [mark.queue],
                earliest_s=lambda: mark.time_s,
                stack=capture(),
            )
            self.put(queue, item)

    # ---- what runs them

    def advance(self, queue, asked=None):
        """Run the first operation of a queue, or of one that it waits for; return whether anything ran."""
        if not queue.items or self._is_running:
            return False
        item = queue.items[0]
        if item.is_ready is None or item.is_ready():
            self._run(queue, queue.items.popleft())
            return True
        if item.needs is None:
            return False
        asked = asked or {queue}
        for other in item.needs():
            if other not in asked:
                asked.add(other)
                if self.advance(other, asked):
                    return True
        return False

    def advance_any(self, *, is_shuffled=False):
        queues = [queue for queue in self.all if queue.items]
        if is_shuffled:
            self.random.shuffle(queues)
        return any(self.advance(queue) for queue in queues)

    def drain(self):
        """Run all that can run, and return the queues that are left with something."""
        with self.changed:
            while self.advance_any():
                pass
            self.changed.notify_all()
            return [queue for queue in self.all if queue.items]

    def _run(self, queue, item):
        self.num_run += 1
        self.num_changes += 1
        begin_s = item.earliest_s() if item.earliest_s is not None else 0.0
        queue.now_s = max(queue.now_s, begin_s) + item.cost_s
        if item.run is None:
            return
        self._is_running = True
        try:
            with ExitStack() as stack:
                _enter_plain_torch(stack)
                item.run()
        except Exception as error:
            text = (
                f"{item.name} on {queue}, launched at {item.stack}, failed when it ran: {type(error).__name__}: {error}"
            )
            self.failures.setdefault(queue.device, text)
        finally:
            self._is_running = False

    # ---- hosts that wait

    def demand(self, host, mark, limit_s=None):
        """Block a host until a queue has come to a mark, and run what that needs. Return whether it came in time.

        Without a limit it hangs once nothing has been launched or run for `hang_s`: hosts may be slow.
        """
        end_s = time.monotonic() + (self.hang_s if limit_s is None else limit_s)
        with self.changed:
            host.waits_for = mark if limit_s is None else None
            try:
                while not mark.is_done:
                    before = self.num_changes
                    self._go_on_or_sleep(host, mark)
                    if limit_s is None and self.num_changes != before:
                        end_s = time.monotonic() + self.hang_s
                    if not mark.is_done and time.monotonic() > end_s:
                        if limit_s is not None:
                            return False
                        self._report_hang([host])
            finally:
                host.waits_for = None
            self.learn(host, mark)
            self.raise_failure(mark.queue.device)
            return True

    def learn(self, host, mark):
        """Let a host know that a mark has been passed; True of a query does so too."""
        with self.lock:
            host.now_s = max(host.now_s, mark.time_s)
            if merge(host.clock, mark.clock):
                self.on_learned(host)

    def look_in_vain(self, host, *, can_hang):
        """Note that a host has seen a device not get on; where all hosts do nothing else any more, it hangs."""
        if host.seen != self.num_changes:
            host.seen, host.num_vain = self.num_changes, 0
        host.num_vain += 1
        all_look = (
            can_hang
            and self.is_alone
            and all(each.seen == self.num_changes and each.num_vain >= MOST_IN_VAIN for each in self.hosts)
        )
        if all_look and not host.message and not self.advance_any():
            self._report_hang(self.hosts)
        if host.message.startswith("hang"):
            message, host.message = host.message, ""
            raise DeviceHangs(message)

    def stop(self, message):
        """End all waits with an error."""
        with self.changed:
            for host in self.hosts:
                host.message = host.message or message
            self.changed.notify_all()

    def _go_on_or_sleep(self, host, mark):
        if host.message:
            message, host.message = host.message, ""
            raise (DeviceHangs if message.startswith("hang") else DeviceStopped)(message)
        if self.advance(mark.queue):
            self.changed.notify_all()
        elif self._all_wait() and not self.advance_any():
            self._report_hang(self.hosts)
        else:
            self.changed.wait(MAX_WAIT_S)

    def _all_wait(self):
        """Whether no host can put anything more into a queue, so that what cannot run now never will."""
        waiting = [host.waits_for for host in self.hosts]
        return self.is_alone and all(mark is not None and not mark.is_done for mark in waiting)

    def _report_hang(self, hosts):
        lines = ["hang: what the hosts wait for can never run, or not in time"]
        for host in self.hosts:
            if host.waits_for is not None:
                lines.append(f"  host of {host.name} waits for {host.waits_for.queue} at {host.waits_for.stack}")
        for queue in self.all:
            if queue.items:
                head = queue.items[0]
                lines.append(f"  head of {queue}: {head.name}, launched at {head.stack}; {len(queue.items)} in all")
        text = "\n".join(lines)
        self.on_hang(text.removeprefix("hang: "))
        for host in hosts:
            host.message = text
        self.changed.notify_all()

    def raise_failure(self, device):
        if device in self.failures:
            self.raised.add(device)
            raise KernelFailed(self.failures[device])


def _pass(mark):
    mark.time_s, mark.is_done = mark.queue.now_s, True


def _enter_plain_torch(stack):
    """Enter what makes torch compute as if nobody recorded, traced or cast."""
    stack.enter_context(torch.no_grad())
    stack.enter_context(torch._C._AutoDispatchBelowAutograd())
    stack.enter_context(torch._C._DisableAutocast())
    if torch._C._len_torch_dispatch_stack():
        stack.enter_context(_disable_current_modes())
