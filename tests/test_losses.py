"""Whatever form a loss has, and whichever layers add to it, a pipeline trains and reports what one process does."""

import re
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock import LossOutput, Stream
from penstock.errors import ConfigError, PipelineError
from penstock.models import AuxiliaryLoss, Carry, Skip
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.local_pipelines import (
    IGNORED,
    VOCABULARY,
    WIDTH,
    block,
    count_tokens,
    error_of,
    gradients_of,
    named,
    on_ranks,
    settle,
    square_loss,
    token_loss,
    values,
    zero,
)
from tests.reference import reference_evaluate, reference_step

FLOAT64 = torch.float64
NUM_LAYERS = 8
LENGTH = 4


class Routed(nn.Module):
    """A layer with a router, that wants the router's scores balanced and small."""

    def __init__(self, seed, dtype, is_checkpointed=False):
        super().__init__()
        self.inner = block(seed, dtype)
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

    def run(self, x):
        scores = self.router(x)
        self.z_loss.add(scores.logsumexp(-1).square().mean())
        return x + self.inner(x) * scores.softmax(-1)[..., :1]


class OnlySums(Routed):
    """The same for a sum."""

    def run(self, x):
        scores = self.router(x)
        self.z_loss.add(scores.logsumexp(-1).square().sum())
        return x + self.inner(x) * scores.softmax(-1)[..., :1]


def token_model(make, dtype):
    embedding = settle(nn.Embedding(VOCABULARY, WIDTH, dtype=dtype), 100)
    head = settle(nn.Linear(WIDTH, VOCABULARY, dtype=dtype), 101)
    # The head's stage adds losses, too.
    middle = [make(seed, dtype) if seed % 2 else block(seed, dtype) for seed in range(1, NUM_LAYERS - 1)]
    return [embedding, *middle, nn.Sequential(make(77, dtype), head)]


def tokens(rows, seed=3):
    generator = torch.Generator().manual_seed(seed)
    inputs, target = torch.randint(VOCABULARY, (2, rows, LENGTH), generator=generator)
    target[::2, 1:] = IGNORED
    target[:2] = IGNORED  # the first microbatch has no token at all, where it has two rows
    return inputs, target


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


@dataclass
class Seen:
    """What one rank saw of a step."""

    result: Any
    gradients: dict = field(default_factory=dict)


def run(wires, make_layers, schedule, loss, batch, *, num_steps=1, options, before=lambda pipeline: None):
    inputs, target = batch
    pipeline = Pipeline(make_layers(), schedule, loss=loss, transport=wires, **options)
    before(pipeline)
    for _ in range(num_steps):
        result = pipeline.step(inputs, target=target)
    seen = Seen(result, gradients_of(pipeline.named_parameters()))
    pipeline.close()
    return seen


def expected(make_layers, num_microbatches, loss, batch, *, num_steps=1, options, before=lambda layers: None):
    layers = make_layers()
    before(layers)
    for _ in range(num_steps):
        result = reference_step(
            layers, batch[:1], {}, batch[1], loss=loss, num_microbatches=num_microbatches, **options
        )
    return Seen(result, gradients_of(named(layers)))


def differences(found, wanted, tolerance=0.0):
    """Say in what the ranks differ from one process; 0 asks for the same bits."""
    different = []
    for rank, seen in enumerate(found):
        result, one = seen.result, wanted.result
        pairs = {f"the gradient of {name}": (grad, wanted.gradients[name]) for name, grad in seen.gradients.items()}
        pairs |= {f"loss {name}": (result.named_losses.get(name), loss) for name, loss in one.named_losses.items()}
        pairs |= {f"loss {at}": pair for at, pair in enumerate(zip(result.losses, one.losses, strict=True))}
        pairs |= {"the loss": (result.loss, one.loss), "total": (result.total, one.total)}
        different += [f"{name} on rank {rank}" for name, each in pairs.items() if not is_same(*each, tolerance)]
        if seen.result.named_losses.keys() != wanted.result.named_losses.keys():
            different.append(f"names {list(seen.result.named_losses)} on rank {rank}")
    names = {name for seen in found for name in seen.gradients}
    return different + [f"no {name}" for name in wanted.gradients.keys() - names]


def is_same(found, wanted, tolerance):
    if found is None or wanted is None:
        return found is wanted
    if not tolerance:
        return found.dtype == wanted.dtype and torch.equal(found.nan_to_num(7.5), wanted.nan_to_num(7.5))
    return found.dtype == wanted.dtype and torch.allclose(found, wanted, rtol=tolerance, atol=tolerance, equal_nan=True)


