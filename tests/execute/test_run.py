"""The loop runs any feasible order with the gradients of one process, and keeps alive what the check counts."""

import gc
import random
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.control.agreement import Mode
from penstock.execute.lost_device import living_instances
from penstock.execute.parameters.gradient_store import WeightInputs
from penstock.execute.stages.passes import SavedForward
from penstock.ir.action import Action, Kind, OverlappedPair
from penstock.ir.live import peak_activations
from penstock.ir.schedule import Schedule
from penstock.pipeline import Pipeline
from penstock.placement import Placement
from penstock.schedules import build
from tests.actions import parse_action
from tests.local_pipelines import (
    WIDTH,
    Task,
    block,
    difference,
    error_of,
    float_layers,
    float_task,
    gradients_of,
    named,
    on_pipelines,
    on_ranks,
    run_task,
    second_step,
    square_loss,
    step_task,
    values,
    zero,
)
from tests.reference import reference_step


def drawn(placement, *orders):
    """Make a schedule from one line of actions per rank."""
    actions = [[parse_action(text) for text in order.split()] for order in orders]
    microbatches = {a.microbatch for order in actions for entry in order for a in members(entry)}
    return Schedule.from_actions("drawn", placement, actions, num_microbatches=len(microbatches))


def members(entry):
    return (entry.first, entry.second) if isinstance(entry, OverlappedPair) else (entry,)


LOOP = drawn(
    Placement.loop(2, 4),
    "0F0 0F1 2F0 2F1 2B0 2B1 0B0 0B1",
    "1F0 1F1 3F0 3B0 3F1 3B1 1B0 1B1",
)
VEE = drawn(
    Placement.vee(2),
    "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1",
    "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1",
)
SPLIT = drawn(
    Placement.line(2),
    "0F0 0F1 0I0 0W0 0I1 0W1",
    "1F0 1I0 1F1 1I1 1W0 1W1",
)
MIXED = drawn(
    Placement.explicit([0, 0, 1, 0]),
    "0F0 1F0 0F1 1F1 3F0 3I0 3F1 3B1 1B0 0B0 3W0 1I1 1W1 0B1",
    "2F0 2F1 2I0 2W0 2B1",
)
PAIRS = drawn(
    Placement.line(2),
    "0F0 0F1 (0F2;0B0)OVERLAP_F_B 0B1 0B2",
    "1F0 (1F1;1B0)OVERLAP_F_B (1F2;1B1)OVERLAP_F_B 1B2",
)
OUT_OF_ORDER = drawn(Placement.line(2), "0F2 0F0 0F1 0B1 0B0 0B2", "1F2 1F0 1F1 1B1 1B0 1B2")


@pytest.mark.feature("X46")
@pytest.mark.parametrize(
    "schedule", [LOOP, VEE, SPLIT, MIXED, PAIRS], ids=["loop", "vee", "split backward", "mixed", "pairs"]
)
def test_a_drawn_schedule_in_order_of_microbatches_is_bitwise_right(schedule):
    task = float_task(4 * schedule.num_microbatches)

    outcomes = on_ranks(schedule.num_ranks, lambda wires: run_task(wires, task, schedule, None))

    assert difference(outcomes, task.reference(schedule.num_microbatches)) == []


def test_a_drawn_schedule_out_of_order_is_right_up_to_rounding():
    task = float_task(12, torch.float64)

    outcomes = on_ranks(2, lambda wires: run_task(wires, task, OUT_OF_ORDER, None))

    assert difference(outcomes, task.reference(3), tolerance=1e-12) == []


def random_schedule(seed):
    """Let actions run one by one in a random order that the dependencies allow."""
    chance = random.Random(seed)
    num_stages, num_microbatches = chance.randint(2, 5), chance.randint(1, 4)
    ranks = [chance.randrange(3) for _ in range(num_stages)]
    ranks = [sorted(set(ranks)).index(rank) for rank in ranks]
    is_split = {(s, m): chance.random() < 0.5 for s in range(num_stages) for m in range(num_microbatches)}
    open_actions = [
        Action(kind, s, m) for kind in map(Kind, range(4)) for s, m in is_split if (kind in (2, 3)) == is_split[s, m]
    ]
    open_actions += [Action(Kind.FORWARD, s, m) for s, m in is_split if is_split[s, m]]
    again = {(s, m) for s, m in is_split if chance.random() < 0.3}
    open_actions += [Action(Kind.RECOMPUTE, s, m) for s, m in sorted(again)]
    orders, done = [[] for _ in range(max(ranks) + 1)], set()
    while open_actions:
        ready = [action for action in open_actions if is_ready(action, done, num_stages, again)]
        action = chance.choice(ready)
        open_actions.remove(action)
        orders[ranks[action.stage]].append(action)
        done.add(("B" if action.kind == Kind.BACKWARD_INPUT else action.kind.letter, action.stage, action.microbatch))
    return Schedule.from_actions(f"random {seed}", Placement.explicit(ranks), orders, num_microbatches=num_microbatches)


