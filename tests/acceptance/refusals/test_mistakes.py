"""Awkward models and mistakes of users: the gradients of one process, or one error on all ranks at once.

Each row of the table of borders is a model of four layers whose middle ones pass on something awkward. It runs twice
per schedule, since only the second step of a layout goes without headers, and must agree with one process bit for bit.
"""

from collections import Counter
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.errors import PipelineError, StepRefused
from penstock.models import LayerSpec
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import (
    WIDTH,
    Around,
    Task,
    assert_errors,
    assert_gradients,
    block,
    difference,
    error_of,
    errors_before_a_right_step,
    gradients_of,
    on_pipelines,
    on_ranks,
    outcome_of,
    second_step,
    settle,
    square_loss,
    step_task,
    values,
)
from tests.support.reference import reference_step

M = 4
FLOAT64 = torch.float64
SCHEDULES = {"1f1b": 4, "gpipe": 2, "zb-h1": 4, "zbv": 2, "interleaved-1f1b": 2}
"""Each with its ranks: with two, four stages make some neighbours share a rank."""


@pytest.fixture(scope="module", autouse=True)
def first_backward():
    """What torch imports at its first backward through a checkpoint may take a busy machine longer than a deadline."""
    inputs = torch.ones(1, requires_grad=True)
    checkpoint(torch.sin, inputs, use_reentrant=False).sum().backward()


class Body(Around):
    """A layer with weights that does `act(block, value)`."""

    def __init__(self, seed, act=None):
        super().__init__(seed, FLOAT64)
        self._act = act

    def forward(self, value):
        return self.inner(value) if self._act is None else self._act(self.inner, value)


class Pair(NamedTuple):
    hidden: Any
    other: Any


@dataclass
class Record:
    hidden: Any
    notes: Any = None


class Picture(nn.Module):
    """Makes a picture [rows, 4, 3, 2] of each row, in the memory format of channels last."""

    def __init__(self):
        super().__init__()
        self.weight = settle(nn.Linear(WIDTH, 24, dtype=FLOAT64), 1)

    def forward(self, features):
        return self.weight(features).reshape(-1, 4, 3, 2).to(memory_format=torch.channels_last)


class Convolution(nn.Module):
    """Keeps the memory format, and says so."""

    def __init__(self, seed):
        super().__init__()
        self.inner = settle(nn.Conv2d(4, 4, 3, padding=1, dtype=FLOAT64), seed)

    def forward(self, picture):
        assert picture.is_contiguous(memory_format=torch.channels_last), picture.stride()
        return self.inner(picture)


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = settle(nn.Linear(24, WIDTH, dtype=FLOAT64), 3)

    def forward(self, picture):
        return self.inner(picture.reshape(-1, 24))


def four(first, second, third=None, fourth=None):
    """Four layers that do these things, in order."""
    return lambda: [Body(seed, act) for seed, act in enumerate((first, second, third, fourth))]


def tree(make, take):
    """The first layer puts its output into a tree, the second passes it on, the third takes it out."""
    return four(
        lambda inner, value: make(inner(value)),
        lambda inner, value: make(inner(take(value))),
        lambda inner, value: inner(take(value)),
    )