def compared(make_layers, schedule, loss, batch, *, num_steps=1, tolerance=1e-12, **options):
    """Require what one process computes; return what the ranks saw, and what one process did."""
    found = on_ranks(
        schedule.num_ranks,
        lambda wires: run(wires, make_layers, schedule, loss, batch, num_steps=num_steps, options=options),
    )
    wanted = expected(make_layers, schedule.num_microbatches, loss, batch, num_steps=num_steps, options=options)
    assert differences(found, wanted, tolerance) == []
    return found, wanted


# ---- every form under every order


@pytest.mark.slow
@covering(SCHEDULES, ("1f1b", 2), ("zbv", 2), ("dualpipe", 2))
def test_any_form_of_loss_beside_losses_of_layers_is_that_of_one_process(form, name, num_ranks, shape):
    loss, options = FORMS[form]
    schedule = build(name, ranks=num_ranks, microbatches=8, **shape)

    _, wanted = compared(partial(token_model, Routed, FLOAT64), schedule, loss, tokens(16), num_steps=2, **options)

    assert wanted.result.named_losses.keys() >= {"balance", "z_loss"}


@pytest.mark.slow
@covering(BITWISE, ("1f1b", 2))
def test_steps_that_are_not_zeroed_add_up_to_the_bits_of_one_process(form, name, num_ranks, shape):
    loss, options = FORMS[form]
    schedule = build(name, ranks=num_ranks, microbatches=4, **shape)
    make_layers = partial(token_model, Routed, torch.float32)

    pair = compared(make_layers, schedule, loss, tokens(8), num_steps=3, tolerance=1e-6, **options)

    assert [each for each in differences(*pair) if not each.startswith("total")] == []


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_slices_have_their_part_in_every_loss(num_ranks, form):
    loss, options = FORMS[form]
    schedule = build("seq1f1b", ranks=num_ranks, microbatches=4, slices=2)
    make_layers = partial(token_model, OnlySums if form == "sum" else OnlyMeans, FLOAT64)
    if form == "dict":  # a mean over all positions beside one over those that count cannot be both
        loss, options = (lambda output, target: {"size": output.square().mean(), "sign": output.mean()}), {}

    compared(make_layers, schedule, loss, tokens(8), num_steps=2, **options)


GLOO = [("1f1b", {}), ("dualpipe", {}), ("seq1f1b", {"slices": 2})]


@pytest.mark.slow
def test_it_is_the_same_on_gloo(two_ranks):
    make_layers, batch = partial(token_model, OnlyMeans, FLOAT64), tokens(8)
    wanted = expected(make_layers, 4, typed, batch, options={"count": count_tokens})

    per_rank = two_ranks.run(steps_on_gloo, timeout_s=90.0)

    for found in zip(*per_rank, strict=True):
        assert differences(found, wanted, 1e-12) == []


def steps_on_gloo(rank):
    found = []
    for name, shape in GLOO:
        schedule = build(name, ranks=2, microbatches=4, **shape)
        options = {"count": count_tokens, "group": dist.group.WORLD}
        make_layers = partial(token_model, OnlyMeans, FLOAT64)
        found.append(run(None, make_layers, schedule, typed, tokens(8), options=options))
    return found


# ---- losses of layers


def means(rows=8, dtype=FLOAT64):
    return values(1, rows, WIDTH, dtype=dtype), values(2, rows, WIDTH, dtype=dtype)


