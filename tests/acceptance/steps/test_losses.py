"""Whatever form a loss has, and whichever layers add to it, a pipeline trains and reports what one process does."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock import LossOutput, Stream
from penstock.errors import PipelineError
from penstock.models import AuxiliaryLoss, Carry, Skip
from penstock.schedules import build
from tests.support.local_pipelines import (
    IGNORED,
    NEARLY,
    VOCABULARY,
    WIDTH,
    Around,
    Outcome,
    Task,
    block,
    count_tokens,
    difference,
    error_of,
    gradients_of,
    on_pipelines,
    outcome_of,
    pipeline_of,
    settle,
    square_loss,
    step_task,
    token_loss,
    values,
)
from tests.support.reference import reference_evaluate

FLOAT64 = torch.float64
NUM_LAYERS = 8
LENGTH = 4


class Routed(Around):
    """A layer with a router, that wants the router's scores balanced and small."""

    def __init__(self, seed, dtype, is_checkpointed=False):
        super().__init__(seed, dtype)
        self.router = settle(nn.Linear(WIDTH, 3, dtype=dtype), 50 + seed)
        self.balance = AuxiliaryLoss("balance", weight=0.3)
        self.z_loss = AuxiliaryLoss("z_loss", weight=0.01)
        self.is_checkpointed = is_checkpointed

    def forward(self, x):  # [batch, ..., width]
        return checkpoint(self.run, x, use_reentrant=False) if self.is_checkpointed else self.run(x)

    def run(self, x):
        scores = self.router(x)
        self.balance.add(scores.softmax(-1).flatten(0, -2).mean(0).square().sum())
        self.z_loss.add(scores.logsumexp(-1).square().mean())
        return x + self.inner(x) * scores.softmax(-1)[..., :1]


class OnlyMeans(Routed):
    """What it adds is a mean over positions, so that slices add up to whole sequences."""

    reduce = staticmethod(torch.mean)

    def run(self, x):
        scores = self.router(x)
        self.z_loss.add(self.reduce(scores.logsumexp(-1).square()))
        return x + self.inner(x) * scores.softmax(-1)[..., :1]


class OnlySums(OnlyMeans):
    """The same for a sum."""

    reduce = staticmethod(torch.sum)


def token_model(make, dtype):
    embedding = settle(nn.Embedding(VOCABULARY, WIDTH, dtype=dtype), 100)
    head = settle(nn.Linear(WIDTH, VOCABULARY, dtype=dtype), 101)
    # The head's stage adds losses, too.
    middle = [make(seed, dtype) if seed % 2 else block(seed, dtype) for seed in range(1, NUM_LAYERS - 1)]
    return [embedding, *middle, nn.Sequential(make(77, dtype), head)]


def token_task(make, loss, dtype=FLOAT64, rows=8, **options):
    tokens, target = torch.randint(VOCABULARY, (2, rows, LENGTH), generator=torch.Generator().manual_seed(3))
    target[::2, 1:] = IGNORED
    target[:2] = IGNORED  # the first microbatch has no token at all, where it has two rows
    return Task(partial(token_model, make, dtype), (tokens,), target, loss, options)


def summed(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), ignore_index=IGNORED, reduction="sum")


def pair(output, target):
    return summed(output, target), count_tokens(target)


def dict_loss(output, target):
    return {"mean": token_loss(output, target), "size": 1e-3 * output.square().mean()}


def typed(output, target):
    losses = {"entropy": summed(output, target), "size": 1e-3 * output.square().sum()}
    correct = (output.argmax(-1) == target).sum()
    return LossOutput(losses, (target != IGNORED).sum(), reported={"correct": correct, "shape": tuple(target.shape)})


def batch_sum(output, target):
    return LossOutput({"entropy": summed(output, target)}, reported=output.sum())


FORMS = {
    "tensor": (token_loss, {"count": count_tokens}),
    "dict": (dict_loss, {"count": count_tokens}),
    "pair": (pair, {"count": count_tokens}),
    "typed": (typed, {"count": count_tokens}),
    "sum": (batch_sum, {"reduction": "sum"}),
}
SCHEDULES = [
    ("1f1b", 1, {}),
    ("1f1b", 2, {}),
    ("1f1b", 3, {}),
    ("1f1b", 4, {}),
    ("gpipe", 2, {}),
    ("interleaved-1f1b", 2, {"stages_per_rank": 2}),
    ("interleaved-1f1b", 4, {"stages_per_rank": 2}),
    ("zbv", 2, {}),
    ("zbv", 4, {}),
    ("dualpipe", 2, {}),
    ("dualpipe", 4, {}),
]


BITWISE = [each for each in SCHEDULES if each[0] in ("1f1b", "gpipe", "interleaved-1f1b") and each[1] != 3]


