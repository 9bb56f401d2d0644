"""Programs whose messages run on the emulated device, by NCCL's rules, as each transport model says that they are used.

    pair_fifo   isend and irecv: a communicator for each pair of ranks, as torch makes them
    coalesced   batch_isend_irecv on one communicator: a batch has the messages between two computations
    posted      Penstock's own two communicators: upward and downward

A computation is one kernel, which waits for its receives. A rank either queues all, so that its stream waits, or its
host waits in front of each row that can block. Where that never ends, `Ran` says at which row each rank stands and
which rows are at the head of the queues.
"""

import random
import re
from dataclasses import dataclass

import torch

from penstock.errors import ScheduleError
from penstock.ir.operations import Op
from penstock.proofs import check
from tests import mutated_programs as changes
from tests.emulated.queues import POLICIES
from tests.emulated.rank_threads import communicator
from tests.emulated.runtime import RUNTIME
from tests.lowering.programs import groups
from tests.proofs.machine import INPUT_GRADIENTS, label_of

MODELS = ("posted", "pair_fifo", "coalesced")
MOST_ROWS = 160
CHANGES = (
    changes.delay_sends, changes.delay_sends, changes.hurry_receives, changes.hurry_receives, changes.move_a_message,
    changes.move_a_message, changes.swap_on_one_channel, changes.move_a_little, changes.swap_neighbours,
    changes.move_a_collective, changes.pair_up,
)  # fmt: skip
"""Each leaves a program complete; most move messages."""
NEVER_ENDS = "never ends under the transport"
MEETS = re.compile(r"meets (\S+) \(rank (\d+), position (\d+)\) in the queue of the two ranks")
OPEN_GROUP = re.compile(r"\(rank (\d+), position \d+\), which is after the open group of (\S+)$")


@dataclass(frozen=True)
class Drawn:
    """A random program, what the proof says of it under a model, and how its ranks are to run."""

    seed: int
    program: object
    model: str
    violations: tuple
    """Empty where the proof accepts it."""
    policy: str
    host_waits: bool

    def __str__(self):
        told = "refused" if self.violations else "accepted"
        return f"seed {self.seed}: {self.program.name} under {self.model}, {told}, {self.policy}, {self.host_waits=}"


def draw(seed):
    """Draw a program that the proof accepts, or refuses because it never ends, the same for the same seed."""
    chance = random.Random(seed)
    model, wants_refused = MODELS[seed % len(MODELS)], seed // len(MODELS) % 2 == 1
    for _ in range(10_000):
        program = changes.random_program(chance)
        if len(program) == 1 or program.num_rows > MOST_ROWS:
            continue
        program = changes.mutated(program, chance, CHANGES).program
        violations = violations_of(program, model)
        is_hang = all(NEVER_ENDS in violation.problem for violation in violations)
        if is_hang and bool(violations) == wants_refused:
            return Drawn(seed, program, model, violations, chance.choice(POLICIES), chance.random() < 0.5)
    raise AssertionError(f"no program for seed {seed}")


def violations_of(program, model):
    try:
        check(program, model)
    except ScheduleError as error:
        return tuple(error.violations)
    return ()


# ---- what a rank runs


@dataclass(frozen=True)
class Ran:
    """What became of a rank's rows, by their positions."""

    stands_at: int | None
    """The first row that did not run of those that can block; None if all ran."""
    heads: list
    """Of each queue of messages that is not empty, the rows of its first operation."""


@dataclass(eq=False)
class _Posted:
    """One operation of a communicator."""

    queue: object
    rows: list
    work: object


class _Rank:
    """One rank of a program; subclasses know how a model posts messages."""

    def __init__(self, program, rank, host_waits):
        self.rank, self.where = rank, program.placement.rank_of_stage
        self.members = [sorted({self.where[stage] for stage in group}) for group in program.tied_groups]
        self.steps = communicator("optimizer steps")
        self.host_waits = host_waits
        self.made, self.received = {}, {}
        self.posted, self.passed, self.blocking = [], set(), []

    def run(self, units):
        position = 0
        for unit in units:
            self._run_unit(position, unit)
            position += len(unit)
        self.flush()
        for posted in self.posted:
            posted.work.wait()
        torch.accelerator.current_stream().synchronize()

    def found(self):
        stands_at = next((position for position in self.blocking if position not in self.passed), None)
        heads = {}
        for posted in self.posted:
            if not posted.work._mark.is_done:
                heads.setdefault(posted.queue, posted.rows)
        return Ran(stands_at, list(heads.values()))

    def _run_unit(self, position, unit):
        row = unit[0]
        if row.op.is_send:
            self.send(position, self.where[row.peer], self.made[label_of(row)])
        elif row.op.is_receive:
            tensor = self.new_tensor()
            self.received[_consumer(row)] = tensor, self.receive(position, self.where[row.peer], tensor)
        elif row.op.is_compute:
            self.flush()
            self._compute(position, unit)
        elif row.op in (Op.REDUCE_TIED, Op.OPTIMIZER_STEP):
            self.flush()
            self._join(position, row)

    def _compute(self, position, unit):
        inputs = [self.received.pop(_own(row), None) for row in unit]
        inputs = [found for found in inputs if found is not None]
        outputs = [self.new_tensor() for _ in unit]
        self._block(position, str(unit[0]), [posted for _, posted in inputs], [tensor for tensor, _ in inputs], outputs)
        for row, output in zip(unit, outputs, strict=True):
            if row.op is Op.FORWARD or row.op in INPUT_GRADIENTS:
                name = "output" if row.op is Op.FORWARD else "gradient"
                self.made[name, row.stage, row.microbatch, row.slice] = output

    def _join(self, position, row):
        """Take part in a collective; the ranks of a tied group exchange over what carries messages."""
        if row.op is Op.OPTIMIZER_STEP:
            total = self.new_tensor()
            posted = [_Posted("step", [position], self.steps.all_reduce([total]))]
        else:
            peers = [peer for peer in self.members[row.peer] if peer != self.rank]
            posted = self.exchange(position, peers)
        self._block(position, str(row), posted, [], [])

    def _block(self, position, name, posted, reads, writes):
        """Queue a row behind what it waits for."""
        self.blocking.append(position)
        self.posted += [each for each in posted if each not in self.posted]
        for each in posted:
            each.work.wait()
        if self.host_waits:
            torch.accelerator.current_stream().synchronize()
        queue = RUNTIME.current_queue()
        RUNTIME.launch(queue, f"{name} at {position}", lambda: self.passed.add(position), reads, writes)

    def new_tensor(self):
        return torch.empty(1, device=torch.device("emu", self.rank))

    def flush(self):
        """Post what is to be posted in front of a row that can block."""

    def _post(self, link, direction, position, peer, tensor):
        post = link.send if direction == "send" else link.recv
        posted = _Posted((link.name, peer), [position], post([tensor], peer))
        self.posted.append(posted)
        return posted


