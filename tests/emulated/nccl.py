"""Messages and collectives by the rules of NCCL, as torch uses it.

A communicator is a queue on a stream of its own. What is posted first runs first, and a message runs when both ends
have come to it, so two ranks that both send first wait for ever. As torch does, a pair of ranks has a queue of its own
for single messages, in both directions together; batches and collectives share one more. The host waits
for none of them: `Work.wait` lets the current stream wait. A posted operation waits for the stream that was current,
and holds its tensors until somebody waits for it. Bytes go by the store, so ranks may be threads or processes.
"""

import pickle
import threading
import time
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from tests.emulated.checker import DIFFER, HANG
from tests.emulated.kernels import DEVICE
from tests.emulated.queues import KERNEL_S
from tests.emulated.runtime import RUNTIME
from tests.emulated.stacks import capture

BACKEND = "emunccl"
PUMP_S = PAUSE_S = 0.002
LONGEST_ABORT_S = 3.0
SUM = 0  # the number of c10d.ReduceOp


class CommunicatorAborted(RuntimeError):
    """The communicator was aborted, shut down or given up by the watchdog."""


@dataclass(eq=False)
class Part:
    """One message end or collective; a coalesced operation has several."""

    own: str
    """The key of the store under which this rank says that it has come here, with its bytes."""
    others: list
    """The keys under which the others do."""
    bytes_to_send: object
    """Called without arguments when the queue comes here."""
    finish: object
    """Called with what the others have put there."""
    reads: list
    writes: list
    peer: int | None = None


@dataclass
class Note:
    """What a rank puts into the store when its queue has come to an operation."""

    kind: str
    """Equal on all ranks, or the program is wrong."""
    tensors: list
    begin_s: float
    where: str


class Work:
    """What posting returns; c10d.cpp wraps it."""

    def __init__(self, communicator, mark, tensors, outputs, *, host_waits=False):
        self._communicator, self._mark, self._outputs = communicator, mark, outputs
        self._held, self._host_waits = tensors, host_waits

    def is_completed(self):
        return bool(self._communicator.error) or self._mark is None or RUNTIME.is_passed(self._mark)

    def is_success(self):
        return not self._communicator.error and (self._mark is None or self._mark.is_done)

    def wait(self, limit_s=None):
        """Let the current stream wait; with a limit, and for a barrier, the host waits too."""
        self._communicator.raise_error()
        if self._mark is None:
            return
        queue = RUNTIME.current_queue(self._communicator.device)
        RUNTIME.queues.wait_for(queue, self._mark, f"wait for {self._communicator}")
        self._held = None  # from here on the order of the tensors' own stream is enough
        if limit_s is None and not self._host_waits:
            return
        RUNTIME.note_host_wait("wait for a message")
        if not RUNTIME.queues.demand(RUNTIME.host(), self._mark, limit_s):
            raise RuntimeError(f"emulated: {self._communicator}: timed out after {limit_s} s")
        self._communicator.raise_error()

    def result(self):
        return self._outputs

    def get_future_result(self):
        raise RuntimeError("emulated: only NCCL's own work has it")