def is_ready(action, done, num_stages, again):
    stage, microbatch = action.stage, action.microbatch
    if action.kind == Kind.FORWARD:
        return stage == 0 or ("F", stage - 1, microbatch) in done
    if action.kind == Kind.BACKWARD_WEIGHT:
        return ("B", stage, microbatch) in done
    if action.kind == Kind.RECOMPUTE:
        return ("F", stage, microbatch) in done
    if (stage, microbatch) in again and ("R", stage, microbatch) not in done:
        return False
    is_last = stage == num_stages - 1
    return ("F", stage, microbatch) in done and (is_last or ("B", stage + 1, microbatch) in done)


@pytest.mark.slow
@settings(max_examples=20)
@given(st.integers(0, 10_000))
def test_random_feasible_orders_are_right_up_to_rounding(seed):
    schedule = random_schedule(seed)
    task = float_task(2 * schedule.num_microbatches, torch.float64)

    outcomes = on_pipelines(schedule.num_ranks, task, lambda pipeline: second_step(pipeline, task), schedule, None)

    assert difference(outcomes, task.reference(schedule.num_microbatches), tolerance=1e-12) == []


# ---- memory


def num_saved():
    return len(living_instances(SavedForward))


class Weighing(nn.Module):
    """Notes how many forwards of its rank wait for their backward, itself included, whenever it runs."""

    def __init__(self, inner, step, seen):
        super().__init__()
        self.inner = inner
        self.step = step
        self.seen = seen

    def forward(self, x):
        kept = [each for each in self.step().values.values() if isinstance(each, SavedForward | WeightInputs)]
        self.seen.append(1 + len(kept))
        return self.inner(x)


@pytest.mark.feature("D4")
@pytest.mark.parametrize(
    "schedule",
    [build("1f1b", ranks=3, microbatches=6), build("1f1b", ranks=3, microbatches=6, warmup="eager"), LOOP, VEE, MIXED],
    ids=["1f1b", "eager", "loop", "vee", "mixed"],
)
def test_a_rank_keeps_as_many_activations_alive_as_the_check_counts(schedule):
    task = float_task(2 * schedule.num_microbatches)

    def case(wires):
        seen, steps = [], []
        layers = [Weighing(layer, lambda: steps[0], seen) for layer in task.make_layers()]
        pipeline = Pipeline(
            layers,
            schedule,
            loss=task.loss,
            transport=wires,
            split=[*[1] * (schedule.num_stages - 1), 6 - schedule.num_stages],
        )
        make_step = pipeline._runner._make_step
        pipeline._runner._make_step = lambda *args: steps.append(make_step(*args)) or steps[-1]
        step_task(pipeline, task)
        return max(seen)

    peaks = on_ranks(schedule.num_ranks, case)

    assert peaks == peak_activations(schedule)


@pytest.mark.feature("D8")
def test_a_failed_step_keeps_nothing_alive_though_its_error_is_kept():
    task = float_task(8)
    calls = []

    def loss(output, target):
        calls.append(1)
        return task.loss(output, target) if len(calls) != 3 else None

    pipeline = Pipeline(task.make_layers(), "gpipe", 4, loss)
    error = error_of(step_task, pipeline, task)

    assert error.__traceback__ is not None
    gc.collect()
    assert num_saved() == 0


@pytest.mark.feature("D7")
def test_what_a_program_does_not_free_is_an_error():
    task = float_task(4)
    pipeline = Pipeline(task.make_layers(), "gpipe", 2, task.loss)
    runner, program = pipeline._runner, pipeline.program
    compiled = runner._programs.of(Mode.TRAIN, 2)
    bounds = [bound for bound in compiled.bounds if "0B1" not in str(program.instruction(bound.row))]
    runner._programs._compiled[Mode.TRAIN, 2, 2] = replace(compiled, bounds=bounds)

    error = error_of(step_task, pipeline, task)

    assert isinstance(error, PipelineError)
    assert "1 values stay alive behind the step: saved activation of 0F1;" in str(error)


# ---- what crosses a border


@dataclass(frozen=True)
class State:
    """What the layers below forward."""

    hidden: Any
    tokens: Any
    notes: Any


class Opening(nn.Module):
    """Makes a tree of tensors that do and do not need a gradient, and of plain values."""

    def __init__(self):
        super().__init__()
        self.inner = float_layers(num_layers=1)[0]

    def forward(self, x):
        hidden = self.inner(x)
        positive = hidden > 0
        notes = {"pair": (hidden * 2, None), "mask": positive, 3: "text", "half": 0.5}
        return State([hidden, x], positive.long(), notes)


class Passing(nn.Module):
    """Hands a tree on, with one tensor in it changed."""

    def __init__(self):
        super().__init__()
        self.inner = float_layers(num_layers=2)[1]

    def forward(self, state):
        hidden, x = state.hidden
        return State([self.inner(hidden), x], state.tokens, state.notes)


