"""Steps in which stages run their forward again give bit for bit what the same steps give without it."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import PipelineError
from penstock.ir.operations import Op
from penstock.pipeline import Pipeline
from penstock.schedules import FAMILIES, build
from tests.acceptance.slices.test_carried_steps import (
    CarriedAttention,
    CarriedGRU,
    RunningSum,
    carrying_task,
    decoder_task,
)
from tests.exactness.combinations import schedule_of
from tests.exactness.features import LOSSES, MODELS, batch, options
from tests.support.local_pipelines import (
    WIDTH,
    Around,
    block,
    error_of,
    gradients_of,
    mistakes,
    on_ranks,
    square_loss,
    values,
)

TRAINING = [name for name in FAMILIES if name != "forward-only"]
NUM_STEPS = 2


def some(schedule):
    """Every other stage, so that both kinds of stages meet."""
    return ps.with_recompute(schedule, stages=range(0, schedule.num_stages, 2))


def outcomes_of(schedule, feature, loss):
    num_layers = max(4, len(schedule.placement.routes[0]))

    def run(wires):
        found = []
        pipeline = Pipeline(
            MODELS[feature](num_layers), schedule, loss=LOSSES[loss][0], transport=wires, **options(feature, loss)
        )
        for step in range(NUM_STEPS):
            tokens, target = batch(feature, loss, schedule.num_microbatches, step)
            result = pipeline.step(tokens, target=target, return_outputs=feature != "variable length")
            found.append((result.loss, result.losses, result.outputs, gradients_of(pipeline.named_parameters())))
        pipeline.close()
        return found

    return on_ranks(schedule.num_ranks, run)


def assert_same(found, expected):
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same(one, other)
    elif isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            assert_same(found[name], expected[name])
    elif expected is None:
        assert found is None
    else:
        assert torch.equal(found, expected)


@pytest.mark.feature("X17", "X52")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::penstock.errors.PenstockWarning")
@pytest.mark.parametrize("name", TRAINING)
def test_every_family_computes_the_same_with_recomputation(name):
    schedule = schedule_of(name, 3, 6) or schedule_of(name, 4, 8) or schedule_of(name, 1, 2)
    index = TRAINING.index(name)
    features, losses = list(MODELS), list(LOSSES)
    for turn in range(3):
        feature, loss = features[(index + 3 * turn) % len(features)], losses[(index + turn) % len(losses)]
        expected = outcomes_of(schedule, feature, loss)

        has_room_for_one = ps.with_recompute(schedule, activations=2)
        for recomputed in (ps.with_recompute(schedule), some(schedule), has_room_for_one):
            if recomputed is schedule:  # a schedule that never holds more than one
                continue
            assert Op.RECOMPUTE in recomputed.ops
            assert_same(outcomes_of(recomputed, feature, loss), expected)


@pytest.mark.slow
def test_slices_that_carry_state_learn_the_same():
    plain = build("seq1f1b", ranks=2, microbatches=4, slices=3)

    for schedule in (ps.with_recompute(plain), ps.with_recompute(plain, activations=2)):
        assert schedule != plain
        assert mistakes(decoder_task(), schedule) == []
        assert mistakes(carrying_task(RunningSum, CarriedGRU, CarriedAttention, RunningSum), schedule) == []


@pytest.mark.feature("X17")
@pytest.mark.parametrize("name", ["1f1b", "gpipe", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe"])
def test_a_rank_with_room_for_two_activations_holds_no_more_and_computes_the_same(name):
    num_ranks = 4 if name == "dualpipe" else 3
    plain, in_part = (build(name, ranks=num_ranks, microbatches=8, **options) for options in ({}, {"recompute": 2}))
    inputs, target = values(1, 16, WIDTH), values(2, 16, WIDTH)

    def run(wires, schedule):
        layers = [block(seed) for seed in range(6)]
        with Pipeline(layers, schedule, loss=square_loss, transport=wires) as pipeline:
            result = pipeline.step(inputs, target=target, record=True)
            outcome = result.loss, result.losses, gradients_of(pipeline.named_parameters())
            rows = pipeline.timeline.program.op == Op.RECOMPUTE
            ranks = pipeline.memory_report(inputs, target=target).ranks
            return outcome, int(rows.sum()), [rank.peak_activations for rank in ranks]

    expected, found = (on_ranks(num_ranks, run, schedule) for schedule in (plain, in_part))

    for (plain_outcome, _, plain_peaks), (outcome, num_again, peaks) in zip(expected, found, strict=True):
        assert_same(outcome, plain_outcome)
        assert 0 < num_again == int((in_part.op == Op.RECOMPUTE).sum()) < int((in_part.op == Op.FORWARD).sum())
        assert peaks == ps.check(in_part).peak_activations
        assert sum(peaks) < sum(plain_peaks)
        assert max(peaks) <= 2 or name in ("zb-h1", "zbv")  # of which a part stays until W


class Counting(Around):
    """Has buffers that its forward changes: a count, and the running means of a batch norm."""

    def __init__(self, seed):
        super().__init__(seed)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x):
        self.calls += 1
        return self.norm(self.inner(x))


class Growing(Around):
    """Computes with a buffer that every forward changes, as a spectral norm does."""

    def __init__(self, seed):
        super().__init__(seed)
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        self.scale += 1
        return self.inner(x) * self.scale.clone()


class GrowingUnseen(Growing):
    """Changes the buffer past autograd, and so without a new version."""

    def forward(self, x):
        self.scale.data.add_(1)
        return self.inner(x) * self.scale.clone()


class GrowingAnew(Growing):
    """Has another memory for the buffer behind each forward."""

    def forward(self, x):
        self.scale.data = self.scale.data + 1
        return self.inner(x) * self.scale.clone()


class Centered(nn.Module):
    """A loss with a buffer that it changes."""

    def __init__(self):
        super().__init__()
        self.register_buffer("center", torch.zeros(WIDTH))

    def forward(self, output, target):
        loss = square_loss(output - self.center, target)
        with torch.no_grad():
            self.center.mul_(0.5).add_(output.mean(0))
        return loss


class Dropping(Around):
    """Draws from torch's default generator."""

    def forward(self, x):
        return nn.functional.dropout(self.inner(x), 0.3)


