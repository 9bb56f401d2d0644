"""Layers that look back over a sequence train in slices as they do on whole sequences, if they carry what they need."""

import re
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given
from torch import nn

from penstock.execute.batch.microbatch import BatchSpec, Concat, Split
from penstock.models import Carry, DecoderConfig, count_target_tokens, cross_entropy_loss, decoder_layers
from penstock.schedules import build
from tests.proofs.tables import schedule_of
from tests.random_models.wrappers import Checkpointed
from tests.support.local_pipelines import (
    NEARLY,
    VOCABULARY,
    WIDTH,
    Around,
    Outcome,
    Task,
    block,
    difference,
    gradients_of,
    mistakes,
    on_pipelines,
    settle,
    square_loss,
    values,
)
from tests.support.reference import reference_evaluate
from tests.support.strategies import feasible_schedules

FLOAT64 = torch.float64
LENGTH = 7
GUIDE = (Path(__file__).parents[3] / "docs" / "training" / "data.md").read_text(encoding="utf-8")
SIZES = {"vocabulary": VOCABULARY, "width": 8, "heads": 4, "key_value_heads": 2, "hidden": 12}


def decoder():
    config = DecoderConfig(**SIZES, layers=4, length=LENGTH, dtype="float64")
    return [settle(spec(), seed) for seed, spec in enumerate(decoder_layers(config))]


def decoder_task():
    tokens, target = torch.randint(VOCABULARY, (2, 4, LENGTH), generator=torch.Generator().manual_seed(5))
    target[::2, 2:4] = -100
    options = {"allow_ragged": True, "count": count_target_tokens}
    return Task(decoder, (tokens,), target, cross_entropy_loss, options)


# ---- the decoder

SHAPES = [
    {"name": "seq1f1b", "ranks": 1, "microbatches": 1, "slices": 2},
    {"name": "seq1f1b", "ranks": 2, "microbatches": 2, "slices": 2},
    {"name": "seq1f1b", "ranks": 2, "microbatches": 4, "slices": 3},
    {"name": "seq1f1b", "ranks": 3, "microbatches": 3, "slices": 4},
    {"name": "seq1f1b", "ranks": 3, "microbatches": 1, "slices": 7},
    {"name": "breadth-depth", "ranks": 1, "microbatches": 2, "slices": 3, "stages_per_rank": 2},
    {"name": "breadth-depth", "ranks": 2, "microbatches": 4, "slices": 2, "stages_per_rank": 2, "depth": 2},
    {"name": "breadth-depth", "ranks": 3, "microbatches": 3, "slices": 4},
]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "-".join(map(str, shape.values())))
def test_the_decoder_in_slices_learns_what_the_whole_one_does(shape):
    assert mistakes(decoder_task(), build(**shape)) == []


def test_the_decoder_evaluates_slices_like_whole_sequences():
    task = decoder_task()

    def evaluated(pipeline):
        result = pipeline.evaluate(*task.inputs, target=task.target, return_outputs=True)
        return result, gradients_of(pipeline.named_parameters())

    found = on_pipelines(2, task, evaluated, build("seq1f1b", ranks=2, microbatches=2, slices=3), None)

    expected = reference_evaluate(
        task.make_layers(), task.inputs, {}, task.target, loss=task.loss, num_microbatches=2, **task.options
    )
    outcomes = [Outcome(result, {}) for result, _ in found]
    assert difference(outcomes, (expected, {}), **NEARLY) == []
    torch.testing.assert_close(found[1][0].outputs, torch.cat(expected.outputs), rtol=1e-12, atol=1e-12)
    assert all(gradient is None for _, gradients in found for gradient in gradients.values())


# ---- layers of a user's own


class RunningSum(Around):
    """Adds to every position all positions before it, in two ways that it carries apart."""

    def __init__(self, seed):
        super().__init__(seed, FLOAT64)
        self.sums, self.steps = Carry(), Carry()

    def forward(self, x):  # [batch, seq, width]
        hidden = self.inner(x)
        before, steps = self.sums.get(), self.steps.get()
        sums = hidden.cumsum(1) if before is None else before["total"] + hidden.cumsum(1)
        start = 0 if steps is None else steps["number"]
        self.sums.put({"total": sums[:, -1:]})
        self.steps.put({"number": start + x.shape[1], "mask": torch.ones(1, dtype=torch.bool)})
        return x + sums / (1 + torch.arange(start, start + x.shape[1])[:, None])


class CellOverTime(nn.Module):
    """A recurrent cell, one position after another."""

    def __init__(self, seed):
        super().__init__()
        self.cell = settle(nn.GRUCell(WIDTH, WIDTH, dtype=FLOAT64), seed)
        self.carry = Carry()

    def forward(self, x):  # [batch, seq, width]
        state, outputs = self.carry.get(), []
        for position in x.unbind(1):
            state = self.cell(position, state)
            outputs.append(state)
        self.carry.put(state)
        return torch.stack(outputs, 1)