BORDERS = {
    "tuple": tree(lambda x: (x, x * 2), lambda t: t[0] + t[1]),
    "list": tree(lambda x: [x, [x.sin()]], lambda t: t[0] + t[1][0]),
    "dict": tree(lambda x: {"x": x, "twice": x * 2}, lambda t: t["x"] * t["twice"]),
    "named tuple": tree(lambda x: Pair(x, x.cos()), lambda t: t.hidden * t.other),
    "dataclass": tree(lambda x: Record(x, {"mask": x > 0}), lambda t: t.hidden * t.notes["mask"]),
    "bool mask": tree(lambda x: (x, x > 0), lambda t: t[0].masked_fill(t[1], 0.5)),
    "integers": tree(lambda x: (x, (x > 0).long()), lambda t: t[0] * t[1]),
    "None": tree(lambda x: (None, x, None), lambda t: t[1]),
    "python numbers": tree(lambda x: (x, 0.5, 3, True, "a"), lambda t: t[0] * t[1] * t[2]),
    "empty dict beside": tree(lambda x: (x, {}), lambda t: t[0]),
    "empty tensor": tree(lambda x: (x, x[:0]), lambda t: t[0] + t[1].sum()),
    "scalar tensor": tree(lambda x: (x, x.mean()), lambda t: t[0] * t[1]),
    "half and double": tree(lambda x: (x, x.float(), x.bfloat16()), lambda t: t[0] + t[1].double() * t[2].double()),
    "complex": tree(lambda x: (x, torch.complex(x, x.cos())), lambda t: t[0] + t[1].abs()),
    "same tensor twice": tree(lambda x: (x, x), lambda t: t[0] * t[1]),
    "view of another": tree(lambda x: (x, x[:, :2]), lambda t: t[0] * t[1].prod(1, True)),
    "expanded view": tree(lambda x: (x, x[:, :1].expand(-1, WIDTH)), lambda t: t[0] * t[1]),
    "transposed": tree(lambda x: (x, x.T), lambda t: t[0] + t[1].T),
    "strided view": tree(lambda x: (x, torch.cat([x, x], 1)[:, ::2]), lambda t: t[0] * t[1]),
    "detached part": tree(lambda x: (x, x.detach()), lambda t: t[0] * t[1]),
    "part without use": tree(lambda x: (x, x * 2), lambda t: t[0]),
    "input forwarded": four(
        lambda inner, x: (inner(x), x), lambda inner, t: (inner(t[0]), t[1]), lambda inner, t: inner(t[0] * t[1])
    ),
    "view of the input": four(
        None, lambda inner, x: (inner(x), x[:, :3]), lambda inner, t: inner(t[0] * t[1].prod(1, True))
    ),
    "weight forwarded": four(
        lambda inner, x: (inner(x), inner[1].weight),
        lambda inner, t: (inner(t[0] @ t[1]), t[1]),
        lambda inner, t: inner(t[0] @ t[1]),
    ),
    "two outputs of different gradients": four(
        lambda inner, x: (inner(x), inner(x * 2)),
        lambda inner, t: (inner(t[0]) * 3, inner(t[1]) ** 2),
        lambda inner, t: inner(t[0]) + 7 * t[1],
    ),
    "output used twice": four(
        lambda inner, x: (lambda y: (y, y * 2, inner(y)))(inner(x)), lambda inner, t: inner(t[0]) * t[1] + t[2]
    ),
    "output changed in place": four(None, lambda inner, x: inner(x).add(1.0).mul_(2.0)),
    "output that does not depend on the input": four(None, lambda inner, x: inner(torch.ones_like(x))),
    "output that needs no gradient": four(None, lambda inner, x: inner(x).detach()),
    "frozen beginning": lambda: [Body(0).requires_grad_(False), Body(1), Body(2), Body(3)],
    "frozen middle": lambda: [Body(0), Body(1).requires_grad_(False), Body(2).requires_grad_(False), Body(3)],
    "channels last": lambda: [Picture(), Convolution(1), Convolution(2), Flat()],
}
ROUNDED = {
    "weight forwarded": "a weight used in several ways gets its gradient in several parts",
    "channels last": "gradients lie in memory like the tensors they belong to, so they are summed in another order",
}


def task_of(make_layers, rows=2 * M):
    inputs, target = (values(seed, rows, WIDTH, dtype=FLOAT64) for seed in (1, 2))
    return Task(make_layers, (inputs,), target)


def twice(num_ranks, task, schedule="1f1b"):
    """Two steps from zero gradients, the second of which knows its shapes."""
    return on_pipelines(num_ranks, task, lambda pipeline: second_step(pipeline, task), schedule, M)


