"""A program run row by row by the words of a transport model, to judge proofs by; and programs to judge."""

from penstock.ir.instruction import Op
from penstock.proofs import SINGLE_QUEUE
from tests.proofs.tables import edited


class Machine:
    """A program run row by row, by the words of the model and nothing else."""

    def __init__(self, program, model):
        self.orders = [list(program[rank]) for rank in range(len(program))]
        self.where = program.placement.rank_of_stage
        self.model = model
        self.at = [0] * len(self.orders)
        self.run = [0] * len(self.orders)
        self.sent, self.received, self.matched = {}, {}, set()
        self.queues = {}

    def message(self, row):
        maker = row.stage if row.op.is_send else row.peer
        return (row.op in (Op.SEND_FORWARD, Op.RECEIVE_FORWARD), maker, row.microbatch, row.slice)

    def ends(self):
        while self.advance_all() or self.match_heads():
            pass
        return all(at == len(order) for at, order in zip(self.at, self.orders, strict=True))

    def advance_all(self):
        moved = [self.advance(rank) for rank in range(len(self.orders))]
        return any(moved)

    def advance(self, rank):
        before = self.at[rank]
        while self.at[rank] < len(self.orders[rank]) and self.step(rank, self.orders[rank][self.at[rank]]):
            self.at[rank] += 1
        return self.at[rank] != before

    def step(self, rank, row):
        if not (row.op.is_send or row.op.is_receive):
            self.run[rank] += 1
            return self.needed(rank, row) <= self.matched
        peer = self.where[row.peer]
        if self.model is SINGLE_QUEUE:
            self.queues.setdefault((rank, peer), []).append((self.run[rank], row.op.is_send, self.message(row)))
        elif row.op.is_receive:
            self.received.setdefault((peer, rank), []).append(self.message(row))
        else:
            return self.send(rank, peer, row)
        return True

    def send(self, rank, peer, row):
        sent, received = self.sent.setdefault((rank, peer), []), self.received.get((rank, peer), [])
        if len(sent) + 1 > len(received) + self.model.capacity:
            return False
        sent.append(self.message(row))
        self.matched.add(self.message(row))
        return True

    def needed(self, rank, row):
        receives = [other for other in self.orders[rank] if other.op.is_receive]
        kinds = {Op.RECEIVE_FORWARD: (Op.FORWARD,), Op.RECEIVE_BACKWARD: (Op.BACKWARD, Op.BACKWARD_INPUT)}
        names = (row.stage, row.microbatch, row.slice)
        return {
            self.message(r) for r in receives if row.op in kinds[r.op] and (r.stage, r.microbatch, r.slice) == names
        }

    def match_heads(self):
        num_matched = len(self.matched)
        for rank, peer in list(self.queues):
            mine, theirs = self.head(rank, peer), self.head(peer, rank)
            for run, is_send, message in mine:
                other = next((entry for entry in theirs if entry[1:] == (not is_send, message)), None)
                if other:
                    self.queues[rank, peer].remove((run, is_send, message))
                    self.queues[peer, rank].remove(other)
                    theirs.remove(other)
                    self.matched.add(message)
        return len(self.matched) != num_matched

    def head(self, rank, peer):
        queue = self.queues.get((rank, peer), [])
        return [entry for entry in queue if entry[0] == queue[0][0]]


def shuffled(program, chance):
    """Move a few rows of a few ranks a little."""

    def move(orders):
        for _ in range(chance.randint(1, 6)):
            order = chance.choice(orders)
            at = chance.randrange(len(order))
            order.insert(max(0, at + chance.randint(-3, 3)), order.pop(at))

    return edited(program, move)