def covering(schedules, *fully):
    """The form that has everything under all schedules, and all forms under a few."""
    cases = [(form, *schedule) for schedule in schedules for form in FORMS if form == "typed" or schedule[:2] in fully]
    return pytest.mark.parametrize(("form", "name", "num_ranks", "shape"), cases, ids=lambda part: str(part or "plain"))


def compared(task, schedule, *, num_steps=1, tolerance=1e-12):
    """Require what one process computes in steps that add up; return what the ranks saw, and what one process did."""

    def steps(pipeline):
        return [step_task(pipeline, task) for _ in range(num_steps)][-1]

    found = on_pipelines(schedule.num_ranks, task, steps, schedule, None)
    wanted = task.reference(schedule.num_microbatches, num_steps)
    assert difference(found, wanted, tolerance=tolerance, loss_tolerance=tolerance) == []
    return found, wanted


# ---- every form under every order


@pytest.mark.feature("0.15", "X20", "X35")
@pytest.mark.slow
@covering(SCHEDULES, ("1f1b", 2), ("zbv", 2), ("dualpipe", 2))
def test_any_form_of_loss_beside_losses_of_layers_is_that_of_one_process(form, name, num_ranks, shape):
    loss, options = FORMS[form]
    schedule = build(name, ranks=num_ranks, microbatches=8, **shape)

    _, (result, _) = compared(token_task(Routed, loss, rows=16, **options), schedule, num_steps=2)

    assert result.named_losses.keys() >= {"balance", "z_loss"}


@pytest.mark.slow
@covering(BITWISE, ("1f1b", 2))
def test_steps_that_are_not_zeroed_add_up_to_the_bits_of_one_process(form, name, num_ranks, shape):
    loss, options = FORMS[form]
    schedule = build(name, ranks=num_ranks, microbatches=4, **shape)

    pair = compared(token_task(Routed, loss, torch.float32, **options), schedule, num_steps=3, tolerance=1e-6)

    assert [each for each in difference(*pair) if not each.startswith("the total")] == []


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_slices_have_their_part_in_every_loss(num_ranks, form):
    loss, options = FORMS[form]
    schedule = build("seq1f1b", ranks=num_ranks, microbatches=4, slices=2)
    if form == "dict":  # a mean over all positions beside one over those that count cannot be both
        loss, options = (lambda output, target: {"size": output.square().mean(), "sign": output.mean()}), {}

    compared(token_task(OnlySums if form == "sum" else OnlyMeans, loss, **options), schedule, num_steps=2)


# ---- losses of layers


def routed_model(is_checkpointed=False):
    return [Routed(seed, FLOAT64, is_checkpointed) for seed in range(NUM_LAYERS)]


def mean_task(make_layers=routed_model, loss=square_loss, rows=8, **options):
    inputs, target = (values(seed, rows, WIDTH, dtype=FLOAT64) for seed in (1, 2))
    return Task(make_layers, (inputs,), target, loss, options)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_ranks"), [("1f1b", 2), ("gpipe", 3), ("zbv", 2), ("dualpipe", 2), ("zb-h1", 2)])
def test_what_a_checkpointed_layer_adds_counts_once(name, num_ranks):
    schedule = build(name, ranks=num_ranks, microbatches=4)

    found, _ = compared(mean_task(partial(routed_model, is_checkpointed=True)), schedule, num_steps=2)

    assert difference(found, mean_task().reference(4, num_steps=2), **NEARLY) == []


class Running(OnlyMeans):
    """Looks back over the sequence, and hands its input to the layers further on."""

    def __init__(self, seed, dtype):
        super().__init__(seed, dtype)
        self.carry, self.skip = Carry(), Skip("features")

    def run(self, x):
        hidden = super().run(x)
        before = self.carry.get()
        sums = hidden.cumsum(1) if before is None else before + hidden.cumsum(1)
        self.carry.put(sums[:, -1:])
        return x + 0.1 * sums


class Putting(Running):
    def run(self, x):
        self.skip.put(x)
        return super().run(x)


class Getting(Running):
    def run(self, x):
        return super().run(x + 0.3 * self.skip.get())


@pytest.mark.parametrize(
    ("name", "shape"), [("seq1f1b", {"slices": 2}), ("1f1b", {}), ("zbv", {})], ids=["slices", "whole", "split"]
)
def test_layers_that_carry_and_skip_add_losses_as_others_do(name, shape):
    def make_layers():
        return [Putting(0, FLOAT64), *[Running(seed, FLOAT64) for seed in range(1, 6)], Getting(6, FLOAT64)]

    inputs, target = (values(seed, 8, LENGTH, WIDTH, dtype=FLOAT64) for seed in (1, 2))

    compared(Task(make_layers, (inputs,), target), build(name, ranks=2, microbatches=4, **shape), num_steps=2)


