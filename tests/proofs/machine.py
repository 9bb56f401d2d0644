"""Programs run row by row by the words of a transport model and nothing else, to judge proofs by.

Written apart from `ir.walk`, `ir.deps` and the proofs: ranks hold values, queues hold labels, and a step moves what the
words of the model let move. Every step only ever adds: a value that is there stays, a posted message stays posted, a
started group stays started. So a step that is possible stays possible until it is taken, the order of steps does not
matter, and one greedy run finds the end if any run does.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

from penstock.ir.operations import Op

INPUT_GRADIENTS = (Op.BACKWARD, Op.BACKWARD_INPUT)
BACKWARDS = (*INPUT_GRADIENTS, Op.BACKWARD_WEIGHT)
NAMES = {Op.FORWARD: "output", Op.BACKWARD_WEIGHT: "weight", Op.RECOMPUTE: "activation"}
"""Of what computations make; all others make gradients of inputs."""
COPIES = (Op.OFFLOAD, Op.RELOAD)
ADDED = (*COPIES, Op.LOAD)
"""Rows that a program may have, judged when they run."""
READS_KEPT = (*INPUT_GRADIENTS, Op.RECOMPUTE)


class Wrong(Exception):
    """The program does what no right program does, under any model."""


def verdicts(program, models):
    """Return "ends", "hangs", or "wrong" for a program under each of the models, by their names."""
    orders = [program[rank] for rank in range(len(program))]
    try:
        require_rows(program, orders)
    except Wrong:
        return dict.fromkeys(models, "wrong")
    return {model: _run(machine(program, orders, model)) for model in models}


def verdict(program, model):
    return verdicts(program, [model])[model]


def _run(machine):
    try:
        return "ends" if machine.ends() else "hangs"
    except Wrong:
        return "wrong"


def machine(program, orders, model):
    if model == "pair_fifo":
        return PairQueues(program, orders)
    if model == "coalesced":
        return Groups(program, orders)
    return Channels(program, orders, {"posted": 10**9, "rendezvous": 0}[model])


# ---- what must be there


def require_rows(program, orders):
    """Each rank has its rows, each once: computations, both ends of each message, and the collectives of training."""
    placement, trains = program.placement, not program.is_forward_only
    split = identities(orders, Op.BACKWARD_INPUT)
    again = identities(orders, Op.RECOMPUTE) if trains else set()
    expected = [Counter() for _ in orders]
    for microbatch, number in enumerate(program.route_of_microbatch.tolist()):
        route = placement.routes[number]
        for part in range(program.num_slices):
            for stage in route:
                own = (stage, microbatch, part)
                ops = [Op.FORWARD]
                if trains:
                    ops += [Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT] if own in split else [Op.BACKWARD]
                    ops += [Op.RECOMPUTE] if own in again else []
                expected[placement.rank_of_stage[stage]].update((op, *own, stage) for op in ops)
            for stage, following in pairwise(route):
                _expect_messages(expected, placement.rank_of_stage, stage, following, (microbatch, part), trains)
    omits = program.omits_reductions and not any(is_collective(row.op) for order in orders for row in order)
    for rank, order in enumerate(orders):
        found = Counter((row.op, *identity(row), row.stage if row.op.is_compute else row.peer)
                        for row in order if not is_collective(row.op) and row.op not in ADDED)  # fmt: skip
        if found != expected[rank]:
            raise Wrong
        _require_collectives(program, rank, order, has_reductions=trains and not omits)
    steps = [[at for at, row in enumerate(order) if row.op is Op.OPTIMIZER_STEP] for order in orders]
    if any(steps) and any(at != [len(order) - 1] or not trains for at, order in zip(steps, orders, strict=True)):
        raise Wrong  # the optimizer step is the last row of every rank, or of none
    sides = [_sides_of_messages(order) for order in orders]
    if len({num_barriers for num_barriers, _ in sides}) > 1:
        raise Wrong  # a rank waits for one that never comes
    if any(len({place for _, places in sides for place in places.get(label, ())}) > 1 for label in {
        label for _, places in sides for label in places
    }):  # fmt: skip
        raise Wrong  # a message crosses a barrier


def _sides_of_messages(order):
    """How many barriers a rank has, and for each message of it how many are before its rows."""
    num_barriers, places = 0, {}
    for row in order:
        num_barriers += row.op is Op.BARRIER
        if row.op.is_send or row.op.is_receive:
            places.setdefault(label_of(row), set()).add(num_barriers)
    return num_barriers, places


def _expect_messages(expected, where, stage, following, place, trains):
    one, other = where[stage], where[following]
    if one != other:
        expected[one][(Op.SEND_FORWARD, stage, *place, following)] += 1
        expected[other][(Op.RECEIVE_FORWARD, following, *place, stage)] += 1
    if one != other and trains:
        expected[other][(Op.SEND_BACKWARD, following, *place, stage)] += 1
        expected[one][(Op.RECEIVE_BACKWARD, stage, *place, following)] += 1


def _require_collectives(program, rank, order, *, has_reductions):
    """Each stage with a backward is reduced once, and once per tied group that it is in; rows are on their rank."""
    own = program.placement.stages_of_rank[rank]
    wanted = Counter()
    if has_reductions:
        wanted.update((Op.REDUCE_GRADIENT, row.stage) for row in order if row.op in INPUT_GRADIENTS)
        wanted = Counter(dict.fromkeys(wanted, 1))
        for index, group in enumerate(program.tied_groups):
            wanted.update((Op.REDUCE_TIED, stage, index) for stage in group if stage in own)
    found = Counter((row.op, row.stage) for row in order if row.op is Op.REDUCE_GRADIENT)
    found.update((row.op, row.stage, row.peer) for row in order if row.op is Op.REDUCE_TIED)
    if found != wanted or any(row.stage not in own for row in order):
        raise Wrong


def identities(orders, op):
    return {identity(row) for order in orders for row in order if row.op is op}


def identity(row):
    return row.stage, row.microbatch, row.slice


def is_collective(op):
    return op in (Op.REDUCE_GRADIENT, Op.REDUCE_TIED, Op.OPTIMIZER_STEP, Op.BARRIER)


# ---- what runs


@dataclass
class Rank:
    """One rank: the units of its order (an overlapped pair is one), and what it holds."""

    units: list
    at: int = 0
    values: set = field(default_factory=set)
    """Labels of results that it made or received."""
    awaited: set = field(default_factory=set)
    """Labels that it has posted receives for."""
    on_host: set = field(default_factory=set)
    """What forwards keep that is there, and not on the device."""
    loaded: set = field(default_factory=set)
    """The data that are there and not yet used."""
    num_barriers: int = 0
    """How many barriers it has come to."""
    entered: bool = False
    """Whether it has posted what the collective at which it stands sends and receives."""


class Machine:
    """Runs the ranks in turns; a model says what posting, delivering and exchanging mean."""

    def __init__(self, program, orders):
        self.program = program
        self.where = program.placement.rank_of_stage
        self.ranks = [Rank(_units(program, rank, order)) for rank, order in enumerate(orders)]
        self.again = identities(orders, Op.RECOMPUTE)
        self.trains = not program.is_forward_only
        self.loads = any(row.op is Op.LOAD for order in orders for row in order)
        self.backwards_left = Counter(row.stage for order in orders for row in order if row.op in BACKWARDS)

    def ends(self):
        while any([self.advance(rank) for rank in range(len(self.ranks))]) | self.deliver():  # noqa: C419
            pass
        if any(rank.loaded for rank in self.ranks):
            raise Wrong  # no forward has used them
        return all(rank.at == len(rank.units) for rank in self.ranks)

    def advance(self, number):
        rank, before = self.ranks[number], self.ranks[number].at
        while rank.at < len(rank.units) and self.run(number, rank.units[rank.at]):
            rank.at += 1
        return rank.at != before

    def run(self, number, unit):
        """Run a unit if it can run."""
        op = unit[0].op
        if op.is_compute:
            self.arrive(number)
            return self.compute(self.ranks[number], unit)
        if op.is_send:
            if label_of(unit[0]) not in self.ranks[number].values:
                raise Wrong  # the result is not made yet
            return self.send(number, self.where[unit[0].peer], label_of(unit[0]))
        if op.is_receive:
            self.ranks[number].awaited.add(label_of(unit[0]))
            self.receive(number, self.where[unit[0].peer], label_of(unit[0]))
            return True
        if op in COPIES:
            self.copy(self.ranks[number], unit[0])
            return True
        if op is Op.LOAD:
            self.load(self.ranks[number], unit[0])
            return True
        if op not in (Op.OPTIMIZER_STEP, Op.BARRIER) and self.backwards_left[unit[0].stage]:
            raise Wrong  # the gradient is not whole yet
        return op is Op.REDUCE_GRADIENT or self.join(number, unit[0])

    def copy(self, rank, row):
        """Move what a forward keeps, which is there from it to its backward, or to the recomputation before that."""
        own = identity(row)
        is_kept = ("output", *own) in rank.values and not {("gradient", *own), ("activation", *own)} & rank.values
        if not is_kept or (own in rank.on_host) != (row.op is Op.RELOAD) or not self.trains:
            raise Wrong
        rank.on_host ^= {own}

    def takes_data(self, stage):
        placement = self.program.placement
        return placement.previous_stage[stage] < 0 or placement.next_stage[stage] < 0

    def load(self, rank, row):
        """The first and the last stage of a route take data; for the others a load does nothing."""
        if self.takes_data(row.stage):
            if identity(row) in rank.loaded:
                raise Wrong
            rank.loaded.add(identity(row))

    def compute(self, rank, unit):
        needed = set().union(*(self.needs(row) for row in unit))
        if any(row.op in READS_KEPT and identity(row) in rank.on_host for row in unit):
            raise Wrong
        if not needed <= rank.values | rank.awaited:
            raise Wrong  # it is before what it needs on its own rank
        if not needed <= rank.values:
            return False
        for row in unit:
            if row.op is Op.FORWARD and self.loads and self.takes_data(row.stage):
                if identity(row) not in rank.loaded:
                    raise Wrong
                rank.loaded.remove(identity(row))
            rank.values.add((NAMES.get(row.op, "gradient"), *identity(row)))
            self.backwards_left[row.stage] -= row.op in BACKWARDS
        return True

    def needs(self, row):
        """The labels that a computation needs on its rank."""
        stage, microbatch, part = identity(row)
        placement = self.program.placement
        if row.op is Op.BACKWARD_WEIGHT:
            return {("gradient", stage, microbatch, part)}
        if row.op is Op.RECOMPUTE:
            return {("output", stage, microbatch, part)}
        name = "output" if row.op is Op.FORWARD else "gradient"
        neighbour = (placement.previous_stage if row.op is Op.FORWARD else placement.next_stage)[stage]
        other = part - 1 if row.op is Op.FORWARD else part + 1
        found = set() if row.op is Op.FORWARD else {("output", stage, microbatch, part)}
        if row.op is not Op.FORWARD and identity(row) in self.again:
            found.add(("activation", stage, microbatch, part))
        if neighbour >= 0:
            found.add((name, neighbour, microbatch, part))
        if 0 <= other < self.program.num_slices:
            found.add((name, stage, microbatch, other))
        return found

    def join(self, number, row):
        """Take part in a collective: it is over when all its members are there, and their exchange has arrived."""
        rank = self.ranks[number]
        if not rank.entered:
            rank.entered = True
            rank.num_barriers += row.op is Op.BARRIER
            self.arrive(number)
            for peer in self.members(row):
                if peer != number and row.op is Op.REDUCE_TIED:
                    self.exchange(number, peer, ("tied", row.peer))
            self.arrive(number)
        if not self.is_over(number, row):
            return False
        rank.entered = False
        return True

    def members(self, row):
        if row.op in (Op.OPTIMIZER_STEP, Op.BARRIER):
            return range(len(self.ranks))
        return sorted(self.where[stage] for stage in self.program.tied_groups[row.peer])

    def is_over(self, number, row):
        if row.op is Op.REDUCE_TIED:
            peers = [peer for peer in self.members(row) if peer != number]
            return all(("tied", row.peer, peer) in self.ranks[number].values for peer in peers)
        if row.op is Op.BARRIER:
            return all(rank.num_barriers >= self.ranks[number].num_barriers for rank in self.ranks)
        # The step is everyone's last row: whoever stands at it or has passed it is there.
        return all(rank.at >= len(rank.units) - 1 for rank in self.ranks)

    def arrive(self, number):
        """The rank stands at a row that may block: what it has posted so far is out."""

    def give(self, rank, peer, label):
        """A message is there; that of an exchange is known by who sent it as well."""
        self.ranks[rank].values.add((*label, peer) if label[0] == "tied" else label)


def _units(program, rank, order):
    units, together = [], False
    for row, instruction in enumerate(order, start=int(program.offsets[rank])):
        if together:
            units[-1].append(instruction)
        else:
            units.append([instruction])
        together = bool(program.joined[row])
    return units


def _marks(program, rank):
    """The marks of a rank's units, of which a pair of computations is one."""
    rows = range(*program.offsets[rank : rank + 2].tolist())
    return [int(program.group[row]) for row in rows if row == rows[0] or not program.joined[row - 1]]


