"""An optimizer step: accumulated, clipped, applied; refused where numbers are not finite."""

import math
import time

import pytest
import torch
from torch import nn

from penstock.errors import NotFinite
from penstock.execute.batch.stream import Stream
from penstock.execute.observing.clock import Clock
from penstock.execute.stages.gradient_norm import clip_gradients
from penstock.models import AuxiliaryLoss, LayerSpec, count_target_tokens, cross_entropy_loss
from penstock.models.decoder import IGNORED_TARGET
from penstock.simulation.prologue import with_first_waits
from penstock.train.optimizing.optim import build_optimizer
from penstock.train.optimizing.precision import LossScaler
from penstock.train.settings.sections import OptimizerSection
from penstock.train.settings.steps import learning_rate_at
from penstock.train.step import Trainer, mean_loss, scale_over
from tests.support.local_pipelines import error_of, on_ranks
from tests.support.mesh_pipelines import on_mesh
from tests.support.reference import reference_step
from tests.train.local_ranks import on_small_pipelines, random_batch, small_layers, small_pipeline

OPTIONS = OptimizerSection(learning_rate=1e-2, warmup_steps=4, clip_norm=0.5)
NUM_STEPS = 10


def trainer_of(pipeline):
    return Trainer(pipeline, OPTIONS, num_steps=NUM_STEPS)


def train(num_ranks, batches_of_steps, num_batches=1, layers=None, **options):
    """Train with steps of `num_batches`; return each rank's outcomes, weights and pipeline."""

    def case(pipeline):
        trainer = trainer_of(pipeline)
        outcomes = [trainer.step(number, batches) for number, batches in enumerate(batches_of_steps, start=1)]
        return outcomes, {name: parameter.detach() for name, parameter in pipeline.named_parameters()}, pipeline

    scale = scale_over(num_batches)
    return on_small_pipelines(num_ranks, case, layers or small_layers("float64"), scale_loss=scale, **options)


@pytest.mark.feature("A16", "E15", "E6", "E10")
def test_the_loss_falls_every_rank_is_told_the_same_and_no_gradient_stays_behind():
    (outcomes, _, pipeline), (others, _, other) = train(2, [[random_batch(0)]] * 8)

    assert outcomes == others
    assert all(parameter.grad is None for parameter in (*pipeline.parameters(), *other.parameters()))
    assert outcomes[-1].loss < outcomes[0].loss - 0.1
    assert [outcome.learning_rate for outcome in outcomes] == [
        learning_rate_at(n, OPTIONS, NUM_STEPS) for n in range(1, 9)
    ]


