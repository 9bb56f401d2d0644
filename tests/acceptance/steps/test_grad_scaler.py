"""Training with `torch.amp.GradScaler` on several ranks: scales, skipped steps and weights are those of one process."""

from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.amp import GradScaler
from torch.distributed.device_mesh import init_device_mesh

from penstock.errors import StepRefused
from penstock.execute.stages.gradient_norm import clip_gradients
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import (
    VOCABULARY,
    WIDTH,
    block,
    error_of,
    named,
    on_ranks,
    settle,
    square_loss,
    values,
)

STEPS = 12
M = 4
OVERFLOWS_IN = (4, 9)
"""Steps, counted from 1, in which one gradient becomes infinite."""


def make_scaler(**options):
    return GradScaler("cpu", **{"init_scale": 2.0**10, "growth_interval": 2} | options)


def make_layers(dtype=torch.float32):
    return [block(seed, dtype) for seed in range(4)]


def batch(step, dtype=torch.float32):
    return values(100 + step, 8, WIDTH, dtype=dtype), values(200 + step, 8, WIDTH, dtype=dtype)


def tokens(step, dtype=torch.float32):
    generator = torch.Generator().manual_seed(step)
    return torch.randint(VOCABULARY, (8,), generator=generator), values(200 + step, 8, WIDTH, dtype=dtype)


class Overflow:
    """Makes the gradient of one layer's matrix infinite in some steps, wherever the layer is."""

    def __init__(self, layer, steps=OVERFLOWS_IN):
        self.step = 0
        self._steps = steps
        next(parameter for parameter in layer.parameters() if parameter.ndim == 2).register_hook(self._replaced)

    def _replaced(self, gradient):
        return gradient * float("inf") if self.step in self._steps else gradient


class Training:
    """Optimizer, scaler and history of a run; `update` follows a step that left scaled gradients in the parameters."""

    def __init__(self, named_parameters, scaler, make_optimizer=torch.optim.AdamW):
        self.parameters = dict(named_parameters)
        self.scaler = scaler
        self.optimizer = make_optimizer(self.parameters.values())
        self.scales, self.skipped = [], []

    def update(self, clip=None):
        trained = [name for name, parameter in self.parameters.items() if parameter.grad is not None]
        before = {name: self.parameters[name].detach().clone() for name in trained}
        if clip is not None:
            self.scaler.unscale_(self.optimizer)
            clip()
        if trained:
            self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        self.scales.append(self.scaler.get_scale())
        if trained:
            self.skipped.append(all(torch.equal(value, self.parameters[name]) for name, value in before.items()))

    def outcome(self):
        weights = {name: parameter.detach().clone() for name, parameter in self.parameters.items()}
        return self.scales, self.skipped, weights, self.scaler.state_dict()


@dataclass(frozen=True)
class Case:
    """What is trained, and how."""

    make_layers: Any = make_layers
    """Of a type."""
    layer: int | None = 1
    """Whose gradient overflows."""
    accumulate: int = 1
    batch: Any = batch
    dtype: torch.dtype = torch.float32
    autocast: Any = None
    """A type of torch's."""
    clip_norm: float | None = None
    init_scale: float = 2.0**10
    make_optimizer: Any = torch.optim.AdamW

    def begin(self):
        layers = self.make_layers(self.dtype)
        overflow = None if self.layer is None else Overflow(layers[self.layer])
        return layers, overflow, make_scaler(init_scale=self.init_scale)

    def batches(self, step, overflow):
        if overflow is not None:
            overflow.step = step
        return [self.batch(step * self.accumulate + number, self.dtype) for number in range(self.accumulate)]

    def casting(self):
        return nullcontext() if self.autocast is None else torch.autocast("cpu", self.autocast)

    def clip(self, parameters, all_gather=lambda own: [own], skip=()):
        if self.clip_norm is None:
            return None
        return lambda: clip_gradients(
            [(name, parameter.grad) for name, parameter in parameters.items()], all_gather, self.clip_norm, skip=skip
        )


def run(case, parameters, overflow, scaler, take_step, *gather_and_skip):
    """Run all steps of a case by `take_step(inputs, target)`."""
    training = Training(parameters, scaler, case.make_optimizer)
    for step in range(1, STEPS + 1):
        for inputs, target in case.batches(step, overflow):
            with case.casting():
                take_step(inputs, target)
        training.update(case.clip(training.parameters, *gather_and_skip))
    return training.outcome()


def on_one_process(case):
    """What plain torch does."""
    layers, overflow, scaler = case.begin()
    model = nn.Sequential(*layers)

    def take_step(inputs, target):
        for part, wanted in zip(inputs.chunk(M), target.chunk(M), strict=True):
            scaler.scale(square_loss(model(part), wanted) * (1 / M)).backward()

    return run(case, named(layers), overflow, scaler, take_step)


def make(layer):
    return layer