def test_one_auxiliary_loss_may_serve_all_layers_of_threads():
    def make_layers():
        layers = routed_model()
        for layer in layers:
            layer.balance, layer.z_loss = layers[0].balance, layers[0].z_loss
        return layers

    layers = make_layers()
    task = mean_task(lambda: layers, rows=16)

    found = on_pipelines(3, task, lambda pipeline: step_task(pipeline, task), "1f1b", 8)

    assert difference(found, mean_task(make_layers, rows=16).reference(8), **NEARLY) == []


def test_a_stream_weighs_what_layers_add_like_a_whole_batch():
    task = mean_task()

    def case(pipeline):
        stream = Stream(zip(task.inputs[0].split(2), task.target.split(2), strict=True))
        return outcome_of(pipeline, pipeline.step(stream))

    assert difference(on_pipelines(2, task, case), task.reference(4), **NEARLY) == []


class Watched(nn.Module):
    """A frozen layer, watched by a probe whose loss has nothing to do with the model's."""

    def __init__(self, seed):
        super().__init__()
        self.inner = block(seed, FLOAT64).requires_grad_(False)
        self.probe = settle(nn.Linear(WIDTH, 1, dtype=FLOAT64), 20 + seed)
        self.error = AuxiliaryLoss("probe")

    def forward(self, x):
        self.error.add((self.probe(x.detach()) - 1.0).square().mean())
        return self.inner(x)


@pytest.mark.parametrize(("name", "num_ranks"), [("1f1b", 3), ("gpipe", 1), ("zbv", 2)])
def test_a_stage_whose_output_needs_no_gradient_is_trained_by_what_it_adds(name, num_ranks):
    def make_layers():
        return [*[Watched(seed) for seed in range(NUM_LAYERS - 2)], block(7, FLOAT64), block(8, FLOAT64)]

    _, (_, gradients) = compared(mean_task(make_layers), build(name, ranks=num_ranks, microbatches=4))

    assert float(gradients["0.probe.weight"].abs().sum()) > 0
    assert gradients["0.inner.1.weight"] is None


def test_frozen_layers_only_report():
    def make_layers():
        return [layer.requires_grad_(index > 3) for index, layer in enumerate(routed_model())]

    found, _ = compared(mean_task(make_layers), build("1f1b", ranks=2, microbatches=4))

    assert all(grad is None for grad in found[0].gradients.values())


@pytest.mark.feature("X12")
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_of_a_ragged_batch_rows_weigh_what_layers_add(reduction):
    task = mean_task(rows=7, allow_ragged=True, reduction=reduction)

    compared(task, build("1f1b", ranks=2, microbatches=3))


@pytest.mark.feature("X21")
def test_each_has_a_weight_of_its_own_that_may_change_between_steps():
    def change(layers):
        for layer in layers:
            layer.balance.weight, layer.z_loss.weight = 0.0, 2.0

        return layers

    def case(pipeline):
        change([layer for stage in pipeline.stages for layer in stage.layers.values()])
        return step_task(pipeline, mean_task())

    found = on_pipelines(2, mean_task(), case)

    assert difference(found, mean_task(lambda: change(routed_model())).reference(4), **NEARLY) == []
    result = found[0].result
    assert float(result.named_losses["balance"]) > 1
    torch.testing.assert_close(result.total, result.loss + 2 * result.named_losses["z_loss"])


def test_evaluation_reports_what_layers_add_and_trains_nothing():
    task = mean_task()

    def case(pipeline):
        judged, blind = pipeline.evaluate(*task.inputs, target=task.target), pipeline.evaluate(*task.inputs)
        return judged, blind, gradients_of(pipeline.named_parameters())

    wanted = reference_evaluate(routed_model(), task.inputs, {}, task.target, loss=square_loss, num_microbatches=4)
    for judged, blind, gradients in on_pipelines(2, task, case):
        assert difference([Outcome(judged, {})], (wanted, {}), **NEARLY) == []
        assert blind.loss is blind.total is None
        assert blind.losses == []
        assert blind.named_losses == judged.named_losses
        assert set(gradients.values()) == {None}


def test_after_a_step_the_layers_can_be_used_alone():
    layers = routed_model()
    task = mean_task(lambda: layers)
    step_task(pipeline_of(None, task), task)

    nn.Sequential(*layers)(*task.inputs)

    assert all(layer.balance.take() is not None for layer in layers)


def test_a_name_of_both_a_layer_and_the_loss_function_is_refused_on_every_rank():
    task = mean_task(loss=lambda output, target: {"balance": square_loss(output, target)})

    for errors in on_pipelines(2, task, lambda own: [error_of(step_task, own, task) for _ in range(2)]):
        text = "both the loss function and an auxiliary loss of a layer are named 'balance'"
        assert all(text in str(error) for error in errors)