def label_of(row):
    """What a send or receive moves: an output or a gradient, the stage that makes it, microbatch and slice."""
    name = "output" if row.op in (Op.SEND_FORWARD, Op.RECEIVE_FORWARD) else "gradient"
    return (name, row.stage if row.op.is_send else row.peer, row.microbatch, row.slice)


class Channels(Machine):
    """One queue per ordered pair of ranks; a send blocks while `capacity` others are out without a receive."""

    def __init__(self, program, orders, capacity):
        super().__init__(program, orders)
        self.capacity = capacity
        self.sent, self.posted, self.given = {}, {}, Counter()

    def send(self, number, peer, label):
        channel = (number, peer)
        if len(self.sent.setdefault(channel, [])) >= len(self.posted.get(channel, [])) + self.capacity:
            return False
        self.sent[channel].append(label)
        return True

    def receive(self, number, peer, label):
        self.posted.setdefault((peer, number), []).append(label)

    def exchange(self, number, peer, label):
        """Both at once: neither waits for the other."""
        self.sent.setdefault((number, peer), []).append(label)
        self.posted.setdefault((peer, number), []).append(label)

    def deliver(self):
        """The n-th message of a channel goes to its n-th receive."""
        moved = False
        for (source, target), labels in self.sent.items():
            awaited = self.posted.get((source, target), [])
            while self.given[source, target] < min(len(labels), len(awaited)):
                at = self.given[source, target]
                if labels[at] != awaited[at]:
                    raise Wrong
                self.given[source, target] += 1
                self.give(target, source, labels[at])
                moved = True
        return moved


