"""Small chains for tests of `ps.cut`, and the three claims: right, refused by name, or either of them."""

import re

import torch
from torch import nn

from tests.support.cut_models import Call, Course, difference, outcome_of, run_rank
from tests.support.draws import RecordedDraws
from tests.support.local_pipelines import values

ROWS, LENGTH, WIDTH = 8, 3, 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner, self.scale = nn.Linear(WIDTH, WIDTH), 1.0

    def forward(self, hidden, factor=1.0):
        return hidden + self.inner(hidden).tanh() * self.scale * factor


class Chain(nn.Module):
    """Begin, four blocks and a head; subclasses change what the forward does around the blocks."""

    block = Block

    def __init__(self):
        super().__init__()
        self.begin = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.build()

    def build(self): ...

    def forward(self, rows):
        hidden = self.begin(rows)
        for number, block in enumerate(self.blocks):
            hidden = self.call(block, number, hidden)
        return self.head(hidden)

    def call(self, block, number, hidden):
        return block(hidden)


class Stateful(Chain):
    """Each forward advances a state, by default `calls` of the model, and all blocks depend on it."""

    def forward(self, rows):
        self.advance(rows)
        hidden = self.begin(rows)
        for block in self.blocks:
            hidden = block(hidden) * (1 + self.factor() / 10)
        return self.head(hidden)

    def factor(self):
        return self.calls


def batch(seed=1, length=LENGTH, **keywords):
    """One batch of rows, whose values follow from the seed, with a target and further keywords."""
    return {"rows": values(seed, ROWS, length, WIDTH, dtype=torch.float64), **keywords}


def call_of(keywords, is_training=True, change=None):
    rows = keywords.get("rows", next(iter(keywords.values())))
    return Call(keywords, values(99, len(rows), rows.shape[1], WIDTH, dtype=torch.float64), is_training, change)


def outcome(kind, batches, num_ranks=1, **options):
    """Run a chain on batches or calls; twice the same batch by default, since the second step is another path."""
    return outcome_of(course_of(kind, batches, num_ranks, **options))


def course_of(kind, batches, num_ranks=1, **options):
    torch.manual_seed(0)
    calls = [each if isinstance(each, Call) else call_of(each) for each in batches or [batch(1), batch(1), batch(2)]]
    return Course(kind().double(), calls, num_ranks=num_ranks, draws=RecordedDraws(), **options)


def on_process(rank, kind, num_ranks):
    """Return the traces of a rank that is a process, and the text of its error."""
    traces, error = run_rank(None, course_of(kind, (), num_ranks))
    return traces, error and f"{type(error).__name__}: {error}"


def assert_right_on_processes(pool, kind):
    """The same by the processes of a pool, which talk by torch's process groups."""
    ranks = pool.run(on_process, kind, 2, timeout_s=60.0)
    assert [error for _, error in ranks if error] == []
    assert difference(course_of(kind, (), 2), [traces for traces, _ in ranks]).text == ""


def assert_right(kind, *batches, **options):
    found = outcome(kind, batches, **options)
    assert found.kind == "RIGHT", f"{found.kind} in call {found.call}: {found.text}"


def assert_refused(kind, *batches, match, call=0, **options):
    """A refusal in this call, whose words match; the layer that a message begins with does not count."""
    found = outcome(kind, batches, **options)
    assert found.kind == "REFUSED", f"{found.kind} in call {found.call}: {found.text}"
    assert re.search(match, words_of(found)), f"expected {match!r} in: {found.text}"
    assert found.call <= call, f"refused in call {found.call}, after weights had changed"


def assert_right_or_refused(kind, *batches, match, **options):
    found = outcome(kind, batches, **options)
    assert found.kind in ("RIGHT", "REFUSED"), f"{found.kind} in call {found.call}: {found.text}"
    if found.kind == "REFUSED":
        assert re.search(match, words_of(found)), f"expected {match!r} in: {found.text}"


def words_of(found):
    return re.sub(r"^.*?in layer '[^']*' \([^)]*\): ", "", found.text)
