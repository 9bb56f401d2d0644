"""Pipelines of compiled layers train as one process does, and under split backwards their weight gradients wait."""

import json
import os
import time
from collections import Counter

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from penstock.errors import DeadlineExceeded, PeerLost
from penstock.execute.parameters.gradient_store import GradientStore
from penstock.execute.split.deferred_weights import DeferredWeights
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.house.source import ROOT
from tests.support.inductor import skip_without_inductor
from tests.support.local_pipelines import (
    NEARLY,
    Task,
    difference,
    error_of,
    gradients_of,
    named,
    outcome_of,
    settle,
    square_loss,
    values,
    visits_in_order,
)
from tests.support.ranks import RankPool, run_ranks, run_ranks_with_deaths
from tests.support.tiny_run import fork_training, write_tiny_run

NUM_MICROBATCHES, NUM_LAYERS, WIDTH, ROWS = 6, 8, 32, 24
SPLIT = ("zb-h1", "zbv", "interleaved-zb", "dualpipe-v")
OFTEN = {("zb-h1", "inductor"), ("zbv", "aot_eager"), ("dualpipe-v", "aot_eager")}
SPLIT_BY = [
    pytest.param(family, backend, marks=() if (family, backend) in OFTEN else pytest.mark.full)
    for family in SPLIT
    for backend in ("aot_eager", "inductor")
]
DEADLINE_S, COMPILE_S = 2.0, 5.0


class Block(nn.Module):
    """A norm, two products, a skip past them."""

    def __init__(self, dtype=torch.float64):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH, dtype=dtype)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH, dtype=dtype), nn.Linear(4 * WIDTH, WIDTH, dtype=dtype)

    def forward(self, features):
        return features + self.down(F.gelu(self.up(self.norm(features))))


def blocks(num_layers=NUM_LAYERS):
    return [settle(Block(), seed) for seed in range(num_layers)]


def tied_blocks():
    layers = blocks()
    layers[-1].up.weight = layers[0].up.weight
    return layers


def compiled(make_layers, backend):
    """Return layers that are compiled in this process, for a reference in it."""
    layers = make_layers()
    for layer in layers:
        layer.compile(backend=backend)
    return layers


def batch(rows=ROWS, seed=1):
    return values(seed, rows, WIDTH, dtype=torch.float64), values(seed + 1, rows, WIDTH, dtype=torch.float64)


class Shares(Counter):
    """Elements of matrices whose gradients were added in I, in W, and in whole backwards."""

    def watch(self, pipeline, monkeypatch):
        self.now = "whole"

        def noting(part, own):
            def run(*args):
                self.now = part
                own(*args)
                self.now = "whole"

            return run

        for part, kind, name in (("I", DeferredWeights, "backward_input"), ("W", GradientStore, "add")):
            monkeypatch.setattr(kind, name, noting(part, getattr(kind, name)))
        for parameter in pipeline.parameters():
            if parameter.dim() > 1:
                parameter.register_post_accumulate_grad_hook(lambda own: self.update({self.now: own.numel()}))


def train(rank, make_layers, backend, schedule, steps, options):
    """Run steps on batches of these rows, then an evaluation; return the outcome, the shares and the evaluation."""
    shares = Shares()
    pipeline = Pipeline(
        make_layers(), schedule, loss=square_loss, compile=backend, deadline_s=60, **{"allow_ragged": True} | options
    )
    for stage in pipeline.stages:
        stage.split_planner._border = 0  # the blocks of this test are small
    with pytest.MonkeyPatch.context() as monkeypatch:
        shares.watch(pipeline, monkeypatch)
        for rows in steps:
            inputs, target = batch(rows)
            result = pipeline.step(inputs, target=target)
    inputs, target = batch()
    evaluated = pipeline.evaluate(inputs, target=target).loss
    outcome = outcome_of(pipeline, result)
    pipeline.close()
    return outcome, Counter(shares), evaluated


def reference(layers, steps, **options):
    """Accumulate the gradients of these batches in this process; return the last result and the gradients."""
    for rows in steps:
        inputs, target = batch(rows)
        task = Task(lambda: layers, (inputs,), target, options={"allow_ragged": True, **options})
        result, _ = task.reference(NUM_MICROBATCHES)
    return result, gradients_of(named(layers))


@pytest.fixture(scope="module")
def two_ranks():
    with RankPool(2) as pool:
        yield pool


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    yield
    torch.compiler.reset()


def built(family):
    return build(family, ranks=2, microbatches=NUM_MICROBATCHES)


@pytest.mark.feature("X52")
@pytest.mark.slow
@pytest.mark.parametrize(("family", "backend"), SPLIT_BY)
def test_split_backwards_of_compiled_layers_are_whole_ones_bit_for_bit(two_ranks, family, backend):
    if backend == "inductor":
        skip_without_inductor()
    schedule, steps = built(family), [ROWS, ROWS]
    found = two_ranks.run(train, blocks, backend, schedule, steps, {})
    outcomes = [outcome for outcome, _, _ in found]

    exact = None if visits_in_order(schedule) else 1e-12
    assert difference(outcomes, reference(compiled(blocks, backend), steps), tolerance=exact) == []
    assert difference(outcomes, reference(blocks(), steps), **NEARLY) == []
    assert all(shares["W"] >= 0.95 * (shares["W"] + shares["I"]) > 0 for _, shares, _ in found)
    inputs, target = batch()
    expected = square_loss(nn.Sequential(*blocks())(inputs), target)
    assert all(torch.allclose(loss, expected.detach(), rtol=1e-12) for _, _, loss in found)