class PairQueues(Machine):
    """One queue per pair of ranks and end, for both directions; the n-th entries of both ends are one message."""

    def __init__(self, program, orders):
        super().__init__(program, orders)
        self.queues, self.given = {}, Counter()

    def send(self, number, peer, label):
        self.queues.setdefault((number, peer), []).append((label, "send"))
        return True

    def receive(self, number, peer, label):
        self.queues.setdefault((number, peer), []).append((label, "receive"))

    def exchange(self, number, peer, label):
        self.queues.setdefault((number, peer), []).append((label, "both"))

    def deliver(self):
        moved = False
        for (one, other), mine in self.queues.items():
            theirs = self.queues.get((other, one), [])
            while one < other and self.given[one, other] < min(len(mine), len(theirs)):
                (label, role), (other_label, other_role) = (queue[self.given[one, other]] for queue in (mine, theirs))
                if role == other_role != "both":
                    break  # two sends, or two receives: neither end can go on
                if label != other_label:
                    raise Wrong
                self.given[one, other] += 1
                if role != "send":
                    self.give(one, other, label)
                if role != "receive":
                    self.give(other, one, label)
                moved = True
        return moved


@dataclass(eq=False)
class Group:
    """What a rank posts together: the ends of messages, each (direction, channel, how manieth of it, label)."""

    ends: list = field(default_factory=list)
    started: bool = False