def trained(schedule, make_layer, make_loss=lambda: square_loss):
    def run(wires):
        torch.manual_seed(wires.rank)  # one rank draws for itself
        layers, loss = [make_layer(seed) for seed in range(4)], make_loss()
        pipeline = Pipeline(layers, schedule, loss=loss, transport=wires)
        for step in range(NUM_STEPS):
            result = pipeline.step(values(step, 8, WIDTH), target=values(10 + step, 8, WIDTH))
        modules = [*layers, *([loss] if isinstance(loss, nn.Module) else [])]
        buffers = {name: buffer.clone() for name, buffer in nn.ModuleList(modules).named_buffers()}
        return result.losses, gradients_of(pipeline.named_parameters()), buffers

    return on_ranks(schedule.num_ranks, run)


@pytest.mark.parametrize("name", ["1f1b", "zb-h1", "gpipe"])
@pytest.mark.parametrize(
    "made", [(Counting,), (Growing,), (GrowingUnseen,), (GrowingAnew,), (block, Centered)], ids=lambda made: made[-1]
)
def test_buffers_of_layers_and_of_the_loss_change_once_and_are_read_as_at_first(made, name):
    schedule = build(name, ranks=2, microbatches=4)

    expected = trained(schedule, *made)

    assert expected[0][2].get("0.calls", 4 * NUM_STEPS) == 4 * NUM_STEPS
    assert_same(trained(ps.with_recompute(schedule), *made), expected)


@pytest.mark.parametrize("name", ["1f1b", "gpipe"])
@pytest.mark.parametrize(
    "made", [(Counting,), (GrowingUnseen,), (GrowingAnew,), (block, Centered)], ids=lambda made: made[-1]
)
def test_buffers_are_read_as_at_first_where_some_microbatches_of_a_stage_run_again(made, name):
    schedule = build(name, ranks=3, microbatches=4)
    in_part = ps.with_recompute(schedule, activations=2)

    assert 0 < (in_part.op[in_part.stage == 0] == Op.RECOMPUTE).sum() < 4
    assert_same(trained(in_part, *made), trained(schedule, *made))


class CountedInPlace(Around):
    """Carries the number of positions so far, and adds to it in place."""

    def __init__(self, seed):
        super().__init__(seed, torch.float64)
        self.number = ps.Carry()

    def forward(self, x):
        number = self.number.get()
        number = torch.zeros(()) if number is None else number
        positions = number + torch.arange(x.shape[1])
        number += x.shape[1]
        self.number.put(number)
        return self.inner(x) * (1 + positions[:, None])


def test_what_a_layer_carries_and_changes_in_place_cannot_run_again():
    task = carrying_task(CountedInPlace, CountedInPlace)
    schedule = build("seq1f1b", ranks=2, microbatches=2, slices=2)
    assert mistakes(task, schedule) == []

    with pytest.raises(PipelineError, match=r"R0.1: .*a value that a layer carried from slice to slice was changed in"):
        mistakes(task, ps.with_recompute(schedule))


