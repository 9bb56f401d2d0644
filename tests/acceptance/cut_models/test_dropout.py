"""Dropouts in and between the blocks of a cut model draw the same on any number of ranks, in any schedule."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.support.cut_cases import Block, Chain, course_of
from tests.support.cut_models import run_rank
from tests.support.local_pipelines import on_ranks

LARGEST = 1e-12


class Dropped(Chain):
    """Dropout in blocks and between them, by a module and by a function, and one mask for all blocks."""

    class block(Block):  # noqa: N801 - the attribute of Chain
        def forward(self, hidden, factor=1.0):
            return F.dropout(super().forward(hidden, factor), 0.1, self.training)

    def build(self):
        self.drop = nn.Dropout(0.2)

    def forward(self, rows):
        hidden = self.drop(self.begin(rows))
        keep = (torch.rand(len(rows), 1, 1) < 0.5).double()
        for number, block in enumerate(self.blocks):
            hidden = block(hidden, keep)
            hidden = self.drop(hidden) if number % 2 else F.dropout(hidden, 0.3, self.training)
        return self.head(hidden * (1 + keep))


class Chained(Dropped):
    """Two chains: the mask of the first, and what drops of it, go to all blocks of the second."""

    def build(self):
        super().build()
        self.first = nn.ModuleList(Block() for _ in range(2))

    def forward(self, rows):
        hidden = rows
        for block in self.first:
            hidden = F.dropout(block(hidden), 0.2, self.training)
        memory = hidden.tanh()
        hidden = self.begin(rows)
        for block in self.blocks:
            hidden = self.drop(block(hidden, F.dropout(memory, 0.1, self.training)))
        return self.head(hidden)


def traced(kind, num_ranks=1, schedule="1f1b", **options):
    """Return the losses and gradients of three steps by name, over all ranks that are threads."""
    return merged(on_ranks(num_ranks, run_rank, course(kind, num_ranks, schedule, **options)))


def course(kind, num_ranks, schedule, **options):
    points = ("first.*", "begin", "blocks.*", "head") if kind is Chained else ("blocks.*",)
    return course_of(kind, (), num_ranks, schedule=schedule, points=points, options={"seed": 3, **options})


def merged(ranks):
    found = {}
    for traces, error in ranks:
        assert error is None, error
        for number, trace in enumerate(traces):
            losses = {f"loss {index}": loss for index, loss in enumerate(trace.losses)}
            for name, value in {**losses, **trace.gradients}.items():
                assert torch.equal(found.setdefault((number, name), value), value), f"{name} differs between ranks"
    return found


def assert_same(found, kind):
    wanted = traced(kind)
    assert found.keys() == wanted.keys()
    for key, value in wanted.items():
        assert torch.allclose(found[key], value, rtol=LARGEST, atol=LARGEST), key
    assert any(not torch.equal(wanted[0, name], wanted[1, name]) for name in ("loss 0", "loss 1")), "nothing is drawn"


WAYS = (
    (2, "1f1b", {}),
    (2, "interleaved-1f1b", {"recompute": True}),
    *(
        pytest.param(*way, marks=pytest.mark.slow)
        for way in (
            (4, "1f1b", {}),
            *((ranks, "interleaved-1f1b", {}) for ranks in (1, 2)),
            *((ranks, "1f1b", {"recompute": True}) for ranks in (1, 2)),
            (2, "zbv", {}),
        )
    ),
)


@pytest.mark.parametrize(("num_ranks", "schedule", "options"), WAYS)
@pytest.mark.parametrize("kind", [Dropped, Chained])
def test_losses_and_gradients_are_those_of_one_rank(kind, num_ranks, schedule, options):
    assert_same(traced(kind, num_ranks, schedule, **options), kind)


def on_process(rank, kind):
    """Return what a rank that is a process computed, and the text of its error."""
    traces, error = run_rank(None, course(kind, 2, "interleaved-1f1b"))
    return traces, error and str(error)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [Dropped, Chained])
def test_processes_draw_what_threads_do(two_ranks, kind):
    assert_same(merged(two_ranks.run(on_process, kind, timeout_s=60.0)), kind)