def routed_model(dtype=FLOAT64, is_checkpointed=False):
    return [Routed(seed, dtype, is_checkpointed) for seed in range(NUM_LAYERS)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_ranks"), [("1f1b", 2), ("gpipe", 3), ("zbv", 2), ("dualpipe", 2), ("zb-h1", 2)])
def test_what_a_checkpointed_layer_adds_counts_once(name, num_ranks):
    schedule = build(name, ranks=num_ranks, microbatches=4)

    found, _ = compared(partial(routed_model, is_checkpointed=True), schedule, square_loss, means(), num_steps=2)

    plain = expected(routed_model, 4, square_loss, means(), num_steps=2, options={})
    assert differences(found, plain, 1e-12) == []


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

    batch = [values(seed, 8, LENGTH, WIDTH, dtype=FLOAT64) for seed in (1, 2)]

    compared(make_layers, build(name, ranks=2, microbatches=4, **shape), square_loss, batch, num_steps=2)


def test_one_auxiliary_loss_may_serve_all_layers_of_threads():
    def make_layers():
        layers = routed_model()
        for layer in layers:
            layer.balance, layer.z_loss = layers[0].balance, layers[0].z_loss
        return layers

    layers, schedule = make_layers(), build("1f1b", ranks=3, microbatches=8)

    found = on_ranks(3, lambda wires: run(wires, lambda: layers, schedule, square_loss, means(16), options={}))

    wanted = expected(make_layers, 8, square_loss, means(16), options={})
    assert differences(found, wanted, 1e-12) == []


def test_a_stream_weighs_what_layers_add_like_a_whole_batch():
    inputs, target = means()

    def case(wires):
        pipeline = Pipeline(routed_model(), "1f1b", 4, square_loss, transport=wires)
        result = pipeline.step(Stream(zip(inputs.split(2), target.split(2), strict=True)))
        return Seen(result, gradients_of(pipeline.named_parameters()))

    assert differences(on_ranks(2, case), expected(routed_model, 4, square_loss, means(), options={}), 1e-12) == []


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


@pytest.mark.parametrize(("name", "num_ranks"), [("1f1b", 3), ("1f1b", 1), ("gpipe", 2), ("zbv", 2)])
def test_a_stage_whose_output_needs_no_gradient_is_trained_by_what_it_adds(name, num_ranks):
    def make_layers():
        return [*[Watched(seed) for seed in range(NUM_LAYERS - 2)], block(7, FLOAT64), block(8, FLOAT64)]

    _, wanted = compared(make_layers, build(name, ranks=num_ranks, microbatches=4), square_loss, means())

    assert float(wanted.gradients["0.probe.weight"].abs().sum()) > 0
    assert wanted.gradients["0.inner.1.weight"] is None


def test_frozen_layers_only_report():
    def make_layers():
        return [layer.requires_grad_(index > 3) for index, layer in enumerate(routed_model())]

    found, _ = compared(make_layers, build("1f1b", ranks=2, microbatches=4), square_loss, means())

    assert all(grad is None for grad in found[0].gradients.values())


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_of_a_ragged_batch_rows_weigh_what_layers_add(reduction):
    schedule = build("1f1b", ranks=2, microbatches=3)

    compared(routed_model, schedule, square_loss, means(7), allow_ragged=True, reduction=reduction)


def test_each_has_a_weight_of_its_own_that_may_change_between_steps():
    def change(layers):
        for layer in layers:
            layer.balance.weight, layer.z_loss.weight = 0.0, 2.0

    def change_own(pipeline):
        change([layer for stage in pipeline.stages for layer in stage.layers.values()])

    schedule = build("1f1b", ranks=2, microbatches=4)

    found = on_ranks(
        2, lambda wires: run(wires, routed_model, schedule, square_loss, means(), options={}, before=change_own)
    )

    wanted = expected(routed_model, 4, square_loss, means(), options={}, before=change)
    assert differences(found, wanted, 1e-12) == []
    result = found[0].result
    assert float(result.named_losses["balance"]) > 1
    torch.testing.assert_close(result.total, result.loss + 2 * result.named_losses["z_loss"])


def test_evaluation_reports_what_layers_add_and_trains_nothing():
    def case(wires):
        pipeline = Pipeline(routed_model(), "1f1b", 4, square_loss, transport=wires)
        inputs, target = means()
        judged, blind = pipeline.evaluate(inputs, target=target), pipeline.evaluate(inputs)
        return judged, blind, gradients_of(pipeline.named_parameters())

    inputs, target = means()
    wanted = reference_evaluate(routed_model(), (inputs,), {}, target, loss=square_loss, num_microbatches=4)
    for judged, blind, gradients in on_ranks(2, case):
        assert differences([Seen(judged)], Seen(wanted), 1e-12) == []
        assert blind.loss is blind.total is None
        assert blind.losses == []
        assert blind.named_losses == judged.named_losses
        assert set(gradients.values()) == {None}


def test_after_a_step_the_layers_can_be_used_alone():
    layers = routed_model()
    pipeline = Pipeline(layers, "1f1b", 4, square_loss)
    inputs, target = means()
    pipeline.step(inputs, target=target)

    nn.Sequential(*layers)(inputs)

    assert all(layer.balance.take() is not None for layer in layers)


def test_after_a_failed_step_nothing_is_left_and_the_next_one_is_right():
    def case(wires):
        calls = []

        def loss(output, target):
            calls.append(output)
            return None if len(calls) == 2 else square_loss(output, target)

        pipeline = Pipeline(routed_model(), "1f1b", 4, loss, transport=wires)
        inputs, target = means()
        error = error_of(pipeline.step, inputs, target=target)
        left = [layer.balance.take() for stage in pipeline.stages for layer in stage.layers.values()]
        zero(pipeline)
        result = pipeline.step(inputs, target=target)
        return error, left, Seen(result, gradients_of(pipeline.named_parameters()))

    found = on_ranks(2, case)

    assert all("the loss function returned a NoneType" in str(error) for error, _, _ in found)
    assert {each for _, left, _ in found for each in left} == {None}
    wanted = expected(routed_model, 4, square_loss, means(), options={})
    assert differences([seen for *_, seen in found], wanted, 1e-12) == []


def test_a_name_of_both_a_layer_and_the_loss_function_is_refused_on_every_rank():
    def case(wires):
        pipeline = Pipeline(
            routed_model(), "1f1b", 4, lambda output, target: {"balance": square_loss(output, target)}, transport=wires
        )
        inputs, target = means()
        return [error_of(pipeline.step, inputs, target=target) for _ in range(2)]

    for errors in on_ranks(2, case):
        text = "both the loss function and an auxiliary loss of a layer are named 'balance'"
        assert all(text in str(error) for error in errors)


# ---- what is reported


def reports(schedule, batch, num_steps=1):
    """What the loss functions of two ranks report in the last of some steps."""

    def case(wires):
        pipeline = Pipeline(plain_model(), schedule, 4 if schedule == "1f1b" else None, telling, transport=wires)
        return [pipeline.step(batch[0], target=batch[1]).reported for _ in range(num_steps)][-1]

    return on_ranks(2, case)


@pytest.mark.parametrize("num_steps", [1, 3])
def test_what_a_loss_function_reports_comes_back_in_order_where_the_losses_are(num_steps):
    first, last = reports("1f1b", means(), num_steps)

    assert first == []
    assert [float(each["first"]) for each in last] == [float(part[0, 0]) for part in means()[1].split(2)]
    assert not any(each["first"].requires_grad for each in last)
    assert [each["rows"] for each in last] == [2] * 4


def plain_model():
    return [block(seed, FLOAT64) for seed in range(NUM_LAYERS)]


def telling(output, target):
    first = target[0, 0] + 0 * output.sum()
    return LossOutput(square_loss(output, target), reported={"first": first, "rows": len(target)})


def test_of_two_routes_each_rank_has_the_reports_of_its_own_microbatches():
    schedule = build("dualpipe", ranks=2, microbatches=8)

    first, last = ([float(each["first"]) for each in own] for own in reports(schedule, means(16)))

    everything = [float(part[0, 0]) for part in means(16)[1].split(2)]
    for found, route in ((last, 0), (first, 1)):
        assert found == [
            each for each, own in zip(everything, schedule.route_of_microbatch, strict=True) if own == route
        ]


def test_of_slices_a_microbatch_has_a_list_of_reports():
    inputs, target = (values(seed, 4, 6, WIDTH, dtype=FLOAT64) for seed in (1, 2))

    def loss(output, target):
        return LossOutput(square_loss(output, target), reported=target.shape[1])

    pipeline = Pipeline(plain_model(), build("seq1f1b", ranks=1, microbatches=2, slices=3), loss=loss)

    assert pipeline.step(inputs, target=target).reported == [[2, 2, 2], [2, 2, 2]]


def test_asking_for_a_loss_that_does_not_exist_says_which_do():
    pipeline = Pipeline(routed_model(), "1f1b", 4, square_loss)
    inputs, target = means()
    result = pipeline.step(inputs, target=target)

    assert torch.equal(result.losses[-1], result.losses[3])
    with pytest.raises(PipelineError, match=r"no loss of microbatch 4: there are those of microbatches 0 to 3"):
        _ = result.losses[4]
    with pytest.raises(PipelineError, match=r"no loss 'balanse': there are 'balance', 'z_loss'. Did you mean"):
        _ = result.named_losses["balanse"]
    with pytest.raises(PipelineError, match="there are none"):
        _ = pipeline.evaluate(inputs).losses[0]


def test_the_losses_of_every_step_are_its_own():
    pipeline = Pipeline(routed_model(), "1f1b", 4, square_loss)
    inputs, target = means()

    results = [pipeline.step(inputs * scale, target=target) for scale in (1, 2, 3)]

    assert [len(result.losses) for result in results] == [4, 4, 4]
    assert len({float(result.losses[0]) for result in results}) == 3
    assert [len(result.named_microbatch_losses["balance"]) for result in results] == [4, 4, 4]


# ---- scaling


@pytest.mark.parametrize("scale", [2.0**16, lambda loss: loss * 2.0**16], ids=["number", "function"])
@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe"])
def test_a_scale_acts_once_on_every_gradient_and_on_nothing_that_is_reported(name, scale):
    schedule = build(name, ranks=2, microbatches=4)

    def case(wires, options):
        return run(wires, routed_model, schedule, square_loss, means(), options=options)

    found = on_ranks(2, case, {"scale_loss": scale})

    wanted = on_ranks(2, case, {})
    for one, other in zip(found, wanted, strict=True):
        assert torch.equal(one.result.loss, other.result.loss)
        assert torch.equal(one.result.total, other.result.total)
        unscaled = {name: gradient / 2.0**16 for name, gradient in one.gradients.items()}
        assert all(torch.equal(gradient, other.gradients[name]) for name, gradient in unscaled.items())


def test_a_scale_keeps_gradients_that_float16_cannot_hold():
    inputs, target = means(dtype=torch.float16)

    def times(factor):
        return lambda output, target: factor * square_loss(output.float(), target.float())

    def halves():
        return [block(seed, torch.float16) for seed in range(4)]

    def case(wires, options):
        return run(wires, halves, "1f1b", times(2.0**-20), (inputs, target), options=options).gradients

    (_, lost), (_, scaled) = (on_ranks(2, case, options) for options in ({}, {"scale_loss": 2.0**16}))

    layers = halves()
    reference_step(layers, (inputs,), {}, target, loss=times(2.0**-4), num_microbatches=8)
    wanted = gradients_of(named(layers))
    assert all(torch.equal(gradient, wanted[name]) for name, gradient in scaled.items())
    assert any((lost[name] == 0).sum() > (gradient == 0).sum() for name, gradient in scaled.items())


def test_what_layers_add_is_scaled_where_nothing_else_is_trained():
    def make_layers():
        return [Watched(seed) for seed in range(2)]

    pipelines = [Pipeline(make_layers(), "1f1b", 4, square_loss, scale_loss=scale) for scale in (None, 4.0)]
    for pipeline in pipelines:
        pipeline.step(means()[0], target=means()[1])

    plain, scaled = (gradients_of(pipeline.named_parameters())["0.probe.weight"] for pipeline in pipelines)
    assert torch.equal(scaled, 4.0 * plain)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("inf"), float("nan"), "16"])
