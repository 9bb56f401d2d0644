"""Observers see every call once; one that raises is removed and reported, and the step goes on."""

import logging
from contextlib import contextmanager
from functools import partial

import pytest
import torch

from penstock import Observer
from penstock.errors import ConfigError, PipelineError
from penstock.execute.observing.observer import observed, observing
from penstock.execute.observing.recorder import Recorder
from penstock.execute.step import Bound
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import difference, error_of, float_task, gradients_of, on_pipelines, step_task


class Noting(Observer):
    """Notes what it is asked for; raises an error of a type in one place."""

    def __init__(self, noted, name="", fails_in=None, error=ValueError):
        self.noted = noted
        self.name = name
        self.fails_in = fails_in
        self.error = error

    def note(self, what):
        self.noted.append(f"{self.name}{what}")
        if what == self.fails_in:
            raise self.error("of the observer")

    def begin(self, step):
        self.note("begin")

    def around(self, program, bound):
        self.note("around")
        return self.context

    @contextmanager
    def context(self, step):
        self.note("enter")
        try:
            yield
        finally:
            self.note("leave")

    def end(self, step, failed):
        self.note(f"end {failed}" if failed else "end")


PLACES = ["begin", "around", "enter", "leave", "end"]


def run(observers, *calls):
    bounds = observed(observers, None, [Bound(row, call) for row, call in enumerate(calls)])
    with observing(observers, None):
        for bound in bounds:
            bound.call(None)


def reports(caplog):
    return [record for record in caplog.records if record.name == "penstock" and record.levelno == logging.WARNING]


def test_the_first_observer_is_the_innermost_and_ends_last():
    noted = []

    run([Noting(noted, "1 "), Noting(noted, "2 ")], lambda step: noted.append("call"))

    assert noted == [
        *("1 around", "2 around", "1 begin", "2 begin"),
        *("2 enter", "1 enter", "call", "1 leave", "2 leave"),
        *("2 end", "1 end"),
    ]


@pytest.mark.parametrize("place", PLACES)
def test_an_observer_that_raises_is_reported_once_and_every_call_runs_once(caplog, place):
    noted = []
    failing, other = Noting([], fails_in=place), Noting([])

    for _ in range(2):
        run([failing, other], *[lambda step, row=row: noted.append(row) for row in range(3)])

    assert noted == [0, 1, 2, 0, 1, 2]
    assert isinstance(failing.failure, ValueError)
    assert other.noted == 2 * ["around", "around", "around", "begin", *(3 * ["enter", "leave"]), "end"]
    [report] = reports(caplog)
    assert "Noting raised ValueError: of the observer." in report.getMessage()
    assert report.exc_info[1] is failing.failure
    assert failing.noted.count("begin") == failing.noted.count("end") + failing.noted.count("end True")


@pytest.mark.parametrize(("error", "needs_all_ranks"), [(PipelineError, False), (ValueError, True)])
@pytest.mark.parametrize("place", PLACES)
def test_what_an_observer_finds_and_an_error_of_one_that_needs_all_ranks_end_the_step(
    caplog, place, error, needs_all_ranks
):
    observer = Noting([], fails_in=place, error=error)
    observer.needs_all_ranks = needs_all_ranks

    assert isinstance(error_of(run, [observer], lambda step: None), error)
    assert reports(caplog) == []
    assert observer.failure is None


@pytest.mark.parametrize("fails_in", [None, "leave", "end True"])
@pytest.mark.parametrize("error", [ValueError, PipelineError])
def test_the_error_of_a_call_is_the_one_that_is_raised_and_every_context_is_left(fails_in, error):
    noted = []

    found = error_of(run, [Noting([], fails_in=fails_in, error=error), Noting(noted)], lambda step: 1 / 0)

    assert isinstance(found, ZeroDivisionError)
    assert noted == ["around", "begin", "enter", "leave", "end True"]
    removed, bound = Noting([]), Bound(3, print, 2)
    run([removed], lambda step: removed.attempt(int, "nothing"))
    assert isinstance(removed.failure, ValueError)
    assert removed.noted == noted
    assert observed([Observer()], None, [bound])[0] is bound  # no observer is around its call


# ---- in a pipeline