def on_a_rank(wires, schedule, case):
    layers, overflow, scaler = case.begin()
    # Built by the rank, as in processes: of modules, threads would copy those of the second route, without their hooks.
    builders = [partial(make, layer) for layer in layers] if schedule == "dualpipe" else layers
    with Pipeline(builders, schedule, M, square_loss, scale_loss=scaler.scale, transport=wires) as pipeline:
        gather, skip = pipeline.control.all_gather_object, pipeline.copied_names

        def take_step(inputs, target):
            pipeline.step(inputs, target=target)

        return run(case, pipeline.named_parameters(), overflow, scaler, take_step, gather, skip)


def on_a_process(rank, schedule, case):
    return on_a_rank(None, schedule, case)


def assert_alike(found, expected, *, rtol=0.0):
    """Every rank has the scales and skipped steps of one process, and its part of the weights."""
    scales, skipped, weights, state = expected
    assert sorted({name for outcome in found for name in outcome[2]}) == sorted(weights)
    for own_scales, own_skipped, own_weights, own_state in found:
        assert own_scales == scales
        assert own_skipped in (skipped, [])  # a rank without gradients skips nothing
        assert own_state == state
        for name, weight in own_weights.items():
            torch.testing.assert_close(weight, weights[name], rtol=rtol, atol=rtol)


def skipped_steps(expected):
    return [step for step, is_skipped in enumerate(expected[1], 1) if is_skipped]


def assert_decided_as_on_one_process(case, name="1f1b", num_ranks=2, *, rtol=0.0):
    """Require scales, skipped steps and weights of one process, which skips those steps in which it overflows."""
    expected = on_one_process(case)
    assert_alike(on_ranks(num_ranks, on_a_rank, name, case), expected, rtol=rtol)
    assert skipped_steps(expected) == list(OVERFLOWS_IN)
    return expected


# ---- against one process


@pytest.mark.feature("E2", "E11")
@pytest.mark.parametrize(
    ("name", "num_ranks", "layer"),
    [
        ("1f1b", 2, 0),
        ("zbv", 2, 3),
        *(pytest.param("1f1b", num_ranks, 3, marks=pytest.mark.slow) for num_ranks in (1, 2, 4)),
        pytest.param("gpipe", 4, 0, marks=pytest.mark.slow),
        pytest.param("interleaved-1f1b", 2, 3, marks=pytest.mark.slow),
        pytest.param("zb-h1", 2, 0, marks=pytest.mark.slow),
    ],
)
def test_an_overflow_on_one_stage_is_one_decision_of_all_ranks(name, num_ranks, layer):
    scales, *_ = assert_decided_as_on_one_process(Case(layer=layer), name, num_ranks)

    assert len(set(scales)) == 3  # it grew and shrank


@pytest.mark.slow
@pytest.mark.parametrize("layer", [0, 3])
def test_both_copies_of_a_model_with_two_routes_skip_the_same_steps(layer):
    assert_decided_as_on_one_process(Case(layer=layer, dtype=torch.float64), "dualpipe", rtol=1e-12)


def test_gradients_are_clipped_by_one_norm_after_they_are_unscaled():
    expected = assert_decided_as_on_one_process(Case(clip_norm=0.05))

    assert not torch.equal(expected[2]["0.1.weight"], on_one_process(Case())[2]["0.1.weight"])


@pytest.mark.parametrize(("dtype", "num_skipped"), [(torch.float16, 8), (torch.bfloat16, 0)])
def test_under_autocast_the_scale_settles_where_it_does_on_one_process(dtype, num_skipped):
    case = Case(layer=None, autocast=dtype, init_scale=2.0**24)

    expected = on_one_process(case)

    assert_alike(on_ranks(2, on_a_rank, "1f1b", case), expected)
    assert len(skipped_steps(expected)) == num_skipped


def with_embedding(dtype):
    return [settle(nn.Embedding(VOCABULARY, WIDTH, sparse=True, dtype=dtype), 7), *make_layers(dtype)]


def with_frozen(frozen, dtype):
    layers = make_layers(dtype)
    for layer in frozen:
        layers[layer].requires_grad_(False)
    return layers


SPARSE = {"make_layers": with_embedding, "batch": tokens, "make_optimizer": partial(torch.optim.SGD, lr=0.1)}
CASES = {
    "in one of several steps": Case(layer=0, accumulate=3),
    "of a sparse table": Case(layer=0, **SPARSE),
    "behind a sparse table": Case(layer=4, **SPARSE),
    "beside a frozen first rank": Case(partial(with_frozen, (0, 1)), 3, clip_norm=0.05),
    "beside a frozen last rank": Case(partial(with_frozen, (2, 3)), 0, accumulate=2, clip_norm=0.05),
}


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_an_overflow_is_one_decision_whatever_is_trained(case):
    assert_decided_as_on_one_process(case)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["two_ranks", "four_ranks"])
def test_processes_decide_as_one(request, ranks):
    pool = request.getfixturevalue(ranks)
    for case in (Case(layer=0), Case(layer=3)):
        expected = on_one_process(case)
        for name in ("1f1b", "zb-h1"):
            assert_alike(pool.run(on_a_process, name, case), expected)


