"""`PipelineError.rank` is the rank to blame, on every rank, whatever happens to whom."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock import LayerSpec, Pipeline
from penstock.errors import DeadlineExceeded, EndOfData, PeerLost, PipelineError, StepRefused
from penstock.execute.transport import LocalTransport
from tests.support.faults import NUM_RANKS, Fault, FaultyThreads
from tests.support.local_pipelines import (
    error_of,
    float_layers,
    float_task,
    on_pipelines,
    on_ranks,
    pipeline_of,
    square_loss,
)

DEADLINE_S = 5.0
MAX_WAIT_S = 60.0


@pytest.fixture(scope="module")
def threads():
    with FaultyThreads(deadline_s=MAX_WAIT_S) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def hasty_threads():
    with FaultyThreads(deadline_s=DEADLINE_S) as ranks:
        yield ranks


def ranks_of(endings):
    return [ending.error.rank for ending in endings]


# ---- in a step


@pytest.mark.parametrize("place", ["forward", "backward", "send", "receive", "optimizer"])
def test_the_rank_that_raises_is_to_blame(threads, place):
    endings = threads.step(Fault("raise", 2, place))

    assert ranks_of(endings) == [2] * NUM_RANKS
    assert {type(ending.error) for ending in endings} == {PipelineError, PeerLost}


def test_of_two_ranks_that_raise_all_blame_the_same(threads):
    endings = threads.each(lambda rank: rank.step(Fault("raise", 1 if rank.switch.rank < 2 else 2, "receive")))

    assert len(set(ranks_of(endings))) == 1
    assert ranks_of(endings)[0] in (1, 2)


@pytest.mark.slow
def test_a_rank_that_is_late_is_to_blame_also_for_what_it_finds_itself(hasty_threads):
    endings = hasty_threads.step(Fault("hang", 1, "forward", 2))

    assert ranks_of(endings) == [1] * NUM_RANKS
    assert DeadlineExceeded in {type(ending.error) for ending in endings}


@pytest.mark.slow
def test_a_rank_that_does_not_come_is_to_blame_and_so_is_one_that_does_not_come_back(hasty_threads):
    never_came = hasty_threads.each(lambda rank: None if rank.switch.rank == 3 else rank.step())
    hasty_threads.step()
    hasty_threads.step(Fault("raise", 1, "forward"))
    not_back = hasty_threads.each(lambda rank: None if rank.switch.rank == 2 else rank.step())
    clean = hasty_threads.step()

    assert ranks_of(never_came[:3]) == [3] * 3
    assert [ending.error.rank for ending in not_back if ending is not None] == [2] * 3
    assert [ending.error for ending in clean] == [None] * NUM_RANKS


# ---- arguments and settings


@pytest.mark.parametrize("refusing", [(2,), (1, 3)])
def test_the_first_rank_whose_arguments_are_refused_is_to_blame(refusing):
    task = float_task(8)

    def run(pipeline):
        keywords = {"maks": 1} if pipeline.rank in refusing else {}
        return error_of(pipeline.step, *task.inputs, target=task.target, **keywords)

    errors = on_pipelines(NUM_RANKS, task, run)

    assert {type(error) for error in errors} == {StepRefused}
    assert [error.rank for error in errors] == [refusing[0]] * NUM_RANKS


def test_a_rank_that_was_set_up_otherwise_is_to_blame():
    def run(wires):
        return error_of(pipeline_of, wires, float_task(8), seed=1 if wires.rank == 2 else None)

    assert [error.rank for error in on_ranks(NUM_RANKS, run)] == [2] * NUM_RANKS


def test_a_rank_whose_layers_cannot_be_built_blames_itself_and_the_others_name_it():
    def build():
        raise PipelineError("the weights are missing")

    task = replace(float_task(8), make_layers=lambda: [*float_layers(num_layers=3), LayerSpec("last", build)])
    *others, own = on_ranks(NUM_RANKS, lambda wires: error_of(pipeline_of, wires, task))

    assert own.rank == NUM_RANKS - 1
    assert all(str(error).startswith(f"rank {NUM_RANKS - 1}: ") for error in others)


# ---- refusals of the user's own code


class Refusing(nn.Linear):
    """Raises in its forward once what a pipeline of its own would raise."""

    def __init__(self, error):
        super().__init__(6, 6)
        self.errors = [error]

    def forward(self, x):
        if self.errors:
            raise self.errors.pop()
        return super().forward(x)


def refused_within():
    """Return what a pipeline raises whose step is refused; this one has been given no inputs."""
    [transport] = LocalTransport.create(1, MAX_WAIT_S)
    return error_of(Pipeline(float_layers(), "gpipe", 2, square_loss, transport=transport).step, target=torch.zeros(4))


@pytest.mark.parametrize(
    ("schedule", "num_ranks", "call", "make_error"),
    [
        ("gpipe", 1, "step", refused_within),
        ("1f1b", 2, "step", lambda: EndOfData("no data are left")),
        ("interleaved-1f1b", 2, "evaluate", refused_within),
        ("zb-h1", 2, "step", refused_within),
        ("zbv", 1, "evaluate", lambda: EndOfData("no data are left")),
    ],
)
def test_a_refusal_out_of_a_layer_is_a_failure_of_its_rank(schedule, num_ranks, call, make_error):
    task = float_task(8)
    error = make_error()
    assert isinstance(error, StepRefused)

    def case(wires):
        layers = task.make_layers()
        layers[2] = Refusing(error)
        pipeline = Pipeline(layers, schedule, 4, task.loss, transport=wires)
        holds = any("2" in stage.layers for stage in pipeline.stages)
        failed = error_of(getattr(pipeline, call), *task.inputs, target=task.target)
        return failed, holds, getattr(pipeline, call)(*task.inputs, target=task.target).loss

    found = on_ranks(num_ranks, case, deadline_s=MAX_WAIT_S)

    [culprit] = [rank for rank, (_, holds, _) in enumerate(found) if holds]
    assert [error.rank for error, *_ in found] == [culprit] * num_ranks
    assert not any(isinstance(error, StepRefused) for error, *_ in found)
    assert f"{type(error).__name__}: {error}" in str(found[culprit][0])
    assert len({float(loss) for *_, loss in found}) == 1  # the next one works


def test_a_refusal_out_of_the_loss_the_count_or_the_merge_is_a_failure():
    def refuse(*_):
        raise EndOfData("no data are left")

    task = float_task(8)

    def case(pipeline):
        return error_of(pipeline.step, *task.inputs, target=task.target, return_outputs=True)

    for own, options in ((replace(task, loss=refuse), {}), (task, {"count": refuse}), (task, {"merge": refuse})):
        errors = on_pipelines(2, own, case, **options)
        assert [error.rank for error in errors] == [1, 1]
        assert type(errors[1]) is PipelineError
