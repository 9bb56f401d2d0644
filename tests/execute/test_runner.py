"""The runner starts afresh behind a step that ended on some ranks alone, or could not begin."""

from functools import partial

import pytest
import torch

from penstock.errors import PeerLost
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import error_of, float_task, on_pipelines, on_ranks, square_loss, token_task


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

    def case(pipeline):
        layer = next(iter(pipeline.stages[0].layers.values()))
        if pipeline.rank == rank:
            layer.train = stuck_in(layer, mode)
        raised = error_of(pipeline.evaluate, *task.inputs, target=task.target)
        layer.__dict__.pop("train", None)
        layer.train()
        return str(raised), pipeline.evaluate(*task.inputs, target=task.target).loss

    for text, loss in on_pipelines(2, task, case):
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

    def case(pipeline):
        step = partial(pipeline.step, *task.inputs, target=task.target)
        loss = step().loss
        weight = dict(pipeline.named_parameters())["4.weight" if pipeline.rank else "0.weight"]
        weight.requires_grad_(pipeline.rank != frozen_on)
        errors = [error_of(step), error_of(step)]
        weight.requires_grad_(False)
        return errors, torch.equal(step().loss, loss)

    states = ["trained", "trained"]
    states[frozen_on] = "frozen"
    expected = f"{states[0]} on rank 0 (0.weight), but (11, 6) float32, {states[1]} on rank 1 (4.weight)"
    for errors, is_right in on_pipelines(2, task, case, tied=[("0.weight", "4.weight")]):
        assert all(expected in str(error) for error in errors)
        assert is_right
