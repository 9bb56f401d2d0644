"""Mistakes of users that one rank alone notices, or a layer, or the loss: all ranks are told at once, in these words.

Ranks are threads here, and processes in the last tests.
"""

import time

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import penstock as ps
from penstock.errors import ConfigError, PartitionError, StepRefused
from penstock.models import LayerSpec
from penstock.pipeline import Pipeline
from tests.local_pipelines import WIDTH, Task, assert_errors, block, error_of, on_ranks, settle, square_loss, values

M = 2
BATCH = values(1, 2 * M, WIDTH)
TARGET = values(2, 2 * M, WIDTH)
DEADLINE_S = 30.0
AT_ONCE_S = 15.0


# ---- while the pipeline is made


def fail_to_build():
    raise RuntimeError("planted")


def two_shapes():
    first = LayerSpec("first", lambda: nn.Linear(WIDTH, WIDTH, bias=False))
    others = [
        LayerSpec(name, lambda width=width: nn.Linear(width, WIDTH, bias=False), tied=(("weight", "first.weight"),))
        for name, width in (("second", WIDTH), ("third", 2 * WIDTH))
    ]
    return [first, *others]


SETTINGS = {
    "layer that cannot be built": (
        lambda rank: {"layers": [block(0), fail_to_build]},
        (PartitionError, "layer '1' cannot be built: RuntimeError: planted"),
    ),
    "function as layer on one rank": (
        lambda rank: {"layers": [block(0), torch.tanh if rank else block(1)]},
        (ConfigError, "layers: layer 1 is the function tanh, which cannot be called without arguments. "),
    ),
    "layer without sizes on one rank": (
        lambda rank: {"layers": [block(0), nn.LazyLinear(WIDTH) if rank else block(1)], "main_gradients": True},
        (ConfigError, "main_gradients: '1.weight' has no shape before its first input"),
    ),
    "tied shapes": (
        lambda rank: {"layers": two_shapes(), "split": [1, 2]},
        (PartitionError, "'second.weight' (6, 6) and 'third.weight' (6, 12) are tied but differ in shape"),
    ),
    "loss on one rank": (
        lambda rank: {"layers": [block(0), block(1)], "loss": "mse" if rank else square_loss},
        (ConfigError, "loss: 'mse' of type str; give a function"),
    ),
}


def make_wrongly(rank, name, **wires):
    """Try to make the pipeline; the error and how long it took."""
    given = {"schedule": "1f1b", "microbatches": M, "loss": square_loss, "deadline_s": DEADLINE_S}
    given |= SETTINGS[name][0](rank)
    begin_s = time.monotonic()
    error = error_of(Pipeline, given.pop("layers"), **given, **wires)
    return type(error).__name__, str(error), time.monotonic() - begin_s


@pytest.mark.feature("0.2")
@pytest.mark.parametrize("name", SETTINGS)
def test_what_is_wrong_on_one_rank_only_is_told_on_all_of_them_at_once(name):
    def case(wires):
        return make_wrongly(wires.rank, name, transport=wires), step_rightly(wires.rank, transport=wires)

    told, losses = zip(*on_ranks(2, case, deadline_s=DEADLINE_S), strict=True)

    assert_told(told, SETTINGS[name][1])
    assert losses == (RIGHT_LOSS, RIGHT_LOSS)


@pytest.mark.slow
def test_processes_are_told_what_is_wrong_on_one_of_them_and_can_go_on(two_ranks):
    name = "layer that cannot be built"

    told = two_ranks.run(make_wrongly, name)
    losses = two_ranks.run(step_rightly)

    assert_told(told, SETTINGS[name][1])
    assert losses == [RIGHT_LOSS, RIGHT_LOSS]


def assert_told(told, expected):
    kind, message = expected
    (other, others_words, others_s), (own, own_words, own_s) = told
    assert (other, own) == ("ConfigError", kind.__name__)
    assert own_words.startswith(message)
    assert others_words == f"rank 1: {own_words}"
    assert max(others_s, own_s) < AT_ONCE_S


def blocks():
    return [block(0), block(1)]


RIGHT_LOSS = float(Task(blocks, (BATCH,), TARGET).reference(M)[0].loss)


def step_rightly(rank, **wires):
    with Pipeline(blocks(), "1f1b", M, square_loss, **wires) as pipeline:
        return float(pipeline.step(BATCH, target=TARGET).loss)


# ---- options that look like something else


