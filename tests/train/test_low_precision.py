"""Training in low precision on several ranks is plain training in one process in the same precision, bit for bit."""

import math
from functools import cache

import pytest
import torch
from torch import nn

from penstock.checkpoints.optimizer_state import MAIN_WEIGHT
from penstock.execute.stages.gradient_norm import clip_gradients
from penstock.models import cross_entropy_loss, embedding_names
from penstock.train.optimizing.optim import build_optimizer
from penstock.train.optimizing.precision import Precision, loss_scaler
from penstock.train.settings.sections import OptimizerSection, PrecisionSection
from penstock.train.settings.steps import learning_rate_at
from penstock.train.step import Trainer
from tests.support.local_pipelines import on_ranks
from tests.train.local_ranks import random_batch, small_layers, small_pipeline

NUM_STEPS = 6
M = 4
CPU = torch.device("cpu")
OPTIONS = OptimizerSection(learning_rate=1e-2, warmup_steps=2, clip_norm=0.5)
LARGE_SCALE = {"loss_scale": 2.0**24, "loss_scale_growth_steps": 2}
"""So large that the first steps overflow."""
SECTIONS = {
    "bfloat16": PrecisionSection(compute="bfloat16"),
    "float16": PrecisionSection(compute="float16", **LARGE_SCALE),
    "autocast": PrecisionSection(compute="bfloat16", autocast=True),
    "autocast float16": PrecisionSection(compute="float16", autocast=True, **LARGE_SCALE),
}
CASES = {name: Precision(section) for name, section in SECTIONS.items()}
SCHEDULES = [("1f1b", 1), ("1f1b", 2), ("gpipe", 4), ("interleaved-1f1b", 2), ("zbv", 2)]
OTHERS = ["looped-bfs", "zb-h1", "zb-h2", "v-half", "hanayo", "interleaved-zb", "dualpipe-v"]
RUNS = [
    ("bfloat16", "1f1b", 2, 3),
    ("float16", "zbv", 2, 1),
    ("autocast", "gpipe", 4, 1),
    ("autocast float16", "interleaved-1f1b", 2, 1),
]
"""Cases with a schedule, a number of ranks, and the batches of a step, of which it takes the mean."""


MORE_RUNS = [
    *((case, *schedule, 1) for case in ("bfloat16", "float16") for schedule in SCHEDULES),
    *(("bfloat16", family, 2, 1) for family in OTHERS),
    ("float16", "1f1b", 2, 3),
]
SLOW_RUNS = [pytest.param(*run, marks=pytest.mark.slow) for run in MORE_RUNS if run not in RUNS]


def batches_of(number, num_batches):
    return [random_batch(number * num_batches + index) for index in range(num_batches)]


def train(transport, precision, schedule, num_batches=1, options=OPTIONS):
    pipeline = small_pipeline(
        transport,
        precision.cast(small_layers()),
        schedule=schedule,
        microbatches=M,
        main_gradients=precision.has_main_weights,
        scale_loss=loss_scaler(precision, CPU).scale_mean,
    )
    trainer = Trainer(pipeline, options, num_steps=NUM_STEPS, precision=precision)
    outcomes = []
    for number in range(1, NUM_STEPS + 1):
        outcome = trainer.step(number, batches_of(number, num_batches))
        outcomes.append((outcome.loss, outcome.gradient_norm, outcome.is_updated, outcome.loss_scale))
    held_out = trainer.evaluate([random_batch(1000)])
    pipeline.close()
    state = trainer.update.optimizer.state
    weights = {name: parameter.detach() for name, parameter in pipeline.named_parameters()}
    mains = {name: state[parameter].get(MAIN_WEIGHT) for name, parameter in pipeline.named_parameters()}
    return outcomes, held_out, weights, mains


class Plain:
    """One process and torch alone: float32 copies and sums of gradients by hand, torch's own GradScaler."""

    def __init__(self, precision, section=OPTIONS):
        self.precision = precision
        self.section = section
        layers = {layer.name: layer() for layer in precision.cast(small_layers())}
        self.model = nn.Sequential(*layers.values())
        self.parameters = {
            f"{layer}.{name}": parameter
            for layer, module in layers.items()
            for name, parameter in module.named_parameters()
        }
        self.mains = {name: nn.Parameter(parameter.detach().float()) for name, parameter in self.parameters.items()}
        self.optimizer = build_optimizer(self.mains.items(), section)
        options = precision.options
        self.scaler = torch.amp.GradScaler(
            "cpu",
            init_scale=options.loss_scale,
            growth_interval=options.loss_scale_growth_steps,
            enabled=precision.scales_losses,
        )

    def step(self, number, batches):
        scale = self.scaler.get_scale() if self.precision.scales_losses else None
        sums, losses = dict.fromkeys(self.mains), []
        for tokens, target in batches:
            with self.precision.region(CPU):
                losses.append(self.run(tokens, target, len(batches), sums))
        for name, main in self.mains.items():
            main.grad = sums[name]
        self.scaler.unscale_(self.optimizer)
        norm = clip_gradients([(name, main.grad) for name, main in self.mains.items()], lambda own: [own], 0.5)
        for group in self.optimizer.param_groups:
            group["lr"] = learning_rate_at(number, self.section, NUM_STEPS)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        with torch.no_grad():
            for name, parameter in self.parameters.items():
                parameter.copy_(self.mains[name])
        is_finite = math.isfinite(norm)
        # Where one gradient overflows, all ranks set theirs to NaN.
        return sum(losses) / len(losses), norm if is_finite else math.nan, is_finite, scale

    def run(self, tokens, target, num_batches, sums):
        total = torch.zeros(())
        for inputs, wanted in zip(tokens.chunk(M), target.chunk(M), strict=True):
            loss = cross_entropy_loss(self.model(inputs), wanted)
            scaled = self.scaler.scale(loss * (1 / M))
            (scaled if num_batches == 1 else scaled * (1 / num_batches)).backward()
            total = total + loss.detach() * (1 / M)
            for name, parameter in self.parameters.items():
                gradient = parameter.grad.float()
                sums[name] = gradient if sums[name] is None else sums[name] + gradient
                parameter.grad = None
        return total.item()