class Closing(nn.Module):
    """Uses every tensor of the tree."""

    def forward(self, state):
        hidden, x = state.hidden
        notes = state.notes
        assert notes[3] == "text"
        assert notes["pair"][1] is None
        return (hidden * state.tokens + x * notes["half"] + notes["pair"][0]) * notes["mask"]


@pytest.mark.feature("C10")
@pytest.mark.parametrize("placement", [Placement.line(3), Placement.explicit([0, 0, 1])], ids=["wires", "one rank"])
def test_trees_of_all_sorts_cross_the_border_between_stages(placement):
    order = "{0}F0 {0}F1 {0}B0 {0}B1"
    orders = [order.format(stage) for stage in range(3)]
    if placement.num_ranks == 2:
        orders = ["0F0 1F0 0F1 1F1 1B0 0B0 1B1 0B1", orders[2]]
    schedule = drawn(placement, *orders)
    inputs, target = values(1, 4, WIDTH), values(2, 4, WIDTH)

    def case(wires):
        pipeline = Pipeline([Opening(), Passing(), Closing()], schedule, loss=square_loss, transport=wires)
        for _ in range(2):  # the second step has no headers
            zero(pipeline)
            pipeline.step(inputs, target=target)
        return gradients_of(pipeline.named_parameters())

    found = on_ranks(placement.num_ranks, case)

    layers = [Opening(), Passing(), Closing()]
    reference_step(layers, (inputs,), {}, target, loss=square_loss, num_microbatches=2)
    merged = {name: gradient for part in found for name, gradient in part.items()}
    assert merged.keys() == gradients_of(named(layers)).keys()
    assert all(torch.equal(merged[name], gradient) for name, gradient in gradients_of(named(layers)).items())


class Cutting(nn.Module):
    """Its output depends on its input, but no gradient does."""

    def __init__(self):
        super().__init__()
        self.inner = float_layers(num_layers=1)[0]

    def forward(self, x):
        return self.inner(x.detach())


def test_a_stage_that_hands_back_no_gradient_gives_zeros_to_those_before_it():
    task = float_task(4)

    def case(wires):
        pipeline = Pipeline([*float_layers(num_layers=2), Cutting()], "1f1b", 2, task.loss, transport=wires)
        pipeline.step(*task.inputs, target=task.target)
        return [float(gradient.abs().sum()) for gradient in gradients_of(pipeline.named_parameters()).values()]

    first, second, last = on_ranks(3, case)

    assert set(first + second) == {0.0}
    assert min(last) > 0.0


class Counting(nn.Module):
    """Returns a buffer that its next forward changes, or a copy of it."""

    def __init__(self, returns_copy):
        super().__init__()
        self.returns_copy = returns_copy
        self.register_buffer("total", torch.zeros(WIDTH))

    def forward(self, x):
        self.total += x.detach().mean(0)
        return x, self.total.clone() if self.returns_copy else self.total


class Using(nn.Module):
    def forward(self, state):
        return state[0] * 2 + state[1]


@pytest.mark.parametrize("returns_copy", [True, False])
def test_an_output_that_its_stage_changes_before_it_is_used_is_an_error_and_a_copy_is_right(returns_copy):
    """Rank 0 runs two forwards of stage 0 before the first one's output is used."""
    task = Task(lambda: [Counting(returns_copy), Using(), block(1)], (values(1, 4, WIDTH),), values(2, 4, WIDTH))
    schedule = drawn(Placement.explicit([0, 0, 1]), "0F0 0F1 1F0 1F1 1B0 0B0 1B1 0B1", "2F0 2B0 2F1 2B1")

    def case(wires):
        try:
            return run_task(wires, task, schedule, 2)
        except PipelineError as error:
            return str(error)

    first, second = on_ranks(2, case)

    if returns_copy:
        assert difference([first, second], task.reference(2)) == []
    else:
        assert "rank 0, 1F0: PipelineError: 0F0: a tensor of its output was changed in place" in first
        assert "rank 0 is the culprit" in second


class ChangingInBackward(nn.Module):
    """Changes the tensor that it returned last when the backward of any microbatch passes."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        outputs, self.last = self.linear(x), torch.zeros(WIDTH)
        outputs.register_hook(self._change)
        return outputs, self.last

    def _change(self, gradient):
        self.last += 1


def test_an_output_that_is_changed_before_it_is_sent_is_not_sent():
    task = Task(lambda: [ChangingInBackward(), Using()], (values(1, 6, WIDTH),), values(2, 6, WIDTH))

    def case(wires):
        return str(error_of(run_task, wires, task, PAIRS, 3))  # 0F2 and 0B0 come before the send of 0F2

    first, second = on_ranks(2, case)

    assert "rank 0, 0SEND_F2: PipelineError: 0F2: a tensor of its output was changed in place" in first
    assert "rank 0 is the culprit" in second