class CarriedGRU(nn.Module):
    """A layer of torch that looks back, with its state carried by the module around it."""

    def __init__(self, seed):
        super().__init__()
        self.gru = settle(nn.GRU(WIDTH, WIDTH, num_layers=2, batch_first=True, dtype=FLOAT64), seed)
        self.carry = Carry()

    def forward(self, x):
        output, state = self.gru(x, self.carry.get())
        self.carry.put(state)
        return output


class CarriedAttention(nn.Module):
    """torch's attention, over the features of all slices so far."""

    def __init__(self, seed):
        super().__init__()
        self.attention = settle(nn.MultiheadAttention(WIDTH, 2, batch_first=True, dtype=FLOAT64), seed)
        self.carry = Carry()

    def forward(self, x):  # [batch, seq, width]
        before = self.carry.get()
        seen = x if before is None else torch.cat([before, x], 1)
        self.carry.put(seen)
        future = torch.ones(x.shape[1], seen.shape[1], dtype=torch.bool).triu(1 + seen.shape[1] - x.shape[1])
        return x + self.attention(x, seen, seen, attn_mask=future, need_weights=False)[0]


class OnceInAWhile(nn.Module):
    """Leaves something in its first slice only, which all later ones use; carries a parameter and an input too."""

    def __init__(self, seed):
        super().__init__()
        self.weight = nn.Parameter(values(seed, WIDTH, dtype=FLOAT64))
        self.carry = Carry()

    def forward(self, x):
        before = self.carry.get()
        if before is None:
            before = (x[:, :1] * self.weight, self.weight, x[:, :1])
            self.carry.put(before)
        return x + before[0] * before[1] - before[2]


def checkpointed(seed):
    """A carrying layer whose forward runs again in its backward."""
    return Checkpointed(RunningSum(seed))


def frozen(seed):
    """A carrying layer without trained parameters."""
    return RunningSum(seed).requires_grad_(False)


def from_the_docs(seed):
    """The layer that docs/training/data.md shows."""
    [example] = [block for block in re.findall(r"```python\n(.*?)```", GUIDE, re.DOTALL) if "ps.Carry" in block]
    names = {}
    exec(example, names)
    return settle(names["Recurrent"](WIDTH).to(FLOAT64), seed)


CARRYING = [
    RunningSum, CellOverTime, CarriedGRU, CarriedAttention, OnceInAWhile, checkpointed, frozen, from_the_docs,
]  # fmt: skip


def carrying_layers(kinds):
    # The first layer of each stage is a plain one: an unsplit model never sees a part of a sequence.
    return [layer for seed, kind in enumerate(kinds) for layer in (block(50 + seed, FLOAT64), kind(seed))]


def carrying_task(*kinds, rows=4, length=LENGTH):
    inputs, target = (values(seed, rows, length, WIDTH, dtype=FLOAT64) for seed in (1, 2))
    return Task(partial(carrying_layers, kinds), (inputs,), target, square_loss, {"allow_ragged": True})


@pytest.mark.feature("B9")
@pytest.mark.parametrize("kind", CARRYING, ids=lambda kind: kind.__name__)
def test_a_layer_that_carries_its_state_learns_as_on_whole_sequences(kind):
    schedule = build("breadth-depth", ranks=2, microbatches=2, slices=3, stages_per_rank=2)

    assert mistakes(carrying_task(kind, kind), schedule, split=[1, 1, 1, 1]) == []


@pytest.mark.slow
@given(feasible_schedules())
def test_in_every_feasible_order_carrying_layers_learn_as_on_whole_sequences(schedule):
    num_layers = len(schedule.placement.routes[0])
    kinds = [CARRYING[(index + schedule.num_microbatches) % len(CARRYING)] for index in range(num_layers)]
    task = carrying_task(*kinds, rows=2 * schedule.num_microbatches, length=3)
    if schedule.is_forward_only:
        return

    assert mistakes(task, schedule, split=[2] * num_layers) == []


SPLIT = schedule_of(
    """
    0F0 0F0.1 0F1 0F1.1 0I0.1 0I0 0W0.1 0I1.1 0W0 0I1 0W1.1 0W1
    1F0 1F0.1 1I0.1 1F1 1I0 1W0 1F1.1 1W0.1 1I1.1 1I1 1W1.1 1W1
    """,
    slices=2,
)


@pytest.mark.parametrize("kind", CARRYING, ids=lambda kind: kind.__name__)
def test_carrying_layers_learn_the_same_where_backwards_are_split(kind):
    assert mistakes(carrying_task(kind, kind), SPLIT) == []


class ReadingTime(nn.Module):
    """Carries along a sequence that comes first in its inputs."""

    def __init__(self):
        super().__init__()
        self.inner = CellOverTime(3)

    def forward(self, x):  # [seq, batch, width]
        return self.inner(x.transpose(0, 1)).transpose(0, 1)


def test_layers_carry_along_any_dimension():
    inputs, target = (values(seed, 6, 4, WIDTH, dtype=FLOAT64) for seed in (1, 2))
    options = {"specs": BatchSpec(args=Split(1), target=Split(1))}
    task = Task(lambda: [ReadingTime(), ReadingTime()], (inputs,), target, square_loss, options)
    schedule = build("seq1f1b", ranks=2, microbatches=2, slices=3)

    assert mistakes(task, schedule, slice_dim=0, merge=Concat(1)) == []