class Communicator:
    """One rank's end. Its methods are those of a backend of c10d.

    `watchdog_s` counts from the time at which an operation has come to the head of its queue.
    """

    def __init__(self, store, rank, num_ranks, *, watchdog_s=None, name="nccl"):
        self.rank, self.num_ranks, self.name = rank, num_ranks, name
        self.device = RUNTIME.extension.current_device()
        self.error = ""
        self.queues = {}
        self.latency_s, self.seconds_per_byte = KERNEL_S, 0.0
        self._store, self._watchdog_s = store, watchdog_s
        self._numbers, self._batch = {}, None
        RUNTIME.communicators.append(self)

    def __str__(self):
        return f"{self.name} of rank {self.rank}"

    # ---- messages

    def send(self, tensors, to, tag=0):
        key = self._message(self.rank, to)
        own = partial(_packed, _on_cpu(tensors))
        return self._post(
            f"send to {to}", Part(f"{key}/sent", [f"{key}/taken"], own, lambda notes: None, tensors, [], to)
        )

    def recv(self, tensors, source, tag=0):
        key, targets = self._message(source, self.rank), _on_cpu(tensors)
        part = Part(f"{key}/taken", [f"{key}/sent"], lambda: [], lambda notes: _fill(targets, notes[0].tensors), [], [])
        part.writes, part.peer = tensors, source
        return self._post(f"recv from {source}", part)

    def start_coalescing(self):
        self._batch = []

    def end_coalescing(self):
        batch, self._batch = self._batch, None
        return self._queue("batch of " + ", ".join(name for name, _ in batch), [part for _, part in batch], None)

    # ---- collectives: every rank computes its result from what all have put there, in the order of the ranks

    def all_reduce(self, tensors, reduction=SUM):
        _require_sum(reduction)
        targets = _on_cpu(tensors)

        def finish(notes):
            for index, target in enumerate(targets):
                target.copy_(_sum_of([note.tensors[index] for note in notes]))

        return self._collective("all_reduce", (reduction,), tensors, tensors, finish)

    def broadcast(self, tensors, root=0):
        targets = _on_cpu(tensors)
        is_root = self.rank == root
        reads, writes = (tensors, []) if is_root else ([], tensors)
        return self._collective(
            "broadcast", (root,), reads, writes, lambda notes: _fill(targets, notes[root].tensors), of=tensors
        )

    def all_gather_into_tensor(self, output, own):
        (target,) = _on_cpu([output])

        def finish(notes):
            target.view(-1).copy_(torch.cat([note.tensors[0].reshape(-1) for note in notes]))

        return self._collective("all_gather_into_tensor", (), [own], [output], finish)

    def reduce_scatter_tensor(self, output, own, reduction=SUM):
        _require_sum(reduction)
        (target,) = _on_cpu([output])

        def finish(notes):
            parts = [note.tensors[0].reshape(self.num_ranks, *target.shape)[self.rank] for note in notes]
            target.copy_(_sum_of(parts))

        return self._collective("reduce_scatter_tensor", (reduction,), [own], [output], finish)

    def barrier(self):
        token = torch.zeros(1, device=f"{DEVICE}:{self.device}")
        return self._collective("barrier", (), [token], [token], lambda notes: None, host_waits=True)

    # ---- the end

    def abort(self):
        """End all operations of this rank's end; whoever waits for one gets an error.

        When it returns, none of them uses its tensors any more. NCCL frees memory here, which waits for all that runs
        on the device, messages of other communicators too: those have to be aborted at the same time.
        """
        self._give_up("aborted")
        self._await_others()
        for queue in self.queues.values():
            RUNTIME.know_ended(queue)

    def shutdown(self):
        self._give_up("shut down")

    def raise_error(self):
        if self.error:
            raise CommunicatorAborted(f"emulated: {self} was {self.error}")

    def _give_up(self, reason):
        with RUNTIME.queues.changed:
            self.error = self.error or reason
            RUNTIME.queues.changed.notify_all()

    def _await_others(self):
        end_s = time.monotonic() + LONGEST_ABORT_S
        others = [other for other in RUNTIME.communicators if other.device == self.device and other is not self]
        while any(not other.error and any(queue.items for queue in other.queues.values()) for other in others):
            RUNTIME.queues.drain()
            if time.monotonic() > end_s:
                RUNTIME.checker.report(HANG, ["abort"], f"the abort of {self} waits for messages of {others[-1]}")
                return
            time.sleep(PAUSE_S)

    # ---- posting

    def _message(self, source, to):
        return f"{source}/{to}/{self._next_number((source, to))}"

    def _next_number(self, what):
        number = self._numbers[what] = self._numbers.get(what, 0) + 1
        return number

    def _collective(self, name, options, reads, writes, finish, *, of=None, host_waits=False):
        number = self._next_number("all")
        keys = [f"all/{number}/{rank}" for rank in range(self.num_ranks)]
        described = [(tuple(tensor.shape), str(tensor.dtype)) for tensor in of or reads]
        part = Part(keys[self.rank], keys, partial(_packed, _on_cpu(reads)), finish, reads, writes)
        return self._post(f"{name}{(*options, *described)}", part, host_waits=host_waits)

    def _post(self, name, part, *, host_waits=False):
        if self._batch is not None:
            self._batch.append((name, part))
            return Work(self, None, [], [])
        return self._queue(name, [part], part.peer, host_waits=host_waits)

    def _queue(self, name, parts, peer, *, host_waits=False):
        self.raise_error()
        with RUNTIME.lock:
            queue = self._queue_for(peer)
            own = RUNTIME.mark(RUNTIME.current_queue(self.device), f"begin of {name}")
            RUNTIME.queues.wait_for(queue, own, f"input of {name}")
            reads = [tensor for part in parts for tensor in part.reads]
            writes = [tensor for part in parts for tensor in part.writes]
            for part in parts:
                part.reads, part.writes = [], []  # only the work holds the tensors
            meeting = Meeting(self, queue, name, parts)
            RUNTIME.launch(
                queue,
                f"{name} ({self})",
                meeting.run,
                reads,
                writes,
                cost_s=self.latency_s + self.seconds_per_byte * sum(tensor.nbytes for tensor in [*reads, *writes]),
                earliest_s=meeting.begin_of_others_s,
                is_ready=meeting.is_ready,
                needs=meeting.needs,
                is_wanted=meeting.is_wanted,
            )
            mark = RUNTIME.mark(queue, f"end of {name}")
            return Work(self, mark, [*reads, *writes], writes, host_waits=host_waits)

    def _queue_for(self, peer):
        pair = None if peer is None else tuple(sorted((self.rank, peer)))
        if pair not in self.queues:
            self.queues[pair] = RUNTIME.queues.of(self.device, RUNTIME.new_stream(self.device))
        return self.queues[pair]