def with_zeros(reference, outcomes):
    """Where no gradient leads, a pipeline's backward brings zeros to other ranks, and plain training nothing."""
    result, gradients = reference
    found = {name: gradient for outcome in outcomes for name, gradient in outcome.gradients.items()}
    return result, {
        name: torch.zeros_like(found[name]) if gradient is None and found[name] is not None else gradient
        for name, gradient in gradients.items()
    }


@pytest.mark.parametrize(
    "schedule",
    [pytest.param(name, marks={"1f1b": (), "zbv": pytest.mark.slow}.get(name, pytest.mark.full)) for name in SCHEDULES],
)
@pytest.mark.parametrize("border", BORDERS)
def test_what_crosses_a_border_comes_through_with_its_gradients(border, schedule):
    task = task_of(BORDERS[border])

    outcomes = twice(SCHEDULES[schedule], task, schedule)

    tolerance = 1e-12 if border in ROUNDED else None
    assert difference(outcomes, with_zeros(task.reference(M), outcomes), tolerance=tolerance) == []


# ---- outputs that are no tensors, or end the gradient


class Constant(nn.Module):
    """Gives something without gradient, whatever it gets."""

    def __init__(self, make):
        super().__init__()
        self._make = make

    def forward(self, value):
        return self._make(value)


class FromConstant(nn.Module):
    """Makes rows of what carries no gradient, and has weights of its own."""

    def __init__(self, read):
        super().__init__()
        self.weight = settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT64), 7)
        self._read = read

    def forward(self, value):
        return self.weight(torch.ones(2, WIDTH, dtype=FLOAT64) * self._read(value))


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda x: float(x.detach().sum()), lambda value: value),
        (lambda x: {}, len),
        (lambda x: None, lambda value: 0.5),
        (lambda x: (), len),
        (lambda x: (x > 0).long(), lambda value: value.sum(1, True)),
        (lambda x: x.detach() > 0, lambda value: value),
    ],
    ids=["python float", "empty dict", "None", "empty tuple", "integers", "bool mask"],
)
def test_a_border_without_gradient_trains_what_is_behind_it(make, read, schedule):
    task = task_of(lambda: [Body(0), Constant(make), FromConstant(read), Body(3)])

    outcomes = twice(4, task, schedule)

    assert difference(outcomes, with_zeros(task.reference(M), outcomes)) == []


@pytest.mark.parametrize(
    ("num_ranks", "last"),
    [(1, lambda inner, x: inner(x).detach()), (4, torch.no_grad()(lambda inner, x: inner(x)))],
    ids=["detach", "no_grad"],
)
def test_a_last_stage_whose_output_needs_no_gradient_is_an_error_and_not_a_step_that_trains_nothing(last, num_ranks):
    task = task_of(four(None, None, None, last))

    errors = on_pipelines(num_ranks, task, lambda own: error_of(step_task, own, task))

    assert_errors(errors, PipelineError, "its outputs need no gradient, so that nothing would be trained")


FROZEN_ON = pytest.mark.parametrize(
    ("schedule", "num_ranks"), [("gpipe", 1), ("1f1b", 2), ("interleaved-1f1b", 2), ("zb-h1", 2), ("zbv", 1)]
)


@FROZEN_ON
def test_a_model_that_is_frozen_as_a_whole_is_refused_until_something_is_unfrozen(schedule, num_ranks):
    task = task_of(lambda: [Body(seed).requires_grad_(False) for seed in range(4)])

    def case(pipeline):
        error = error_of(step_task, pipeline, task)
        assert torch.isfinite(pipeline.evaluate(*task.inputs, target=task.target).loss)
        for name, parameter in pipeline.named_parameters():
            parameter.requires_grad_(name.startswith("0."))  # on one rank: the other stays frozen, as with adapters
        return error, step_task(pipeline, task).gradients

    errors, gradients = zip(*on_pipelines(num_ranks, task, case, schedule), strict=True)

    assert_errors(errors, PipelineError, "all parameters of the model are frozen, on all ranks")
    assert len({error.rank for error in errors}) == 1
    trained = {name: gradient for own in gradients for name, gradient in own.items()}
    assert all((gradient is not None) is name.startswith("0.") for name, gradient in trained.items())


