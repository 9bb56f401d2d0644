"""The runner plans each mode once, runs it, and starts afresh behind a failed step."""

from functools import partial

import pytest
import torch

from penstock.errors import PeerLost
from penstock.execute.batch.admission import StepRequest
from penstock.execute.batch.needs import InputNeeds
from penstock.execute.control.agreement import Mode
from penstock.execute.control.collectives import Control
from penstock.execute.control.handshake import AgreedFacts, LocalFacts
from penstock.execute.losses.loss import LossWeights
from penstock.execute.losses.step_losses import LossMaker
from penstock.execute.options import PipelineOptions
from penstock.execute.rank_parameters import RankParameters
from penstock.execute.runner import Runner
from penstock.execute.session import Session
from penstock.execute.stages.assemble import assemble
from penstock.execute.transport import LocalTransport
from penstock.execute.transport.places import Places
from penstock.partition.split import split_over
from penstock.pipeline import Pipeline
from penstock.planning import prove_and_lower
from penstock.schedules import build
from tests.boards import boards_of_threads
from tests.invariants import Invariants
from tests.local_pipelines import error_of, float_task, on_ranks, square_loss, token_task

CPU = torch.device("cpu")


def runner_of(task, planned, loss=square_loss):
    schedule = build("1f1b", ranks=1, microbatches=4)
    [transport] = LocalTransport.create(1, 20.0)
    layers = task.make_layers()
    assembly = assemble(layers, schedule.placement, split_over(schedule.placement, len(layers)), 0, device=CPU)

    def program_of(mode, num_microbatches, most):
        planned.append(mode)
        return prove_and_lower(schedule if mode.is_training else schedule.forward_only())

    options, places = PipelineOptions(observers=[Invariants()]), Places.of(transport)
    return Runner(
        Session(
            places=places,
            device=CPU,
            options=options,
            schedule=schedule,
            program_of=program_of,
            assembly=assembly,
            parameters=RankParameters(Control.of(places), CPU, assembly, options),
            losses=LossMaker(loss, LossWeights(), None, is_last=True),
            needs=InputNeeds(inputs=True, target=True),
            agreed=AgreedFacts([LocalFacts()]),
            board=boards_of_threads(1)[0],
        )
    )


def test_each_mode_is_planned_once_when_it_first_runs():
    task, planned = float_task(8), []
    runner = runner_of(task, planned)

    for mode in (Mode.TRAIN, Mode.EVALUATE, Mode.TRAIN, Mode.EVALUATE):
        runner.run(mode, StepRequest(task.inputs, target=task.target))

    assert planned == [Mode.TRAIN, Mode.EVALUATE]


def test_a_step_runs_behind_a_failed_one_as_if_it_had_not_been():
    task, calls = float_task(8), []

    def loss(output, target):
        calls.append(1)
        if len(calls) == 3:
            raise ValueError("the third microbatch is bad")
        return square_loss(output, target)

    runner = runner_of(task, [], loss)
    call = StepRequest(task.inputs, target=task.target)
    error = error_of(runner.run, Mode.TRAIN, call)
    result = runner.run(Mode.TRAIN, call)

    assert "rank 0, 0F2, in the loss function: ValueError: the third microbatch is bad" in str(error)
    assert torch.equal(result.loss, task.reference(4)[0].loss)


@pytest.mark.parametrize("interrupted", [(3, 2), (None, 2), (4, None)])
def test_behind_an_interrupt_that_the_caller_caught_all_ranks_run_the_next_step(interrupted):
    """Rank by rank, the forward in which it comes; the ranks without one fail at once, not at their deadline."""
    task = float_task(8)

    def case(wires):
        pipeline = Pipeline(task.make_layers(), "gpipe", 4, square_loss, transport=wires)
        pipeline.step(*task.inputs, target=task.target)
        num_forwards = 0

        def interrupt(*_):
            nonlocal num_forwards
            num_forwards += 1
            if num_forwards == interrupted[wires.rank]:
                raise KeyboardInterrupt("of this rank")

        handle = next(iter(pipeline.stages[0].layers.values())).register_forward_pre_hook(interrupt)
        try:
            pipeline.step(*task.inputs, target=task.target)
        except (KeyboardInterrupt, PeerLost) as raised:
            error = raised
        handle.remove()
        return error, pipeline.step(*task.inputs, target=task.target).loss

    for (error, loss), at in zip(on_ranks(2, case), interrupted, strict=True):
        assert type(error) is (PeerLost if at is None else KeyboardInterrupt)
        assert str(error) == "of this rank" if at is not None else "KeyboardInterrupt: of this rank" in str(error)
        assert torch.equal(loss, task.reference(4)[0].loss)


@pytest.mark.parametrize("mode", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_layer_of_one_rank_that_cannot_change_its_mode_ends_the_evaluation_of_all_ranks_as_one_error(rank, mode):
    """At once, and not at the deadline of the other rank; the next evaluation is right."""
    task = float_task(8)

    def case(wires):
        pipeline = Pipeline(task.make_layers(), "1f1b", 4, square_loss, transport=wires)
        layer = next(iter(pipeline.stages[0].layers.values()))
        if wires.rank == rank:
            layer.train = stuck_in(layer, mode)
        raised = error_of(pipeline.evaluate, *task.inputs, target=task.target)
        layer.__dict__.pop("train", None)
        layer.train()
        return str(raised), pipeline.evaluate(*task.inputs, target=task.target).loss

    for text, loss in on_ranks(2, case):
        assert f"train({mode}) of layer" in text.splitlines()[0]
        assert "ValueError: this layer is stuck" in text
        assert torch.allclose(loss, task.reference(4)[0].loss)


def stuck_in(layer, mode):
    train = layer.train

    def change(is_training=True):
        if is_training is mode:
            raise ValueError("this layer is stuck")
        return train(is_training)

    return change


@pytest.mark.parametrize("frozen_on", [0, 1])
def test_a_tied_weight_that_only_some_of_its_ranks_freeze_is_told_on_all_at_the_next_step(frozen_on):
    task = token_task(8)

    def case(wires):
        layers = task.make_layers()
        layers[-1].weight = layers[0].weight
        pipeline = Pipeline(layers, "1f1b", 4, task.loss, transport=wires, **task.options)
        step = partial(pipeline.step, *task.inputs, target=task.target)
        loss = step().loss
        weight = dict(pipeline.named_parameters())["4.weight" if wires.rank else "0.weight"]
        weight.requires_grad_(wires.rank != frozen_on)
        errors = [error_of(step), error_of(step)]
        weight.requires_grad_(False)
        return errors, torch.equal(step().loss, loss)

    states = ["trained", "trained"]
    states[frozen_on] = "frozen"
    expected = f"{states[0]} on rank 0 (0.weight), but (11, 6) float32, {states[1]} on rank 1 (4.weight)"
    for errors, is_right in on_ranks(2, case):
        assert all(expected in str(error) for error in errors)
        assert is_right