@pytest.mark.parametrize(("name", "num_ranks"), [("gpipe", 1), ("interleaved-1f1b", 2), ("zb-h1", 2), ("zbv", 1)])
def test_a_target_that_the_loss_changes_in_place_cannot_be_used_again(name, num_ranks):
    """Classes that are counted from 1 are often made to count from 0 so."""
    schedule = build(name, ranks=num_ranks, microbatches=4, recompute=True)
    inputs, classes = values(1, 8, WIDTH), torch.arange(8) % WIDTH

    def careless(output, target):
        target -= 1
        return nn.functional.cross_entropy(output, target)

    def case(wires):
        layers = [block(seed) for seed in range(schedule.num_stages)]
        pipeline = Pipeline(layers, schedule, loss=careless, transport=wires)
        return error_of(pipeline.step, inputs, target=classes + 1)

    errors = on_ranks(num_ranks, case)

    assert all(isinstance(error, PipelineError) for error in errors)
    assert len({error.rank for error in errors}) == 1
    assert any("the loss function changed its target in place" in str(error) for error in errors)


@pytest.mark.feature("X32")
def test_dropout_without_a_seed_draws_again_what_it_drew():
    schedule = build("1f1b", ranks=1, microbatches=4)

    assert_same(trained(ps.with_recompute(schedule), Dropping), trained(schedule, Dropping))


def test_ranks_that_share_a_generator_draw_again_what_each_drew():
    seen = {}

    class Noted(Dropping):
        def forward(self, x):
            output = super().forward(x)
            seen.setdefault((id(self), float(x.sum())), []).append(output.detach().clone())
            return output

    trained(ps.with_recompute(build("1f1b", ranks=2, microbatches=4)), Noted)

    assert len(seen) > 8
    for outputs in seen.values():
        first, again = outputs
        assert torch.equal(first, again)


class Reversing(Around):
    """A layer with a hook on what it gets, as layers that reverse or scale gradients have."""

    def forward(self, x, *, prompt):
        for value, factor in ((x, -0.5), (prompt, 3.0)):
            if value.requires_grad:
                # autograd calls a hook on one part of a batch with None where it comes to another part
                value.register_hook(lambda gradient, factor=factor: None if gradient is None else gradient * factor)
        return self.inner(x + prompt)


# Two stages of a rank are given one prompt, on which both leave hooks: the order of backwards says which sees which.
@pytest.mark.parametrize(
    ("schedule", "has_prompt"),
    [("1f1b", True), ("gpipe", True), ("zb-h1", True), ("interleaved-1f1b", False), ("zbv", False)],
)
def test_a_hook_on_an_input_of_a_stage_runs_once(schedule, has_prompt):
    def run(wires, **options):
        batch, prompt = (values(seed, 8, WIDTH, dtype=torch.float64) for seed in (1, 3))
        batch.requires_grad_()
        prompt.requires_grad_(has_prompt)
        layers = [Reversing(seed, torch.float64) for seed in range(4)]
        with Pipeline(layers, schedule, 4, square_loss, transport=wires, **options) as pipeline:
            pipeline.step(batch, target=values(2, 8, WIDTH, dtype=torch.float64), prompt=prompt)
            return gradients_of([*pipeline.named_parameters(), ("batch", batch), ("prompt", prompt)])

    for plain, again in zip(on_ranks(2, run), on_ranks(2, lambda wires: run(wires, recompute=True)), strict=True):
        assert_same(again, plain)


class ReversingSum(RunningSum):
    """A layer with a hook on the value that an earlier slice left."""

    def forward(self, x):
        before = self.sums.get()
        if before is not None and before["total"].requires_grad:
            before["total"].register_hook(lambda gradient: gradient * -0.5)
        return super().forward(x)


class ReversingSkip(Around):
    """A layer with a hook on the skip that it gets, where it does not put it."""

    def __init__(self, seed, puts):
        super().__init__(seed, torch.float64)
        self.puts, self.skip = puts, ps.Skip("early")

    def forward(self, x):
        if self.puts:
            self.skip.put(self.inner(x))
            return x
        early = self.skip.get()
        if early.requires_grad:
            early.register_hook(lambda gradient: gradient * -0.5)
        return self.inner(x) + early


@pytest.mark.parametrize("kind", ["carried", "skip"])
def test_a_hook_on_what_comes_past_the_inputs_runs_once(kind):
    def run(wires, changed=lambda schedule: schedule):
        if kind == "carried":
            task, layers = carrying_task(ReversingSum), [ReversingSum(seed) for seed in range(4)]
            schedule = build("breadth-depth", ranks=2, microbatches=2, slices=3, stages_per_rank=2)
        else:
            task, layers = carrying_task(), [ReversingSkip(seed, puts=seed == 0) for seed in range(4)]
            schedule = build("interleaved-1f1b", ranks=2, microbatches=2)
        with Pipeline(layers, changed(schedule), loss=square_loss, transport=wires, allow_ragged=True) as pipeline:
            pipeline.step(*task.inputs, target=task.target)
            return gradients_of(pipeline.named_parameters())

    for plain, again in zip(on_ranks(2, run), on_ranks(2, run, ps.with_recompute), strict=True):
        assert_same(again, plain)