@FROZEN_ON
def test_a_frozen_model_may_train_a_parameter_of_the_loss(schedule, num_ranks):
    task = task_of(lambda: [Body(seed).requires_grad_(False) for seed in range(4)])

    def case(wires):
        scale = torch.ones((), requires_grad=True)
        pipeline = Pipeline(
            task.make_layers(), schedule, M, lambda output, target: task.loss(output * scale, target), transport=wires
        )
        step_task(pipeline, task)
        return scale.grad

    assert sum(gradient is not None for gradient in on_ranks(num_ranks, case)) == 1


# ---- what may go wrong in a layer or a loss


def fails_then_runs(num_ranks, make_layers, schedule="1f1b"):
    """Run a step of broken layers, which must fail on all ranks, then one of sound ones; return each rank's error."""

    def step_broken(pipeline):
        layers = [layer for stage in pipeline.stages for layer in stage.layers.values()]
        for layer in layers:
            layer.is_broken = True
        try:
            step_task(pipeline, task)
        finally:
            for layer in layers:
                layer.is_broken = False

    task = task_of(make_layers)
    return errors_before_a_right_step(num_ranks, task, step_broken, schedule, M)


class Faulty(Body):
    """A layer that does `fault(self, value)` while it is broken."""

    def __init__(self, seed, fault):
        super().__init__(seed)
        self.fault = fault
        self.is_broken = False

    def forward(self, value):
        return self.fault(self, value) if self.is_broken else self.inner(value)


def out_of_memory(layer, value):
    raise torch.OutOfMemoryError("tried to allocate everything")


def in_place(layer, value):
    return layer.inner(value.mul_(2.0))


def other_recompute(layer, value):
    """A checkpoint whose second run saves fewer tensors than its first."""
    runs = []

    def run(value):
        runs.append(value)
        return layer.inner(value) if len(runs) == 1 else value.sin()

    return checkpoint(run, value, use_reentrant=False)


def no_output_shape(layer, value):
    return layer.inner(value).reshape(-1)[:-1]


def unsendable(layer, value):
    return layer.inner(value), object()