class _OverLinks(_Rank):
    """Messages one by one, over a communicator for each direction."""

    def links(self):
        raise NotImplementedError

    def send(self, position, peer, tensor):
        return self._post(self.links()[peer < self.rank], "send", position, peer, tensor)

    def receive(self, position, peer, tensor):
        return self._post(self.links()[peer > self.rank], "receive", position, peer, tensor)

    def exchange(self, position, peers):
        posted = []
        for peer in peers:
            ends = [self.send, self.receive] if self.rank < peer else [self.receive, self.send]
            posted += [end(position, peer, self.new_tensor()) for end in ends]
        return posted


class PairFifo(_OverLinks):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.link = communicator("messages")

    def links(self):
        return self.link, self.link


class Posted(_OverLinks):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.both = communicator("upward"), communicator("downward")

    def links(self):
        return self.both


class Coalesced(_Rank):
    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.link = communicator("messages")
        self.open = None

    def send(self, position, peer, tensor):
        return self._add("send", position, peer, tensor)

    def receive(self, position, peer, tensor):
        return self._add("receive", position, peer, tensor)

    def exchange(self, position, peers):
        for peer in peers:
            self.send(position, peer, self.new_tensor())
            self.receive(position, peer, self.new_tensor())
        group = self.open
        self.flush()
        return [group] if peers else []  # stages of one rank exchange nothing

    def flush(self):
        if self.open is not None:
            self.open.work = self.link.end_coalescing()
            self.posted.append(self.open)
            self.open = None

    def _add(self, direction, position, peer, tensor):
        if self.open is None:
            self.link.start_coalescing()
            self.open = _Posted("groups", [], None)
        post = self.link.send if direction == "send" else self.link.recv
        post([tensor], peer)
        self.open.rows.append(position)
        return self.open


RANKS = {"pair_fifo": PairFifo, "posted": Posted, "coalesced": Coalesced}


def run_messages(rank, num_ranks, program, model, host_waits):
    """Run the rows of one rank, and return how far it has come."""
    own = RANKS[model](program, rank, host_waits)
    try:
        own.run(groups(program, rank))
    except RuntimeError as error:
        if "hang: " not in str(error):
            raise
    return own.found()


def _consumer(row):
    return row.op is Op.RECEIVE_FORWARD, row.stage, row.microbatch, row.slice


def _own(row):
    if row.op is not Op.FORWARD and row.op not in INPUT_GRADIENTS:
        return None
    return row.op is Op.FORWARD, row.stage, row.microbatch, row.slice


# ---- the comparison


def disagreements(drawn, outcome):
    """List where what ran is not what the proof says."""
    if not drawn.violations:
        stuck = [rank for rank, ran in enumerate(outcome.results) if ran is None or ran.stands_at is not None]
        return [*map(str, outcome.reports), *outcome.tracebacks.values(), *(f"rank {rank} is stuck" for rank in stuck)]
    if outcome.kinds() != ["hang"] or None in outcome.results:
        return [f"no hang, but {outcome.kinds()}", *map(str, outcome.reports), *outcome.tracebacks.values()]
    found = []
    named = {violation.rank: violation.position for violation in drawn.violations}
    stands = {rank: ran.stands_at for rank, ran in enumerate(outcome.results) if ran.stands_at is not None}
    if stands != named:
        found.append(f"the proof names the rows {named} (position by rank), the ranks stand at {stands}")
    for violation in drawn.violations:
        if f"host of rank {violation.rank} waits" not in outcome.reports[0].text:
            found.append(f"the report leaves rank {violation.rank} out")
        found += _wrong_heads(drawn.program, violation, outcome.results)
    return found


def _wrong_heads(program, violation, results):
    """Compare the queues that a violation names with those of the ranks."""
    for text, rank, position in MEETS.findall(violation.problem):
        heads = results[int(rank)].heads
        if [int(position)] not in heads:
            yield f"{text} at {position} of rank {rank} is at the head of no queue; {heads} are"
    for rank, text in OPEN_GROUP.findall(violation.problem):
        texts = [str(program[int(rank)][row]) for row in results[int(rank)].heads[0]]
        if text not in texts:
            yield f"{text} is not in the open group of rank {rank}, which is {texts}"
