"""State around the points: what follows from the batch alone is made again, what counts or remembers is refused."""

import random

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import PenstockError
from penstock.models.cutting.cut import cut
from tests.models.cutting.test_part import run

ROWS = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp, self.blocks = nn.Linear(4, 4), nn.ModuleList(nn.Linear(4, 4) for _ in range(2))
        self.head = nn.Linear(4, 4)
        self.calls, self.seen, self.prev = 0, [], None
        self.register_buffer("table", torch.zeros(1), persistent=False)

    def forward(self, rows):
        hidden = self.begin(self.inp(rows))
        for block in self.blocks:
            hidden = block(hidden) * self.factor(hidden)
        return self.head(hidden)

    def begin(self, hidden):
        return hidden

    def factor(self, hidden):
        return 1


class Counting(Model):
    def begin(self, hidden):
        self.calls += 1
        return hidden * self.calls


class Listing(Model):
    def begin(self, hidden):
        self.seen.append(len(hidden))
        return hidden


class Remembering(Model):
    def begin(self, hidden):
        previous, self.prev = self.prev, hidden.detach()
        return hidden if previous is None else hidden + previous


class Growing(Model):
    """Keeps the table of the longest batch so far, as dynamic scaling of positions does."""

    def begin(self, hidden):
        if len(hidden) > len(self.table):
            self.table = torch.ones(len(hidden)) * len(hidden)
        return hidden

    def factor(self, hidden):
        return self.table[: len(hidden), None]


class Tabulated(Model):
    """Makes a table anew for each length, as longrope does."""

    def begin(self, hidden):
        self.table = torch.arange(len(hidden), dtype=torch.float32)
        return hidden

    def factor(self, hidden):
        return self.table[:, None]


class Stashing(Model):
    """Leaves a value for somebody who looks at it after the forward."""

    def begin(self, hidden):
        self.prev = hidden
        return hidden

    def factor(self, hidden):
        return self.prev.sigmoid()


class PythonDrawing(Model):
    def factor(self, hidden):
        return random.random()


class InBatch(Model):
    def forward(self, rows):
        rows += 1
        return super().forward(rows)


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        (Counting, "changes 'calls' for later forwards"),
        (Listing, "changes 'seen' for later forwards"),
        (Remembering, "changes 'prev' for later forwards"),
        (PythonDrawing, "draws random numbers between its submodules by Python's or"),
        (InBatch, r"changes an argument of the batch in place.*clone\(\)"),
    ],
)
def test_what_each_stage_would_do_again_is_refused_in_the_first_forward(kind, words):
    with pytest.raises(PenstockError, match=words):
        run(cut(kind(), ["blocks.*"]), rows=ROWS.clone())


@pytest.mark.parametrize("kind", [Tabulated, Stashing])
def test_what_follows_from_the_batch_is_made_again(kind):
    model = kind()
    parts = cut(model, ["blocks.*"])
    for rows in (ROWS, ROWS[:2], ROWS[:4], ROWS):
        assert torch.equal(run(parts, rows=rows), model(rows))


def test_a_table_that_depends_on_earlier_batches_is_refused_where_it_does():
    model = Growing()
    parts = cut(model, ["blocks.*"])
    assert torch.equal(run(parts, rows=ROWS[:4]), Growing.forward(model, ROWS[:4]))
    model.table = torch.zeros(1)
    run(parts, rows=ROWS[:4])
    with pytest.raises(PenstockError, match="changes 'table' for later forwards"):
        run(parts, rows=ROWS[:2])


class Adding(Model):
    """Changes what a block returns in place, and hands on the same object."""

    def forward(self, rows, mask):
        hidden = self.inp(rows)
        for block in self.blocks:
            hidden = block(hidden)
            hidden += mask * 2
        return self.head(hidden)


def test_changes_in_place_are_found_in_inference_mode_too():
    model = Adding()
    parts = cut(model, ["blocks.*"])
    with torch.inference_mode():
        for mask in (torch.ones(6, 1), torch.zeros(6, 1)):
            assert torch.equal(run(parts, rows=ROWS, mask=mask), model(ROWS, mask))


class Shifted(nn.Linear):
    def __init__(self):
        super().__init__(4, 4)

    def forward(self, hidden, shift):
        return super().forward(hidden) + shift


class Shifting(Model):
    """Hands a value of the batch to all blocks."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Shifted() for _ in range(2))

    def forward(self, rows, mask):
        hidden, shift = self.inp(rows), mask * 2
        for block in self.blocks:
            hidden = block(hidden, shift)
        return self.head(hidden)


def test_a_batch_that_is_changed_in_place_between_forwards_is_looked_at_again():
    model, mask = Shifting(), torch.ones(6, 1)
    parts = cut(model, ["blocks.*"])
    for value in (1.0, 2.0):
        mask.fill_(value)
        assert torch.equal(run(parts, rows=ROWS, mask=mask), model(ROWS, mask))


class Losing(Model):
    def __init__(self):
        super().__init__()
        self.aux = ps.AuxiliaryLoss("balance")

    def begin(self, hidden):
        self.aux.add(hidden.mean())
        return hidden


def test_an_auxiliary_loss_around_the_points_is_refused_with_its_place():
    with pytest.raises(PenstockError, match=r"ps.AuxiliaryLoss 'balance' around its points"):
        run(cut(Losing(), ["blocks.*"]), rows=ROWS)


def test_a_forward_runs_after_one_that_an_error_has_ended():
    class Failing(Stashing):
        fails = False

        def factor(self, hidden):
            if self.fails:
                raise ValueError("on the way")
            return super().factor(hidden)

    model = Failing()
    parts = cut(model, ["blocks.*"])
    model.fails = True
    with pytest.raises(PenstockError, match="on the way"):
        run(parts, rows=ROWS)
    model.fails = False
    assert torch.equal(run(parts, rows=ROWS), model(ROWS))


class Accumulating(Model):
    def __init__(self):
        super().__init__()
        self.memory = torch.zeros(4)

    def factor(self, hidden):
        self.memory.add_(hidden.detach().mean(0))
        return self.memory


def test_a_tensor_that_gets_values_of_submodules_in_place_is_refused():
    with pytest.raises(PenstockError, match="changes 'memory' for later forwards"):
        run(cut(Accumulating(), ["blocks.*"]), rows=ROWS)


class Hooked(Model):
    """Puts hooks on its blocks while it runs."""

    def __init__(self, register="register_forward_hook"):
        super().__init__()
        self.register = register

    def forward(self, rows):
        kept = []

        def keep(module, args, *output):
            kept.append(args[0])
            return output[0] * 1.5 if output else None

        handles = [getattr(block, self.register)(keep) for block in self.blocks]
        output = super().forward(rows)
        for handle in handles:
            handle.remove()
        return output + kept[0].sum()


def test_hooks_that_a_forward_puts_on_its_blocks_run_once_in_each_forward():
    model = Hooked()
    parts = cut(model, ["blocks.*"])
    for _ in range(3):
        torch.testing.assert_close(run(parts, rows=ROWS), model(ROWS))
    with pytest.raises(PenstockError, match=r"puts a hook on 'blocks.0' that runs before its forward"):
        run(cut(Hooked("register_forward_pre_hook"), ["blocks.*"]), rows=ROWS)