# ---- what is reported


def reports(task, num_steps=1, schedule="1f1b", num_microbatches=4):
    """What the loss functions of two ranks report in the last of some steps."""

    def case(pipeline):
        return [step_task(pipeline, task).result.reported for _ in range(num_steps)][-1]

    return on_pipelines(2, task, case, schedule, num_microbatches)


@pytest.mark.feature("A13")
@pytest.mark.parametrize("num_steps", [1, 3])
def test_what_a_loss_function_reports_comes_back_in_order_where_the_losses_are(num_steps):
    task = mean_task(plain_model, telling)

    first, last = reports(task, num_steps)

    assert first == []
    assert [float(each["first"]) for each in last] == [float(part[0, 0]) for part in task.target.split(2)]
    assert not any(each["first"].requires_grad for each in last)
    assert [each["rows"] for each in last] == [2] * 4


def plain_model():
    return [block(seed, FLOAT64) for seed in range(NUM_LAYERS)]


def telling(output, target):
    first = target[0, 0] + 0 * output.sum()
    return LossOutput(square_loss(output, target), reported={"first": first, "rows": len(target)})


def test_of_two_routes_each_rank_has_the_reports_of_its_own_microbatches():
    task, schedule = mean_task(plain_model, telling, rows=16), build("dualpipe", ranks=2, microbatches=8)

    found_on_ranks = reports(task, schedule=schedule, num_microbatches=None)

    first, last = ([float(each["first"]) for each in own] for own in found_on_ranks)
    everything = [float(part[0, 0]) for part in task.target.split(2)]
    for found, route in ((last, 0), (first, 1)):
        assert found == [
            each for each, own in zip(everything, schedule.route_of_microbatch, strict=True) if own == route
        ]


@pytest.mark.feature("A9")
def test_asking_for_a_loss_that_does_not_exist_says_which_do():
    task = mean_task()
    pipeline = pipeline_of(None, task)
    result = pipeline.step(*task.inputs, target=task.target)

    assert torch.equal(result.losses[-1], result.losses[3])
    with pytest.raises(PipelineError, match=r"no loss of microbatch 4: there are those of microbatches 0 to 3"):
        _ = result.losses[4]
    with pytest.raises(PipelineError, match=r"no loss 'balanse': there are 'balance', 'z_loss'. Did you mean"):
        _ = result.named_losses["balanse"]
    with pytest.raises(PipelineError, match="there are none"):
        _ = pipeline.evaluate(*task.inputs).losses[0]


@pytest.mark.feature("A8")
def test_the_losses_of_every_step_are_its_own():
    task = mean_task()
    pipeline = pipeline_of(None, task)

    results = [pipeline.step(task.inputs[0] * scale, target=task.target) for scale in (1, 2, 3)]

    assert [len(result.losses) for result in results] == [4, 4, 4]
    assert len({float(result.losses[0]) for result in results}) == 3
    assert [len(result.named_microbatch_losses["balance"]) for result in results] == [4, 4, 4]


# ---- scaling


@pytest.mark.feature("E2")
@pytest.mark.parametrize(
    ("name", "scale"), [("1f1b", 2.0**16), ("zbv", lambda loss: loss * 2.0**16), ("dualpipe", 2.0**16)]
)
def test_a_scale_acts_once_on_every_gradient_and_on_nothing_that_is_reported(name, scale):
    task = mean_task()

    scaled, plain = (
        on_pipelines(2, task, lambda pipeline: step_task(pipeline, task), name, **options)
        for options in ({"scale_loss": scale}, {})
    )

    for one, other in zip(scaled, plain, strict=True):
        assert torch.equal(one.result.loss, other.result.loss)
        assert torch.equal(one.result.total, other.result.total)
        unscaled = {name: gradient / 2.0**16 for name, gradient in one.gradients.items()}
        assert all(torch.equal(gradient, other.gradients[name]) for name, gradient in unscaled.items())


def test_what_layers_add_is_scaled_where_nothing_else_is_trained():
    task = mean_task(lambda: [Watched(seed) for seed in range(2)])

    plain, scaled = (step_task(pipeline_of(None, task, scale_loss=scale), task) for scale in (None, 4.0))

    assert torch.equal(scaled.gradients["0.probe.weight"], 4.0 * plain.gradients["0.probe.weight"])


@pytest.mark.feature("E3", "X39")
def test_a_loss_function_that_asks_is_told_the_factor_of_its_loss():
    told = []

    def loss(output, target, *, weight):
        told.append(weight)
        return token_loss(output, target)

    task = token_task(OnlyMeans, loss, count=count_tokens)
    step_task(pipeline_of(None, task), task)

    counts = [count_tokens(part) for part in task.target.split(2)]
    assert told == [count / sum(counts) for count in counts]