@pytest.mark.parametrize("name", ["interleaved-1f1b", "interleaved-zb", "group-interleaved"])
def test_the_size_of_groups_reaches_the_schedule(name):
    layers = [block(seed) for seed in range(4)]

    def order(wires):
        return Pipeline(
            layers, name, 8, square_loss, stages_per_rank=2, group_size=4, transport=wires
        ).schedule.to_csv()

    wanted = ps.build(name, ranks=2, microbatches=8, stages_per_rank=2, group_size=4).to_csv()
    default = ps.build(name, ranks=2, microbatches=8, stages_per_rank=2).to_csv()
    assert on_ranks(2, order) == [wanted, wanted]
    assert wanted != default


# ---- in the loss function and in layers


def on_pipelines(case, layers=blocks, loss=square_loss, *, num_ranks=2, schedule="1f1b", **options):
    """Return what `case(pipeline)` returned on every rank."""
    return on_ranks(num_ranks, lambda wires: case(Pipeline(layers(), schedule, M, loss, transport=wires, **options)))


def errors_of_step(layers, loss, *, target=TARGET, **options):
    return on_pipelines(lambda own: error_of(own.step, BATCH, target=target), layers, loss, **options)


def test_a_loss_that_needs_a_target_says_that_none_was_given():
    other, own = errors_of_step(blocks, nn.MSELoss(), target=None)

    place = "in the loss function (no target was given; pass step(..., target=...))"
    assert str(own).startswith(f"rank 1, 1F0, {place}: AttributeError: 'NoneType' object has no attribute 'size'\n")
    assert str(other).startswith(f"rank 1 is the culprit: in 1F0, {place}, it raised AttributeError: 'NoneType'")