class Meeting:
    """One queued operation of a communicator: it waits for the other ranks, and ends in error with its communicator."""

    def __init__(self, communicator, queue, name, parts):
        self._communicator, self._store = communicator, communicator._store
        self._queue, self._name, self._parts = queue, name, parts
        self._stack = capture()
        self._since_s = None
        self._notes = None

    def is_ready(self):
        """Say that this rank has come here, once, and look whether the others have."""
        if self._communicator.error:
            return True
        if self._since_s is None:
            self._since_s = time.monotonic()
            for part in self._parts:
                note = Note(self._name, part.bytes_to_send(), self._queue.now_s, str(self._stack))
                self._store.set(part.own, pickle.dumps(note))
        if not all(self._store.check(part.others) for part in self._parts):
            return self._is_given_up()
        self._notes = [[pickle.loads(self._store.get(key)) for key in part.others] for part in self._parts]
        return True

    def is_wanted(self):
        return any(self._store.check([key]) for part in self._parts for key in part.others if key != part.own)

    def needs(self):
        """List what may have to go on first: in one process, the queues of all other communicators."""
        return [queue for other in RUNTIME.communicators for queue in other.queues.values() if queue is not self._queue]

    def begin_of_others_s(self):
        return max((note.begin_s for notes in self._notes or [] for note in notes), default=0.0)

    def run(self):
        if self._communicator.error:
            return
        for part, notes in zip(self._parts, self._notes, strict=True):
            self._compare(part, notes)
            part.finish(notes)

    def _compare(self, part, notes):
        """Report ranks that do not do the same. Of a message, the receiver compares the shapes when it copies."""
        if part.peer is not None:
            return
        for rank, note in enumerate(notes):
            if note.kind != self._name:
                text = f"rank {self._communicator.rank} does {self._name} on {self._queue} at {self._stack}; "
                text += f"rank {rank} does {note.kind} at {note.where}"
                RUNTIME.checker.report(DIFFER, [self._name, note.kind], text)

    def _is_given_up(self):
        limit_s = self._communicator._watchdog_s
        if limit_s is None or time.monotonic() - self._since_s < limit_s:
            return False
        text = f"watchdog: {self._name} of {self._communicator} waits for over {limit_s} s, posted at {self._stack}"
        RUNTIME.checker.report(HANG, [self._name], text)
        self._communicator._give_up(f"given up by the {text}")
        return True


def pump():
    """Let messages that another process waits for go on, whatever this host does; a thread of processes as ranks."""
    while True:
        time.sleep(PUMP_S)
        with RUNTIME.queues.changed:
            queues = [queue for communicator in RUNTIME.communicators for queue in communicator.queues.values()]
            moved = [queue for queue in queues if _is_wanted(queue) and RUNTIME.queues.advance(queue)]
            if moved:
                RUNTIME.queues.changed.notify_all()


def start_pump():
    threading.Thread(target=pump, daemon=True).start()


def register_backend():
    def create(store, rank, num_ranks, timeout):
        communicator = Communicator(store, rank, num_ranks, watchdog_s=timeout.total_seconds())
        return RUNTIME.extension.make_backend(communicator, rank, num_ranks)

    dist.Backend.register_backend(BACKEND, create, devices=[DEVICE])


def _is_wanted(queue):
    first = next((item for item in queue.items if item.is_wanted is not None), None)
    return first is not None and first.is_wanted()


def _on_cpu(tensors):
    return [RUNTIME.extension.as_cpu(tensor) for tensor in tensors]


def _require_sum(reduction):
    if reduction != SUM:
        raise NotImplementedError(f"emulated: only sums are there, got c10d.ReduceOp number {reduction}")


def _sum_of(tensors):
    """Add tensors up in the order of the ranks."""
    total = tensors[0].clone()
    for tensor in tensors[1:]:
        total += tensor
    return total


def _packed(tensors):
    return [tensor.clone() for tensor in tensors]


def _fill(targets, tensors):
    for target, tensor in zip(targets, tensors, strict=True):
        if target.shape != tensor.shape or target.dtype != tensor.dtype:
            raise RuntimeError(
                f"a message of {tensor.dtype} {tuple(tensor.shape)} for {target.dtype} {tuple(target.shape)}"
            )
        target.copy_(tensor)