@pytest.mark.feature("E10")
@pytest.mark.parametrize("clip_norm", [0.5, 0.0], ids=["clipped", "not clipped"])
def test_no_rank_of_any_replica_changes_a_weight_before_all_have_their_gradients(clip_norm):
    events = []

    def case(places):
        with small_pipeline(None, small_layers("float64"), mesh=places) as pipeline:
            trainer = Trainer(pipeline, OPTIONS.model_copy(update={"clip_norm": clip_norm}), num_steps=NUM_STEPS)
            trainer.update.optimizer.register_step_pre_hook(lambda *call: events.append("update"))
            tokens, target = random_batch(pipeline.replica)
            for _ in range(2):
                pipeline.step(tokens, target=target)
                if (pipeline.replica, pipeline.rank) == (1, 0):
                    time.sleep(0.05)
                events.append("ready")
                trainer.update.measure()
                trainer.update.apply(0.01)
            assert all(parameter.grad is None for parameter in pipeline.parameters())
            return {name: parameter.detach() for name, parameter in pipeline.named_parameters()}

    weights = on_mesh(2, 2, case)

    # A rank may be in its second step while others still finish the first, but never two optimizer steps ahead.
    for index in (index for index, event in enumerate(events) if event == "update"):
        num_updated = events[:index].count("update")
        assert events[:index].count("ready") >= 4 * (num_updated // 4 + 1)
    for first, second in zip(weights[:2], weights[2:], strict=True):
        assert all(torch.equal(first[name], second[name]) for name in first)


def steps_and_evaluation(device, place):
    """Train two batches, evaluate a third, and return the losses."""
    torch.manual_seed(0)
    pipeline = small_pipeline(None, device=device)
    trainer = trainer_of(pipeline)
    batches = [tuple(tensor.to(place) for tensor in random_batch(seed)) for seed in range(3)]
    found = [trainer.step(number, [batch]).loss for number, batch in enumerate(batches[:2], start=1)]
    return [*found, mean_loss(pipeline, batches[2:])]


def host_batches_train_as_those_of_the_device(device):
    assert steps_and_evaluation(device, "cpu") == steps_and_evaluation(device, device)


def test_batches_in_the_memory_of_the_host_train_and_are_evaluated_on_a_device(on_device):
    on_device(host_batches_train_as_those_of_the_device)


class Balanced(nn.Module):
    """A layer that wants its scores small, and reports how large they are."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(5)
        self.router = nn.Linear(16, 16, dtype=torch.float64)
        self.z_loss, self.largest = AuxiliaryLoss("z_loss", weight=0.5), AuxiliaryLoss("largest", weight=0.0)

    def forward(self, features):
        scores = self.router(features)
        self.z_loss.add(scores.logsumexp(-1).square().mean())
        self.largest.add(scores.max())
        return features + scores


def balanced_layers():
    embedding, first, *others = small_layers("float64")
    return [embedding, first, LayerSpec("balanced", Balanced), *others]


def named_cross_entropy(logits, target):
    return {"cross_entropy": cross_entropy_loss(logits, target), "square": 0.01 * logits.square().mean()}


def train_on_the_mean_plainly(batches_of_steps):
    """One process, one microbatch after another; gradients and losses of the batches are divided by their number."""
    layers = balanced_layers()
    modules = [layer() for layer in layers]
    pairs = list(zip(layers, modules, strict=True))
    named = [(f"{layer.name}.{key}", value) for layer, module in pairs for key, value in module.named_parameters()]
    optimizer = build_optimizer(named, OPTIONS)
    told = []
    for number, batches in enumerate(batches_of_steps, start=1):
        results = [
            reference_step(modules, (tokens,), {}, target, loss=named_cross_entropy, num_microbatches=4)
            for tokens, target in batches
        ]
        for _, parameter in named:
            parameter.grad /= len(batches)
        norm = clip_gradients([(name, parameter.grad) for name, parameter in named], lambda own: [own], 0.5)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate_at(number, OPTIONS, NUM_STEPS)
        optimizer.step()
        optimizer.zero_grad()
        names = results[0].named_losses
        means = {name: sum(each.named_losses[name].item() for each in results) / len(results) for name in names}
        told.append((sum(each.loss.item() for each in results) / len(results), norm, means))
    return told, {name: parameter.detach() for name, parameter in named}


@pytest.mark.feature("0.15")
@pytest.mark.parametrize("num_batches", [3])
def test_losses_that_layers_add_are_trained_and_told_as_their_mean_over_the_batches_too(num_batches):
    batches = [[random_batch(num_batches * step + index) for index in range(num_batches)] for step in range(2)]

    told, expected = train_on_the_mean_plainly(batches)
    results = train(2, batches, num_batches, balanced_layers(), loss=named_cross_entropy)

    assert {name for _, weights, _ in results for name in weights} == set(expected)
    for outcomes, weights, _ in results:
        for outcome, (loss, norm, means) in zip(outcomes, told, strict=True):
            assert (outcome.loss, outcome.gradient_norm) == pytest.approx((loss, norm), abs=1e-12)
            assert outcome.named_losses == pytest.approx(means, abs=1e-12)
            assert set(means) == {"cross_entropy", "square", "z_loss", "largest"}
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-10)


class LateBatches:
    """Batches that take a while of a clock that only they move."""

    def __init__(self, now_s, duration_s):
        self.now_s = now_s
        self.duration_s = duration_s

    def __len__(self):
        return 2

    def __getitem__(self, index):
        self.now_s[0] += self.duration_s[index]
        return random_batch(index)


def recorded_late(make_batches, num_batches, durations_s_by_rank):
    """Record a step of two ranks, whose clocks are one for the program and go on only while a rank loads."""

    def case(transport):
        now_s = [100.0]
        options = {"clock": Clock(lambda: now_s[0], "one host"), "scale_loss": scale_over(num_batches)}
        with small_pipeline(transport, **options) as pipeline:
            batches = make_batches(now_s, durations_s_by_rank[transport.rank])
            return trainer_of(pipeline).step(3, batches, record=True)

    return on_ranks(2, case)


def test_a_recorded_step_tells_how_long_each_rank_waited_for_the_last_batch():
    outcomes = recorded_late(LateBatches, 2, [[16.0, 0.5], [16.0, 4.0]])
    assert [outcome.data_wait_s for outcome in outcomes] == [16.5, 20.0]
    for recorded in (outcome.recorded for outcome in outcomes):
        assert recorded.step == 3
        assert [lead_in.data_s for lead_in in recorded.prologues] == [0.5, 4.0]
        assert recorded.prologues[0].asked_s == 0  # its clock stood still from there to the recorded step
        assert [lead_in.loaded_s for lead_in in recorded.prologues] == [lead.asked_s for lead in recorded.prologues]
        assert recorded.layers_of_stage == (range(3), range(3, 7))
        assert len(recorded.layer_weights) == 7
        assert recorded.message_bytes == (2 * 8 * 16 * 4, 0)


def stream_items(batch):
    return list(zip(*(part.chunk(4) for part in batch), strict=True))


def test_a_batch_may_come_as_a_stream_and_gives_the_same_step():
    batches = [[random_batch(2 * step + index) for index in range(2)] for step in range(2)]

    [(whole, expected, _)] = train(1, batches, 2)
    [(streamed, found, _)] = train(1, [[Stream(stream_items(batch)) for batch in each] for each in batches], 2)

    assert streamed == whole
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_recorded_step_tells_how_long_each_rank_waited_for_which_microbatch_of_a_stream():
    def late_stream(now_s, durations_s):
        def items():
            for pair, duration_s in zip(stream_items(random_batch(0)), durations_s, strict=True):
                now_s[0] += duration_s
                yield pair

        return [Stream(items())]

    outcomes = recorded_late(late_stream, 1, [[16.0, 8.0, 4.0, 2.0], [16.0, 0.5, 0.25, 0.125]])
    assert [outcome.data_wait_s for outcome in outcomes] == [30.0, 16.875]
    for recorded in (outcome.recorded for outcome in outcomes):
        waits = recorded.data_waits
        assert [lead_in.data_s for lead_in in recorded.prologues] == [0.0, 0.0]
        assert [(wait.rank, wait.microbatch) for wait in waits] == [
            (rank, each) for rank in (0, 1) for each in range(4)
        ]
        assert [wait.end_s - wait.begin_s for wait in waits] == [16.0, 8.0, 4.0, 2.0, 16.0, 0.5, 0.25, 0.125]
        assert waits[0].begin_s == recorded.prologues[0].asked_s
        assert [lead_in.data_s for lead_in in with_first_waits(recorded, recorded.prologues)] == [16.0, 16.0]


@pytest.mark.feature("X41")
@pytest.mark.parametrize(
    ("value", "where", "what"), [(math.inf, "loss", "the loss"), (math.nan, "gradient", "the gradient norm")]
)
def test_numbers_that_are_not_finite_stop_every_rank_and_change_no_weight(value, where, what):
    def loss(logits, target):
        return cross_entropy_loss(logits, target) * value if where == "loss" else spoil(logits, target)

    def spoil(logits, target):
        logits.register_hook(lambda gradient: gradient * value)
        return cross_entropy_loss(logits, target)

    def case(pipeline):
        before = {name: parameter.clone() for name, parameter in pipeline.named_parameters()}
        error = error_of(trainer_of(pipeline).step, 3, [random_batch(0)])
        assert all(parameter.equal(before[name]) for name, parameter in pipeline.named_parameters())
        return error

    errors = on_small_pipelines(2, case, loss=loss)

    assert all(type(error) is NotFinite for error in errors)
    assert len({str(error) for error in errors}) == 1
    assert str(errors[0]).startswith(f"step 3: {what} is ")
    assert "lower optimizer.learning_rate" in str(errors[0])
    assert "or lower optimizer.clip_norm, which is 0.5" in str(errors[0])


def ragged_batch(seed, lengths):
    tokens, target = random_batch(seed)
    for row, length in zip(target, lengths, strict=True):
        row[length:] = IGNORED_TARGET
    return tokens, target


LENGTHS = [8, 1, 3, 8, 2, 5, 0, 4], [1, 1, 1, 1, 2, 2, 2, 2]


def train_ragged(transport, schedule, microbatches, slices=1):
    scaler = LossScaler(enabled=False)
    pipeline = small_pipeline(
        transport,
        small_layers("float64"),
        schedule=schedule,
        microbatches=microbatches,
        count=count_target_tokens,
        scale_loss=scaler.scale_mean,
        **({"slices": slices} if slices > 1 else {}),
    )
    trainer, outcomes = trainer_of(pipeline), []
    for step in range(2):
        batches = [ragged_batch(2 * step + index, lengths) for index, lengths in enumerate(LENGTHS)]
        counts = [sum(lengths) for lengths in LENGTHS]
        outcomes.append(trainer.step(step + 1, batches, shares=[each / sum(counts) for each in counts]))
    weights = {name: value.clone() for name, value in pipeline.state_dict().items()}
    pipeline.close()
    return [outcome.loss for outcome in outcomes], weights, outcomes[0].gradient_norm


def test_a_step_of_uneven_batches_is_that_of_the_mean_over_all_tokens_for_any_split():
    [(losses, weights, norm)] = on_ranks(1, train_ragged, "gpipe", 1)
    modules = torch.nn.Sequential(*(layer() for layer in small_layers("float64")))
    parts = [ragged_batch(index, lengths) for index, lengths in enumerate(LENGTHS)]
    both = [torch.cat(each) for each in zip(*parts, strict=True)]
    expected = cross_entropy_loss(modules(both[0]), both[1])
    expected.backward()
    gradients = torch.cat([parameter.grad.flatten() for parameter in modules.parameters()])
    assert losses[0] == pytest.approx(expected.item(), rel=1e-12)
    assert norm == pytest.approx(gradients.norm().item(), rel=1e-9)

    for num_ranks, schedule, microbatches, slices in [
        (2, "zbv", 4, 1),
        (3, "gpipe", 2, 1),
        (2, "seq1f1b", 4, 2),
    ]:
        found = on_ranks(num_ranks, train_ragged, schedule, microbatches, slices)
        assert found[0][0] == pytest.approx(losses, rel=1e-12)
        for _, others, _ in found:
            assert all(torch.allclose(weights[name], others[name], rtol=1e-9, atol=1e-12) for name in others)


def evaluate(num_ranks, batches, weights=None):
    def case(pipeline):
        before = {name: parameter.clone() for name, parameter in pipeline.named_parameters()}
        loss = mean_loss(pipeline, batches, weights)
        for name, parameter in pipeline.named_parameters():
            assert parameter.grad is None
            assert parameter.equal(before[name])
        return loss

    return on_small_pipelines(num_ranks, case)


@pytest.mark.feature("X40")
def test_the_loss_is_the_mean_over_the_batches_by_their_weights_on_every_rank():
    batches = [random_batch(seed) for seed in range(3)]

    [first], [second], [third] = (evaluate(1, [batch]) for batch in batches)
    losses = evaluate(2, batches)

    assert losses[0] == losses[1] == pytest.approx((first + second + third) / 3, rel=1e-12)
    assert evaluate(1, batches[:2], [1.0, 3.0]) == [pytest.approx((first + 3 * second) / 4, rel=1e-12)]
    assert first != second


def logged(caplog, which):
    """The lines of one step of two ranks with a tied head."""

    def case(pipeline):
        trainer = Trainer(pipeline, OPTIONS, num_steps=NUM_STEPS, norms=which)
        trainer.step(1, [random_batch(0)])
        return pipeline.norms(), list(dict(pipeline.named_parameters())), dict(pipeline.owner_names)

    caplog.clear()
    with caplog.at_level("INFO", "penstock"):
        ranks = on_small_pipelines(2, case, small_layers("float64", tied_head=True))
    return ranks, [line for line in caplog.messages if ": norm " in line]


@pytest.mark.feature("H9")
def test_norms_of_gradients_are_logged_before_an_update_and_those_of_parameters_after_it(caplog):
    ranks, lines = logged(caplog, "all")

    norms, names = ranks[0][0], [*ranks[0][1], *(name for name in ranks[1][1] if name not in ranks[1][2])]
    assert list(norms) == names
    texts = [line.rpartition(" ")[0] for line in lines]
    assert texts == [f"step 1: {kind} {name}: norm" for kind in ("gradient of", "parameter") for name in names]
    after = {line.split()[3][:-1]: float(line.split()[-1]) for line in lines if " parameter " in line}
    assert after == pytest.approx(norms, rel=1e-5)
    clipped = [float(line.split()[-1]) for line in lines if " gradient of " in line]
    assert math.hypot(*clipped) == pytest.approx(OPTIONS.clip_norm, rel=1e-5)


@pytest.mark.feature("H9")
def test_local_norms_are_those_that_each_rank_holds_and_off_logs_none(caplog):
    ranks, lines = logged(caplog, "local")

    for rank, (_, names, _) in enumerate(ranks):
        texts = [line.rpartition(" ")[0] for line in lines if line.startswith(f"rank {rank}, ")]
        kinds = ("gradient of", "parameter")
        assert texts == [f"rank {rank}, step 1: {kind} {name}: norm" for kind in kinds for name in names]
    assert logged(caplog, "off")[1] == []