class Groups(Machine):
    """Per rank, one queue of groups; a message moves when the groups at both its ends have started."""

    def __init__(self, program, orders):
        super().__init__(program, orders)
        self.open = [Group() for _ in self.ranks]
        self.marks = [_marks(program, number) if program.group.any() else None for number in range(len(self.ranks))]
        """Per rank, the groups that the program marks, by unit; None where all up to a row that may block is one."""
        self.open_mark = [0] * len(self.ranks)
        self.waiting = [[] for _ in self.ranks]
        self.counts = Counter()
        self.started = {}
        """Ends of messages whose group has started: (direction, channel, number) to label."""

    def send(self, number, peer, label):
        self._add(number, "send", (number, peer), label)
        return True

    def receive(self, number, peer, label):
        self._add(number, "receive", (peer, number), label)

    def exchange(self, number, peer, label):
        self._add(number, "send", (number, peer), label)
        self._add(number, "receive", (peer, number), label)

    def _add(self, number, direction, channel, label):
        marks = self.marks[number]
        if marks is not None and label[0] != "tied":
            mark = marks[self.ranks[number].at]
            if mark == 0 or mark != self.open_mark[number]:
                self.arrive(number)
            self.open_mark[number] = mark
        self.open[number].ends.append((direction, channel, self.counts[direction, channel], label))
        self.counts[direction, channel] += 1

    def arrive(self, number):
        if self.open[number].ends:
            self.waiting[number].append(self.open[number])
            self.open[number] = Group()

    def deliver(self):
        moved = False
        for number, rank in enumerate(self.ranks):
            if rank.at == len(rank.units):
                self.arrive(number)
            for group in self.waiting[number][:1]:
                moved |= self._start(group) | self._end(number, group)
        return moved

    def _start(self, group):
        if group.started:
            return False
        group.started = True
        self.started.update({end[:3]: end[3] for end in group.ends})
        return True

    def _end(self, number, group):
        others = {"send": "receive", "receive": "send"}
        partners = [(others[direction], channel, count) for direction, channel, count, _ in group.ends]
        for end, partner in zip(group.ends, partners, strict=True):
            if self.started.get(partner, end[3]) != end[3]:
                raise Wrong
        if not all(partner in self.started for partner in partners):
            return False
        for direction, (source, _), _, label in group.ends:
            if direction == "receive":
                self.give(number, source, label)
        self.waiting[number].pop(0)
        return True