def test_observers_of_the_caller_see_every_instruction_of_every_step():
    class Names(Observer):
        def __init__(self):
            self.names = []

        def around(self, program, bound):
            return partial(self.naming, program.instruction(bound.row))

        @contextmanager
        def naming(self, instruction, step):
            yield
            self.names.append((step.number, step.is_training, str(instruction)))

    task, observer = float_task(4), Names()
    pipeline = Pipeline(task.make_layers(), "gpipe", 2, task.loss, observers=[observer])

    outcome = step_task(pipeline, task)
    pipeline.evaluate(*task.inputs, target=task.target)

    training = ["0F0", "0F1", "0B0", "0B1", "0REDUCE_GRAD"]
    assert observer.names == [*((0, True, name) for name in training), *((1, False, name) for name in training[:2])]
    assert difference([outcome], task.reference(2)) == []


def test_other_things_than_observers_are_refused():
    task = float_task(4)

    for observers in ("none", [print], Observer()):
        error = error_of(Pipeline, task.make_layers(), "gpipe", 2, task.loss, observers=observers)

        assert isinstance(error, ConfigError)
        assert "expected a list of penstock Observers" in str(error)


def broken(*_, **__):
    raise RuntimeError("out of order")


INTERNAL = [
    ("checked_values.ValueChecks._look_at_output", {"debug": "values"}),
    ("checked_values.ValueChecks._checking", {"debug": "values"}),
    ("checked_values.not_finite", {"debug": "values"}),
    ("ranges.Ranges._in_ranges", {"ranges": True}),
    ("log.MessageLog._logging", {}),
]


@pytest.mark.parametrize(("place", "options"), INTERNAL, ids=[place for place, _ in INTERNAL])
def test_an_internal_error_of_an_observer_of_our_own_does_not_fail_the_step(caplog, monkeypatch, place, options):
    task = float_task(8)

    def case(pipeline):
        outcome = step_task(pipeline, task)
        layers = [layer for stage in pipeline.stages for layer in stage.layers.values()]
        assert not any(module._forward_hooks for layer in layers for module in layer.modules())
        return outcome

    with caplog.at_level(logging.DEBUG, "penstock"):
        monkeypatch.setattr(f"penstock.execute.observing.{place}", broken)
        outcomes = on_pipelines(2, task, case, **options)

    assert difference(outcomes, task.reference(4)) == []
    kind = {"checked_values": "ValueChecks", "ranges": "Ranges", "log": "MessageLog"}[place.split(".")[0]]
    assert [kind in record.getMessage() for record in reports(caplog)] == [True, True]  # one per rank


def on_first_rank(act):
    """Return the method of a recorder, failing on rank 0 alone."""
    return lambda self, *args: broken() if self._first == 0 else act(self, *args)


@pytest.mark.parametrize("method", ["_timing", "around"])
def test_a_step_whose_recorder_fails_on_one_rank_runs_and_is_not_recorded_on_any(caplog, monkeypatch, method):
    task = float_task(8)

    def case(pipeline):
        outcome = step_task(pipeline, task, record=True)
        return outcome, pipeline.recording, error_of(pipeline.profile, *task.inputs, target=task.target)

    monkeypatch.setattr(Recorder, method, on_first_rank(getattr(Recorder, method)))
    found = on_pipelines(2, task, case)

    assert difference([outcome for outcome, _, _ in found], task.reference(4)) == []
    assert [recording for _, recording, _ in found] == [None, None]
    assert all("the step ran, but was not recorded" in str(error) for _, _, error in found)
    assert len(reports(caplog)) == 2  # of two steps, each with a recorder


MEASURING = ["memory_report.MemoryWatch._look", "layer_sizes.SavedTensorTracker._record_storage"]
MEASURING += ["layer_sizes.LayerSizes._begin", "layer_sizes.LayerSizes.note_saved"]


@pytest.mark.parametrize("place", MEASURING)
def test_a_step_whose_memory_cannot_be_measured_runs_and_says_so(caplog, monkeypatch, place):
    task = float_task(8)

    def case(pipeline):
        error = error_of(pipeline.memory_report, *task.inputs, target=task.target)
        return error, gradients_of(pipeline.named_parameters())

    monkeypatch.setattr(f"penstock.execute.observing.{place}", broken)
    found = on_pipelines(2, task, case)

    expected = task.reference(4)[1]
    assert all("its memory was not measured" in str(error) for error, _ in found)
    assert all(torch.equal(gradient, expected[name]) for _, own in found for name, gradient in own.items())
    assert len(reports(caplog)) == 2