FAULTS = {
    "out of memory": (out_of_memory, "OutOfMemoryError: tried to allocate everything"),
    "input changed in place": (in_place, "may not change it in place"),
    "another recompute": (other_recompute, "different number of tensors"),
    "no such shape": (no_output_shape, "RuntimeError"),
    "not sendable": (unsendable, "cannot travel between ranks"),
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("fault", FAULTS)
def test_a_layer_that_fails_ends_the_step_on_all_ranks_and_the_next_one_is_right(fault, schedule):
    act, text = FAULTS[fault]

    errors = fails_then_runs(
        3, lambda: [Faulty(seed, act if seed == 1 else Body.forward) for seed in range(3)], schedule
    )

    assert_errors(errors, PipelineError, text)
    advice = "A checkpointed layer did something else when it ran again for its backward. Let it"
    assert (advice in str(errors[1])) is (fault == "another recompute")


def test_a_loss_that_is_not_a_number_is_reported_on_every_rank_and_reaches_the_gradients_as_on_one_process():
    task = task_of(four(None, None))
    task.loss = lambda output, target: square_loss(output, target) * float("nan")

    outcomes = twice(2, task, "1f1b")

    assert all(outcome.result.loss.isnan() for outcome in outcomes)
    assert all(gradient.isnan().all() for outcome in outcomes for gradient in outcome.gradients.values())


# ---- hooks


class Hooked(Body):
    """Registers a hook on its input in every forward, and counts all that fire."""

    def __init__(self, seed):
        super().__init__(seed)
        self.fired = Counter()
        self.register_forward_pre_hook(lambda *_: self.note("before the forward"))
        self.register_forward_hook(lambda *_: self.note("after the forward"))
        self.inner.register_full_backward_hook(lambda *_: self.note("after the backward"))
        for parameter in self.inner.parameters():
            parameter.register_post_accumulate_grad_hook(lambda _: self.note("accumulated"))

    def note(self, what):
        self.fired[what] += 1

    def forward(self, value):
        if value.requires_grad:
            value.register_hook(lambda _: self.note("input"))
        return super().forward(value)


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1", "zbv"])
def test_hooks_fire_once_for_each_microbatch_and_no_more_often_in_a_later_step(schedule):
    task = task_of(lambda: [Hooked(seed) for seed in range(4)])

    def case(pipeline):
        counts = []
        for _ in range(3):
            step_task(pipeline, task)
            layers = [layer for stage in pipeline.stages for layer in stage.layers.values()]
            counts.append([dict(layer.fired) for layer in layers])
            for layer in layers:
                layer.fired.clear()
        return pipeline.rank, counts

    num_parameters = len(list(block(0).parameters()))
    always = {
        "before the forward": M,
        "after the forward": M,
        "after the backward": M,
        "accumulated": M * num_parameters,
    }
    for rank, counts in on_pipelines(2, task, case, schedule, M):
        assert counts[0] == counts[1] == counts[2]
        for place, fired in enumerate(counts[0]):
            is_first_layer = rank == 0 and place == 0
            assert fired == always | ({} if is_first_layer else {"input": M})


# ---- batches


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_first_layer_may_change_the_callers_batch_in_place_as_on_one_process(schedule):
    task = task_of(four(lambda inner, x: inner(x.mul_(2.0)), None))
    (inputs,) = task.inputs
    task.inputs = (inputs.clone(),)
    expected = task.reference(M)

    def case(pipeline):
        own = inputs.clone()
        return outcome_of(pipeline, pipeline.step(own, target=task.target)), own

    answers = on_pipelines(2, task, case, schedule, M)

    assert difference([outcome for outcome, _ in answers], expected) == []
    assert torch.equal(answers[0][1], inputs * 2)


@pytest.mark.feature("D1")
def test_gradients_that_the_caller_asks_of_its_own_batch_add_up_as_on_one_process():
    task = task_of(four(None, None))
    (inputs,) = task.inputs
    expected = inputs.clone().requires_grad_()
    reference_step(task.make_layers(), (expected,), {}, task.target, loss=task.loss, num_microbatches=M)

    def case(pipeline):
        own = inputs.clone().requires_grad_()
        pipeline.step(own, target=task.target)
        assert torch.equal(own, inputs)
        return own.grad

    first, last = on_pipelines(2, task, case)

    assert torch.equal(first, expected.grad)
    assert last is None


class Scaling(Body):
    """Hands a number on that all layers behind the first get from it."""

    def forward(self, value, scale=None):
        x, factor, _ = value if isinstance(value, tuple) else (value, scale, None)
        return super().forward(x) * factor, factor, float("nan")


@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_a_number_that_layers_hand_on_may_be_another_in_each_step(schedule):
    def make_layers():
        return [*(Scaling(seed) for seed in range(3)), Body(3, lambda inner, t: inner(t[0]) * t[1])]

    task, layers = task_of(make_layers), make_layers()

    def case(pipeline):
        found = []
        for scale in (0.5, 0.25):
            pipeline.step(*task.inputs, target=task.target, scale=scale)
            found.append(gradients_of(pipeline.named_parameters()))
        return found

    for scale, found in zip((0.5, 0.25), zip(*on_pipelines(2, task, case, schedule), strict=True), strict=True):
        keywords = {"scale": scale}
        reference_step(layers, task.inputs, keywords, task.target, loss=task.loss, num_microbatches=M)
        assert_gradients(found, layers)


BATCH = values(1, 2 * M, WIDTH)
TARGET = values(2, 2 * M, WIDTH)


def blocks():
    return [block(0), block(1)]


# ---- in the loss function and in layers


def on_blocks(case, layers=blocks, loss=square_loss, *, num_ranks=2):
    """Return what `case(pipeline)` returned on every rank."""
    return on_ranks(num_ranks, lambda wires: case(Pipeline(layers(), "1f1b", M, loss, transport=wires)))


def errors_of_step(layers, loss):
    return on_blocks(lambda own: error_of(own.step, BATCH, target=TARGET), layers, loss)


@pytest.mark.parametrize(("num_ranks", "call"), [(1, "step"), (2, "evaluate")])
def test_a_target_that_is_given_by_position_leads_to_the_keyword(num_ranks, call):
    own = str(on_blocks(lambda own: error_of(getattr(own, call), BATCH, TARGET), num_ranks=num_ranks)[0])

    assert "Sequential.forward() takes 2 positional arguments but 3 were given. The first layer gets all" in own
    assert "as target=, as in step(x, target=y)" in own


@pytest.mark.parametrize("name", ["y", "label", "labels", "targets"])
def test_a_target_under_a_name_of_other_libraries_leads_to_the_keyword(name):
    errors = on_blocks(lambda own: error_of(own.step, BATCH, **{name: TARGET}))

    words = f"no layer's forward names '{name}'. Pass what the loss compares the output with as target="
    assert_errors(errors, StepRefused, words)


class Graded(nn.Linear):
    """Takes what elsewhere would be the target."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        settle(self, 0)

    def forward(self, x, labels):
        return super().forward(x) - labels


def test_layers_that_take_two_arguments_or_labels_get_them():
    def case(pipeline):
        return pipeline.step(BATCH, TARGET).loss, pipeline.step(BATCH, labels=TARGET).loss

    layers, loss = lambda: [Graded(), block(1)], lambda output, _: output.square().mean()
    for by_position, by_name in on_blocks(case, layers, loss):
        assert torch.equal(by_position, by_name)


def test_a_mistake_within_a_first_layer_of_two_arguments_is_no_matter_of_the_target():
    class Mistaken(nn.Linear):
        def forward(self, x, scale):
            return torch.relu(x, scale=scale)

    error = error_of(Pipeline([Mistaken(2, 2)], "gpipe", M, square_loss).step, BATCH, TARGET)

    assert "target=" not in str(error)


def test_a_loss_that_needs_no_target_gets_none():
    first, last = on_blocks(lambda own: own.step(BATCH), loss=lambda output, target: output.mean())

    assert torch.equal(first.loss, last.loss)


def test_whatever_a_loss_function_raises_is_said_to_be_raised_there():
    def loss(output, target):
        raise KeyError("planted")

    other, own = errors_of_step(blocks, loss)

    assert str(own).startswith("rank 1, 1F0, in the loss function: KeyError: 'planted'\n")
    assert isinstance(own.__cause__, KeyError)
    assert "in the loss function, it raised KeyError: 'planted'" in str(other)


def test_an_error_in_a_layer_with_a_name_names_it():
    def layers():
        return [LayerSpec("body", lambda: block(0)), LayerSpec("head", lambda: nn.Linear(WIDTH + 1, WIDTH))]

    assert "rank 1, 1F0, in layer 'head' (Linear): RuntimeError" in str(errors_of_step(layers, square_loss)[1])


def test_a_recorded_step_and_a_profile_are_the_same_thing():
    def case(pipeline):
        if pipeline.rank:
            pipeline.profile(BATCH, target=TARGET)
        else:
            pipeline.step(BATCH, target=TARGET, record=True)
        return pipeline.timeline is not None

    assert on_blocks(case) == [True, True]
