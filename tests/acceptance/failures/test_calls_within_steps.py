"""A call of all ranks that the user's code makes within a step is refused at once, by name, and the next step runs."""

from pathlib import Path

import pytest

import penstock as ps
from penstock.errors import PipelineError, StepRefused
from penstock.pipeline import Pipeline
from tests.acceptance.failures.test_lone_calls import CALLS as LONE_CALLS
from tests.acceptance.failures.test_lone_calls import INPUTS, TARGET
from tests.support.local_pipelines import error_of, float_layers, on_ranks, square_loss
from tests.support.mesh_pipelines import on_mesh

CALLS = {name: call for name, call in LONE_CALLS.items() if not name.startswith("load_")} | {
    "profile": lambda pipeline, folder: pipeline.profile(INPUTS, target=TARGET),
    "refuse": lambda pipeline, folder: pipeline.refuse(PipelineError("planted")),
    "close": lambda pipeline, folder: pipeline.close(),
}
STEPS = {"profile", "refuse"}
"""Calls that are made by the name of a step."""


class Script:
    """One rank's pipeline, whose user code makes a call within the first step."""

    def __init__(self, wires, place, act):
        self.place, self.act, self.armed = place, act, True
        location = {"transport" if hasattr(wires, "post_send") else "mesh": wires}
        observers = [Watcher(self)] if place == "observer" else []
        layers = float_layers(num_layers=4)
        layers[0].register_forward_hook(lambda *_: self.reach("layer"))
        self.pipeline = Pipeline(layers, "1f1b", 2, self.loss, observers=observers, **location)

    def reach(self, place):
        if place == self.place and self.armed:
            self.armed = False
            self.act(self.pipeline)

    def loss(self, output, target):
        self.reach("loss")
        return square_loss(output, target)

    def microbatches(self):
        for index in range(4):
            self.reach(f"stream {index}")
            yield INPUTS[:2], TARGET[:2]

    def run_step(self):
        return self.pipeline.step(ps.Stream(self.microbatches()))


class Watcher(ps.Observer):
    def __init__(self, script):
        self.script = script

    def begin(self, step):
        self.script.reach("observer")


def raised_by(wires, place, act):
    """Return what the step raised on a rank, and the loss of the step behind it."""
    script = Script(wires, place, act)
    return error_of(script.run_step), float(script.pipeline.step(INPUTS, target=TARGET).loss)


def words_of(name):
    code = CALLS[name].__code__
    inner = f"{'step' if name in STEPS else name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
    outer = f"step (test_calls_within_steps.py:{Script.run_step.__code__.co_firstlineno + 1})"
    return f"{inner} is called within {outer}"


def on_rank_0(name, folder):
    """Return an act that makes a call on rank 0 alone."""
    return lambda pipeline: CALLS[name](pipeline, folder) if pipeline.control.rank == 0 else None


@pytest.mark.parametrize(("num_ranks", "name"), [*((2, name) for name in CALLS), (4, "evaluate")])
def test_a_call_by_the_first_microbatch_of_a_stream_refuses_the_step(num_ranks, name, tmp_path):
    outcomes = on_ranks(num_ranks, raised_by, "stream 0", on_rank_0(name, tmp_path))

    for rank, (error, _) in enumerate(outcomes):
        assert type(error) is StepRefused
        assert words_of(name) in str(error)
        assert error.rank == 0
        assert str(error).startswith("rank 0 refuses the step: " if rank else "rank 0: ")
    assert len({loss for _, loss in outcomes}) == 1


def on_whichever_rank(name, folder):
    return lambda pipeline: CALLS[name](pipeline, folder)


@pytest.mark.parametrize(
    ("place", "name"),
    [
        *(("layer", name) for name in CALLS),
        *((place, name) for place in ("stream 1", "loss", "observer") for name in ("evaluate", "close")),
    ],
)
def test_a_call_from_the_middle_of_a_step_fails_it_on_all_ranks(place, name, tmp_path):
    outcomes = on_ranks(2, raised_by, place, on_whichever_rank(name, tmp_path))

    for error, _ in outcomes:
        assert isinstance(error, PipelineError)
        assert words_of(name) in str(error)
    assert len({loss for _, loss in outcomes}) == 1


def test_replicas_are_told_too(tmp_path):
    outcomes = on_mesh(2, 2, raised_by, "stream 0", on_rank_0("evaluate", tmp_path))

    for error, _ in outcomes:
        assert type(error) is StepRefused
        assert words_of("evaluate") in str(error)
    assert len({loss for _, loss in outcomes}) == 1


def test_calls_of_one_rank_alone_run_within_a_step(tmp_path):
    def case(wires):
        states = []
        script = Script(wires, "stream 0", lambda pipeline: states.append(pipeline.state_dict()))
        script.run_step()
        return len(states)

    assert on_ranks(2, case) == [1, 1]


@pytest.mark.parametrize("place", ["stream 0", "loss", "observer"])
def test_without_other_ranks_a_call_within_a_step_runs(place, tmp_path):
    def case(wires):
        results = []
        script = Script(wires, place, lambda pipeline: results.append(CALLS["evaluate"](pipeline, tmp_path)))
        script.run_step()
        script.armed = True  # again, since the step before must leave nothing behind
        script.run_step()
        return len(results)

    assert on_ranks(1, case) == [2]


@pytest.mark.parametrize("name", ["norms", "save_checkpoint", pytest.param("state_dict", marks=pytest.mark.slow)])
def test_a_call_right_after_a_failed_step_is_refused_with_what_to_do_and_works_after_the_next_step(tmp_path, name):
    def plant(pipeline):
        raise ValueError("planted")

    def case(wires):
        script = Script(wires, "loss", plant)
        failure = error_of(script.pipeline.step, INPUTS, target=TARGET)
        error = error_of(CALLS[name], script.pipeline, tmp_path)
        script.pipeline.step(INPUTS, target=TARGET)
        CALLS[name](script.pipeline, tmp_path)
        return failure, error

    for failure, error in on_ranks(2, case):
        assert "planted" in str(failure)
        assert isinstance(error, PipelineError)
        assert "the last step has failed, and ranks meet again when the next step or evaluation begins" in str(error)