@cache
def train_plainly(case, num_batches=1, *, is_gentle=False):
    plain = Plain(CASES[case], GENTLE if is_gentle else OPTIONS)
    return [plain.step(number, batches_of(number, num_batches)) for number in range(1, NUM_STEPS + 1)], plain


def assert_same(results, expected, plain):
    found = {name: weight for _, _, weights, _ in results for name, weight in weights.items()}
    mains = {name: main for *_, mains in results for name, main in mains.items()}
    assert found.keys() == plain.parameters.keys()
    for outcomes, held_out, _, _ in results:
        assert str(outcomes) == str(expected)  # as texts, since NaN equals nothing
        assert held_out == results[0][1]
    for name, parameter in plain.parameters.items():
        if not plain.precision.has_main_weights:
            parameter, mains[name] = plain.mains[name], found[name]
        assert torch.equal(found[name], parameter)
        assert torch.equal(mains[name], plain.mains[name])


@pytest.mark.feature("E11", "E15")
@pytest.mark.parametrize(("case", "schedule", "num_ranks", "num_batches"), [*RUNS, *SLOW_RUNS])
def test_schedules_and_ranks_change_no_bit(case, schedule, num_ranks, num_batches):
    expected, plain = train_plainly(case, num_batches)

    assert_same(on_ranks(num_ranks, train, CASES[case], schedule, num_batches), expected, plain)

    num_updated = sum(is_updated for _, _, is_updated, _ in expected)
    assert (0 < num_updated < NUM_STEPS) if CASES[case].scales_losses else num_updated == NUM_STEPS


@pytest.mark.parametrize("case", ["bfloat16", "float16"])
def test_copies_of_a_tied_weight_and_their_main_weights_stay_equal(case):
    precision = CASES[case]

    def train_tied(transport):
        pipeline = small_pipeline(
            transport,
            precision.cast(small_layers(tied_head=True)),
            microbatches=M,
            main_gradients=True,
            scale_loss=loss_scaler(precision, CPU).scale_mean,
        )
        embeddings = embedding_names(small_layers(tied_head=True))
        options = OPTIONS.model_copy(update={"decay_embeddings": False})
        trainer = Trainer(pipeline, options, num_steps=NUM_STEPS, precision=precision, embeddings=embeddings)
        updated = [trainer.step(number, batches_of(number, 1)).is_updated for number in range(1, NUM_STEPS + 1)]
        pipeline.close()
        name = "head.weight" if transport.rank else "embedding.weight"
        parameter, optimizer = dict(pipeline.named_parameters())[name], trainer.update.optimizer
        decays = [group["weight_decay"] for group in optimizer.param_groups if name in group["param_names"]]
        return parameter.detach(), optimizer.state[parameter][MAIN_WEIGHT], any(updated), decays

    (embedding, main, is_updated, decays), (head, other, *_, head_decays) = on_ranks(2, train_tied)

    assert torch.equal(embedding, head)
    assert torch.equal(main, other)
    assert is_updated
    assert decays == head_decays == [0.0]


TWO_ROUTES = {"dualpipe": 2, "chimera": 4}
GENTLE = OptimizerSection(name="SGD", options={"momentum": 0.9}, learning_rate=0.05, warmup_steps=2, clip_norm=0.5)
"""AdamW would turn a rounded gradient near zero into a step of full size."""


@pytest.mark.parametrize(
    ("schedule", "case"),
    [("dualpipe", "float16"), *(pytest.param("chimera", case, marks=pytest.mark.slow) for case in CASES)],
)
def test_two_copies_end_equal_and_near_one_process(schedule, case):
    """Each copy sums its own microbatches first, so that only rounding is another one."""
    expected, plain = train_plainly(case, is_gentle=True)

    results = on_ranks(TWO_ROUTES[schedule], train, CASES[case], schedule, 1, GENTLE)

    for outcomes, held_out, weights, mains in results:
        assert str(outcomes) == str(results[0][0])
        assert held_out == results[0][1]
        for _, _, others, other_mains in results:
            for name in weights.keys() & others.keys():
                assert torch.equal(weights[name], others[name])
                assert mains[name] is None or torch.equal(mains[name], other_mains[name])
        for name in weights:
            found = weights[name] if mains[name] is None else mains[name]
            torch.testing.assert_close(found, plain.mains[name], rtol=0, atol=1e-6)
    for (loss, norm, *found), (loss_alone, norm_alone, *others) in zip(results[0][0], expected, strict=True):
        assert found == others
        assert loss == pytest.approx(loss_alone, rel=1e-5)
        assert norm == pytest.approx(norm_alone, rel=1e-5, nan_ok=True)
    assert sum(len(weights) for _, _, weights, _ in results) == 2 * len(plain.parameters), "two copies"