@pytest.mark.parametrize("call", ["step", "evaluate"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_target_that_is_given_by_position_leads_to_the_keyword(num_ranks, call):
    own = str(on_pipelines(lambda own: error_of(getattr(own, call), BATCH, TARGET), num_ranks=num_ranks)[0])

    assert "Sequential.forward() takes 2 positional arguments but 3 were given. The first layer gets all" in own
    assert "as target=, as in step(x, target=y)" in own


@pytest.mark.parametrize("name", ["y", "label", "labels", "targets"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_target_under_a_name_of_other_libraries_leads_to_the_keyword(num_ranks, name):
    errors = on_pipelines(lambda own: error_of(own.step, BATCH, **{name: TARGET}), num_ranks=num_ranks)

    words = f"no layer's forward names '{name}'. Pass what the loss compares the output with as target="
    assert_errors(errors, StepRefused, words)


class Graded(nn.Linear):
    """Takes what elsewhere would be the target."""

    def __init__(self):
        super().__init__(WIDTH, WIDTH)
        settle(self, 0)

    def forward(self, x, labels):
        return super().forward(x) - labels


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_layers_that_take_two_arguments_or_labels_get_them(num_ranks):
    def case(pipeline):
        return pipeline.step(BATCH, TARGET).loss, pipeline.step(BATCH, labels=TARGET).loss

    layers, loss = lambda: [Graded(), block(1)], lambda output, _: output.square().mean()
    for by_position, by_name in on_pipelines(case, layers, loss, num_ranks=num_ranks):
        assert torch.equal(by_position, by_name)


def test_a_mistake_within_a_first_layer_of_two_arguments_is_no_matter_of_the_target():
    class Mistaken(nn.Linear):
        def forward(self, x, scale):
            return torch.relu(x, scale=scale)

    error = error_of(Pipeline([Mistaken(2, 2)], "gpipe", M, square_loss).step, BATCH, TARGET)

    assert "target=" not in str(error)


def test_a_loss_that_needs_no_target_gets_none():
    first, last = on_pipelines(lambda own: own.step(BATCH), loss=lambda output, target: output.mean())

    assert torch.equal(first.loss, last.loss)


def test_whatever_a_loss_function_raises_is_said_to_be_raised_there():
    def loss(output, target):
        raise KeyError("planted")

    other, own = errors_of_step(blocks, loss)

    assert str(own).startswith("rank 1, 1F0, in the loss function: KeyError: 'planted'\n")
    assert isinstance(own.__cause__, KeyError)
    assert "in the loss function, it raised KeyError: 'planted'" in str(other)


def test_what_count_raises_is_said_to_be_raised_there():
    _, own = errors_of_step(blocks, square_loss, target=None, count=len)

    assert "rank 1, in count (no target was given; pass step(..., target=...)): TypeError" in str(own)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("seed", [None, 3])
def test_an_error_in_a_layer_names_it_by_its_place_and_class(schedule, seed):
    def layers():
        return [block(0), block(1), nn.Linear(WIDTH + 1, WIDTH)]

    other, own = errors_of_step(layers, square_loss, schedule=schedule, seed=seed, split=[1, 2])

    first_line = "RuntimeError: mat1 and mat2 shapes cannot be multiplied (2x6 and 7x6)"
    assert str(own).startswith(f"rank 1, 1F0, in layer 2 (Linear): {first_line}\n\nrank  step  state")
    assert str(other).splitlines() == [
        f"rank 1 is the culprit: in 1F0, in layer 2 (Linear), it raised {first_line}",
        f"rank 0, in {other.instruction}: waited {other.waited_s:.2f} s for rank 1",
    ]


def test_an_error_in_a_layer_with_a_name_names_it():
    def layers():
        return [LayerSpec("body", lambda: block(0)), LayerSpec("head", lambda: nn.Linear(WIDTH + 1, WIDTH))]

    assert "rank 1, 1F0, in layer 'head' (Linear): RuntimeError" in str(errors_of_step(layers, square_loss)[1])


class OtherShapes(nn.Module):
    """A checkpointed layer that takes another number of columns whenever it runs."""

    def __init__(self):
        super().__init__()
        self.inner = settle(nn.Linear(WIDTH, WIDTH), 1)
        self.numbers = iter(range(1, 100))

    def forward(self, features):
        return checkpoint(self._run, features, use_reentrant=False)

    def _run(self, features):
        columns = next(self.numbers)
        return self.inner(features) * features[:, :columns].sin().sum()


@pytest.mark.slow
@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_a_recompute_of_other_shapes_is_explained(schedule):
    _, own = errors_of_step(lambda: [block(0), OtherShapes()], square_loss, schedule=schedule)

    assert "CheckpointError" in str(own)
    assert "A checkpointed layer did something else when it ran again for its backward. Let it" in str(own)
    assert "preserve_rng_state=True" in str(own)


# ---- what is gathered after a step


CALLS = {
    "step": lambda pipeline: pipeline.step(BATCH, target=TARGET),
    "recorded": lambda pipeline: pipeline.step(BATCH, target=TARGET, record=True),
    "profile": lambda pipeline: pipeline.profile(BATCH, target=TARGET),
    "memory": lambda pipeline: pipeline.memory_report(BATCH, target=TARGET),
    "evaluate": lambda pipeline: pipeline.evaluate(BATCH),
    "recorded evaluation": lambda pipeline: pipeline.evaluate(BATCH, record=True),
}
PLAIN, RECORDED = "nothing besides", "a recording (record=True, profile)"


def call_differently(rank, first, second, **wires):
    """Call one thing on rank 0 and another on the others, then the same on all."""
    pipeline = Pipeline(blocks(), "1f1b", M, square_loss, deadline_s=DEADLINE_S, **wires)
    begin_s = time.monotonic()
    error = error_of(CALLS[second if rank else first], pipeline)
    took_s = time.monotonic() - begin_s
    loss = float(pipeline.step(BATCH, target=TARGET, record=True).loss)
    pipeline.close()
    return type(error).__name__, str(error), took_s, loss


DIFFERENT = [
    ("recorded", "step", f"the ranks disagree on extra: rank 0 has {RECORDED}, rank 1 has {PLAIN}. Ask for"),
    ("evaluate", "recorded evaluation", f"the ranks disagree on extra: rank 0 has {PLAIN}, rank 1 has {RECORDED}. Ask"),
    ("step", "profile", f"the ranks disagree on extra: rank 0 has {PLAIN}, rank 1 has {RECORDED}. Ask for"),
    ("step", "memory", "rank 0 is in step (test_mistakes.py:"),
    ("memory", "recorded", "rank 0 is in memory_report (test_mistakes.py:"),
]


def assert_refused(outcomes, expected):
    for kind, words, took_s, loss in outcomes:
        assert kind == "StepRefused"
        assert words.startswith(expected)
        assert took_s < AT_ONCE_S
        assert loss == outcomes[0][3]


@pytest.mark.parametrize(("first", "second", "expected"), DIFFERENT)
def test_a_measurement_that_only_some_ranks_ask_for_is_refused_on_all(first, second, expected):
    def case(wires):
        return call_differently(wires.rank, first, second, transport=wires)

    assert_refused(on_ranks(2, case, deadline_s=DEADLINE_S), expected)


@pytest.mark.slow
def test_processes_refuse_a_recording_that_only_one_asks_for(two_ranks):
    first, second, expected = DIFFERENT[0]
    assert_refused(two_ranks.run(call_differently, first, second), expected)


def test_a_recorded_step_and_a_profile_are_the_same_thing():
    def case(pipeline):
        CALLS["profile" if pipeline.rank else "recorded"](pipeline)
        return pipeline.timeline is not None

    assert on_pipelines(case) == [True, True]