def scaled_pipeline(wires, scale, layers=None, **options):
    return Pipeline(layers or make_layers(), "1f1b", M, square_loss, scale_loss=scale, transport=wires, **options)


def take_step(pipeline, number=1):
    inputs, target = batch(number)
    pipeline.step(inputs, target=target)


def on_a_replica(rank, reduces_in_step):
    """Two pipelines of two ranks, each with batches of its own; the gradients of the second one overflow."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "pipeline"))
    replica, replicas = mesh.get_local_rank("replica"), mesh.get_group("replica")
    layers, overflow, scaler = Case(layer=0).begin()

    def reduce(parameters):
        for parameter in parameters:
            dist.all_reduce(parameter.grad, group=replicas)

    options = {"reduce_stage": lambda stage: reduce(training.parameters.values())} if reduces_in_step else {}
    pipeline = scaled_pipeline(None, scaler.scale, layers, process_group=mesh.get_group("pipeline"), **options)
    training = Training(pipeline.named_parameters(), scaler)
    for step in range(1, STEPS + 1):
        overflow.step = step if replica == 1 else 0
        take_step(pipeline, 2 * step + replica)
        if not reduces_in_step:
            reduce(training.parameters.values())
        training.update()
    return training.outcome()


@pytest.mark.slow
def test_replicas_that_sum_their_gradients_decide_as_one(four_ranks):
    for reduces_in_step in (True, False):
        first, last, *others = four_ranks.run(on_a_replica, reduces_in_step)

        assert skipped_steps(first) == list(OVERFLOWS_IN)
        assert_alike([last], (*first[:2], last[2], first[3]))
        for one, other in zip((first, last), others, strict=True):
            assert_alike([other], one)


# ---- what else ranks may do


def gradients(pipeline, attribute="grad"):
    return [getattr(parameter, attribute) for _, parameter in pipeline.named_parameters()]


def test_after_an_overflow_no_gradient_of_any_rank_is_finite():
    def run(wires):
        layers, overflow, scaler = Case().begin()
        pipeline = scaled_pipeline(wires, scaler.scale, layers, main_gradients=True)
        for overflow.step in (3, 4):
            take_step(pipeline, overflow.step)
            yield [bool(each.isfinite().any()) for each in gradients(pipeline, "main_grad")]

    for before, after in on_ranks(2, lambda wires: list(run(wires))):
        assert (set(before), set(after)) == ({True}, {False})


def test_an_optimizer_that_is_stepped_by_the_pipeline_skips_as_well():
    case = Case()
    expected = on_one_process(case)

    def run(wires):
        layers, overflow, scaler = case.begin()
        pipeline = scaled_pipeline(wires, scaler.scale, layers, optimizer_step=lambda: training.update())
        training = Training(pipeline.named_parameters(), scaler)
        for step in range(1, STEPS + 1):
            ((inputs, target),) = case.batches(step, overflow)
            pipeline.step(inputs, target=target)
        return training.outcome()

    assert_alike(on_ranks(2, run), expected)


def test_a_disabled_scaler_does_nothing():
    def run(wires):
        pipelines = [scaled_pipeline(wires, scale) for scale in (make_scaler(enabled=False).scale, None)]
        for pipeline in pipelines:
            take_step(pipeline)
        assert pipelines[0].program == pipelines[1].program
        return [gradients(pipeline) for pipeline in pipelines]

    for with_scaler, without in on_ranks(2, run):
        assert all(map(torch.equal, with_scaler, without))


def test_a_scale_that_one_rank_changed_is_refused_before_the_step_and_can_be_put_right():
    def run(wires):
        scaler = make_scaler()
        pipeline = scaled_pipeline(wires, scaler.scale)
        if wires.rank == 1:
            scaler.update(3.0)
        error = error_of(take_step, pipeline)
        pipeline.evaluate(batch(1)[0])
        is_untouched = gradients(pipeline) == [None] * len(gradients(pipeline))
        scaler.update(3.0)
        take_step(pipeline)
        return error, is_untouched

    for error, is_untouched in on_ranks(2, run):
        assert isinstance(error, StepRefused)
        assert (error.rank, is_untouched) == (1, True)
        assert str(error).startswith(
            "the ranks disagree on scale: rank 0 has 1024.0, rank 1 has 3.0. It is that of the "
        )


def test_a_mean_over_steps_is_a_method_of_a_scaler_of_your_own():
    class MeanScaler(GradScaler):
        def scale_mean(self, loss):
            return self.scale(loss) / 2

    def run(wires):
        scaler = MeanScaler("cpu", init_scale=8.0)
        pipeline, plain = scaled_pipeline(wires, scaler.scale_mean), scaled_pipeline(wires, 0.5)
        take_step(pipeline)
        take_step(plain)
        scaler.unscale_(torch.optim.SGD(dict(pipeline.named_parameters()).values()))
        scaler.update()
        return gradients(pipeline), gradients(plain)

    for found, wanted in on_ranks(2, run):
        assert all(map(torch.equal, found, wanted))