def test_a_wrong_scale_is_refused_before_any_step(scale):
    with pytest.raises(ConfigError, match=r"scale_loss: .* scales no loss; expected a finite number"):
        Pipeline(plain_model(), "1f1b", 4, square_loss, scale_loss=scale)


def test_ranks_that_scale_differently_say_so():
    def case(wires):
        return error_of(Pipeline, plain_model(), "1f1b", 4, square_loss, transport=wires, scale_loss=1.0 + wires.rank)

    for error in on_ranks(2, case):
        assert "disagree on scale_loss: rank 0 has 1.0, rank 1 has 2.0" in str(error)


def test_a_loss_function_that_asks_is_told_the_factor_of_its_loss():
    told = []

    def loss(output, target, *, weight):
        told.append(weight)
        return token_loss(output, target)

    inputs, target = tokens(8)
    make_layers = partial(token_model, OnlyMeans, FLOAT64)
    pipeline = Pipeline(make_layers(), "1f1b", 4, loss, count=count_tokens)
    pipeline.step(inputs, target=target)

    counts = [count_tokens(part) for part in target.split(2)]
    assert told == [count / sum(counts) for count in counts]


# ---- mistakes


@pytest.mark.parametrize(
    ("loss", "options", "message"),
    [
        (
            pair,
            {},
            "microbatch 0: .* weight 0, but the weights of all microbatches must .* give Pipeline count",
        ),
        (lambda o, t: (summed(o, t), 5), {"count": count_tokens}, r"weight 5, but count returned \d for its target"),
        (lambda o, t: (summed(o, t), {"a": 1}), {}, r"return penstock.LossOutput\(loss, reported=...\)"),
        (lambda o, t: {}, {}, r"a dict of losses with the names \[\]; expected one or more"),
        (lambda o, t: {"a": o}, {}, r"a tensor of shape \(2, 4, 11\) .* as 'a'"),
    ],
    ids=["no count", "other count", "Megatron", "no names", "no number"],
)
def test_what_is_no_loss_is_refused_on_every_rank_with_the_way_out(loss, options, message):
    inputs, target = tokens(8)

    def case(wires):
        pipeline = Pipeline(token_model(OnlyMeans, FLOAT64), "1f1b", 4, loss, transport=wires, **options)
        return error_of(pipeline.step, inputs, target=target)

    for error in on_ranks(2, case):
        assert isinstance(error, PipelineError)
        assert re.search(message, str(error))