def test_tied_weights_of_compiled_layers_get_the_sum_over_their_uses(two_ranks):
    for family in ("zb-h1", "zbv"):  # on two ranks, and on one
        found = two_ranks.run(train, tied_blocks, "aot_eager", built(family), [ROWS], {})

        for outcome, _, _ in found:
            wanted = reference(tied_blocks(), [ROWS])[1]
            gradients = outcome.gradients | {
                "0.up.weight": outcome.gradients.pop(
                    f"{NUM_LAYERS - 1}.up.weight", outcome.gradients.get("0.up.weight")
                )
            }
            for name, gradient in gradients.items():
                assert gradient is None or torch.allclose(gradient, wanted[name], rtol=1e-12, atol=1e-12), name


# ---- deadlines


def compile_slowly(rank, slow_rank):
    """Two steps, in the first of which one rank compiles for longer than the deadline; then one in which rank 1 hangs.

    It hangs until rank 0 has given up.
    """

    def slow(module, examples):
        time.sleep(COMPILE_S)
        return module.forward

    def loss(output, target):
        if is_hanging:
            store.wait([given_up])
        return square_loss(output, target)

    is_hanging, store, given_up = False, dist.group.WORLD.get_group_store(), f"given up beside {slow_rank}"
    layers = blocks(2)
    layers[slow_rank].compile(backend=slow)
    pipeline = Pipeline(layers, "1f1b", 2, loss, deadline_s=DEADLINE_S)
    inputs, target = batch(4)
    losses = [pipeline.step(inputs, target=target).loss.item() for _ in range(2)]
    is_hanging = rank == 1
    error = error_of(pipeline.step, inputs, target=target)
    if rank == 0:
        store.set(given_up, "")
    pipeline.close()
    return losses, type(error), str(error)


@pytest.mark.feature("X52")
@pytest.mark.slow
@pytest.mark.parametrize("slow_rank", [0, 1])
def test_ranks_wait_for_a_compilation_beyond_the_deadline_and_find_a_hang_within_it(two_ranks, slow_rank):
    first, second = two_ranks.run(compile_slowly, slow_rank, timeout_s=90)

    assert first[0] == second[0]
    assert first[1] is DeadlineExceeded
    assert "rank 1 is the culprit" in first[2]


def die_compiling(rank):
    def dying(module, examples):
        time.sleep(1)
        os._exit(3)

    layers = blocks(2)
    if rank == 1:
        layers[1].compile(backend=dying)
    pipeline = Pipeline(layers, "1f1b", 2, square_loss, deadline_s=60)
    inputs, target = batch(4)
    begin_s = time.monotonic()
    error = error_of(pipeline.step, inputs, target=target)
    return type(error), str(error), time.monotonic() - begin_s


@pytest.mark.slow
def test_a_rank_that_dies_while_it_compiles_is_found_at_once():
    outcome = run_ranks_with_deaths(2, die_compiling)

    kind, text, waited_s = outcome.results[0]
    assert kind is PeerLost
    assert "compiling in" in text
    assert waited_s < 20


# ---- the example


def losses_of_example(rank, backend):
    example = (ROOT / "examples" / "compiled.py").read_text(encoding="utf-8")
    code = example.replace("dist.destroy_process_group()", "pass")
    found = {}
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.setattr("sys.argv", ["compiled.py", backend])
        exec(compile(code, "compiled.py", "exec"), found)
    return found["losses"]


@pytest.mark.slow
def test_the_example_trains_a_compiled_decoder_the_same_on_two_ranks_as_on_one(two_ranks):
    (alone,) = run_ranks(1, losses_of_example, "aot_eager")
    first, second = two_ranks.run(losses_of_example, "aot_eager")

    assert first == second
    assert first == pytest.approx(alone, rel=1e-4)
    assert first[-1] < 0.5 * first[0]


# ---- runs from a file


@pytest.mark.slow
def test_a_run_compiles_its_layers_and_has_the_losses_of_one_that_does_not(tmp_path):
    losses = {}
    for backend in ("false", '"aot_eager"'):
        folder = tmp_path / backend.strip('"')
        folder.mkdir()
        write_tiny_run(folder)
        pairs = ["pipeline.ranks=2", "pipeline.schedule=zb-h1", f"pipeline.compile={backend}"]
        training = fork_training(folder, *pairs)
        output = training.communicate(timeout=120)
        assert training.returncode == 0, output
        steps = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
        losses[backend] = [step["loss"] for step in steps if "loss" in step]

    plain, compiled_losses = losses.values()
    assert len(plain) == 6
    assert compiled_losses == pytest.approx(plain, rel=1e-5)
