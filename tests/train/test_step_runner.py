"""The steps of a run: which are recorded, which are evaluated, and which compile."""

import time
from contextlib import ExitStack, closing

import pytest
import torch

from penstock.errors import PipelineError
from penstock.models import cross_entropy_loss
from penstock.pipeline import Pipeline
from penstock.train.data.dataset import TokenDataset, open_dataset
from penstock.train.folder.run_folder import CONFIG, TIMELINE
from penstock.train.model_source import build_layers
from penstock.train.settings.config import config_from_table
from penstock.train.setup import build_trainer
from penstock.train.step_runner import StepRunner, telling_compilation
from tests.support.mesh_pipelines import on_mesh
from tests.train.settings.tables import merged
from tests.train.tiny_runs import tiny_table

STEPS = 6


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("it is a pipeline, and a pipeline is a row of stages. " * 40)
    return path


def runner_of(text, pipelines, microbatches=2, compile=False, mesh=None, **sections):
    table = tiny_table(text.parent / "run", text, run={"steps": STEPS})
    config = config_from_table(merged(table, sections))
    dataset = open_dataset(config, text.parent / "tokens")
    layers = build_layers(config, dataset.vocabulary)
    pipeline = Pipeline(layers, microbatches=microbatches, loss=cross_entropy_loss, compile=compile, mesh=mesh)
    pipelines.enter_context(closing(pipeline))
    runner = StepRunner(config, dataset, build_trainer(config, pipeline))
    pipelines.enter_context(runner.reading(1))
    return runner


@pytest.fixture
def pipelines():
    with ExitStack() as stack:
        yield stack


@pytest.mark.parametrize(
    ("sections", "recorded", "measured", "evaluated"),
    [
        ({"metrics": {"memory_every": 0}}, [], [], []),
        ({"run": {"record_step": 99}, "metrics": {"memory_every": 4}}, [6], [4, 6], []),
        (
            {
                "run": {"record_step": 4, "evaluate_batches": 1, "evaluate_every": 4},
                "metrics": {"bubble_every": 3, "memory_every": 0},
            },
            [3, 4, 6],
            [],
            [4, 6],
        ),
    ],
)
def test_only_the_steps_that_are_asked_for_are_recorded_measured_and_evaluated(
    text, pipelines, monkeypatch, sections, recorded, measured, evaluated
):
    seen, step = [], Pipeline.step
    monkeypatch.setattr(
        Pipeline,
        "step",
        lambda self, *args, record=False, **more: seen.append(record) or step(self, *args, record=record, **more),
    )
    runner = runner_of(text, pipelines, **sections)

    metrics = [runner.run_step(step) for step in range(1, STEPS + 1)]

    assert [step for step, is_recorded in enumerate(seen, 1) if is_recorded] == recorded
    of_recorded = [each for each in metrics if each.bubble_fraction is not None]
    assert [each.step for each in of_recorded] == recorded
    assert all(0 <= each.predicted_bubble_fraction <= each.bubble_fraction + 0.05 for each in of_recorded)
    assert (runner.recorded is None) == ("run" not in sections)
    assert [each.step for each in metrics if each.peak_bytes] == measured
    assert all(10 * 2**20 < size < 2**40 for each in metrics for size in each.peak_bytes)
    assert [each.step for each in metrics if each.held_out_loss is not None] == evaluated


@pytest.mark.feature("X5")
def test_the_wait_for_batches_is_told(text, pipelines, monkeypatch):
    batch = TokenDataset.batch
    monkeypatch.setattr(
        TokenDataset, "batch", lambda self, *args, **more: time.sleep(0.05) or batch(self, *args, **more)
    )

    metrics = runner_of(text, pipelines, batch={"accumulate": 2}, data={"prefetch": 0}).run_step(1)

    assert 0.1 <= metrics.outcome.data_wait_s <= metrics.duration_s


def test_recorded_and_profiled_steps_are_slowed(text, pipelines):
    (text.parent / "run").mkdir()
    runner = runner_of(text, pipelines, run={"record_step": 1}, profile={"steps": [3, 4]})

    assert [runner.run_step(step).is_slowed for step in range(1, STEPS + 1)] == [True, False, True, True, False, False]


@pytest.mark.slow
def test_a_compilation_is_told_while_it_lasts(text, pipelines):
    run = {"evaluate_batches": 1, "evaluate_every": 2}
    runner, told = runner_of(text, pipelines, compile="aot_eager", run=run), []

    has_compiled = [runner.run_step(step, told.append).has_compiled for step in (1, 2, 3)]

    assert has_compiled == [True, False, False]
    assert told == [
        "step 1 compiles the layers; that takes a while",
        "the evaluation after step 2 compiles the layers; that takes a while",
    ]


@pytest.mark.parametrize(
    ("microbatches", "is_lost", "recorded"),
    [(2, False, [2]), (4, False, [5]), (2, True, [5])],
    ids=["the same", "another program", "lost"],
)
def test_a_run_that_continues_in_another_way_records_a_step_again(text, pipelines, microbatches, is_lost, recorded):
    folder = text.parent / "run"
    folder.mkdir()
    before = runner_of(text, pipelines, run={"record_step": 2})
    before.run_step(1)
    before.run_step(2)
    (folder / CONFIG).touch()
    (folder / TIMELINE).write_bytes(b"half" if is_lost else before.recorded.to_json().encode())

    runner = runner_of(text, pipelines, microbatches, run={"record_step": 2})
    runner.continue_recording(4)
    found = [] if runner.recorded is None else [runner.recorded.step]
    for step in range(4, STEPS + 1):
        if runner.run_step(step).bubble_fraction is not None:
            found.append(step)

    assert found == recorded
    assert (runner.recorded.step, runner.recorded.program.num_microbatches) == (recorded[0], microbatches)


@pytest.mark.parametrize(("record_step", "first_step"), [(0, 4), (5, 4)])
def test_a_run_that_records_nothing_or_has_not_come_to_it_keeps_to_that(text, pipelines, record_step, first_step):
    runner = runner_of(text, pipelines, run={"record_step": record_step})

    runner.continue_recording(first_step)

    recorded = [step for step in range(first_step, STEPS + 1) if runner.run_step(step).bubble_fraction is not None]
    assert recorded == ([record_step] if record_step else [])


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    yield
    torch.compiler.reset()


def test_the_first_compilation_of_a_block_is_told_when_it_begins():
    told = []
    functions = [torch.compile(function, backend="eager") for function in (torch.tanh, torch.sigmoid)]

    with telling_compilation("step 1", told.append) as first:
        told.append("begun")
        for function in functions:
            function(torch.ones(2))
            told.append("compiled")
    with telling_compilation("step 2", told.append) as second:
        functions[0](torch.ones(2))

    line = "step 1 compiles the layers; that takes a while"
    assert told == ["begun", line, "compiled", "compiled"]
    assert (first, second) == ([line], [])
    with pytest.raises(ZeroDivisionError), telling_compilation("step 1", told.append):
        raise ZeroDivisionError
    torch.compile(torch.neg, backend="eager")(torch.ones(2))
    assert len(told) == 4, "a compilation after a block that failed is not told"


@pytest.mark.feature("H10")
@pytest.mark.parametrize(
    ("debug", "last_step"), [({"copies_every": 2}, 3), ({"copies_every": 0}, 5), ({}, 5)], ids=["2", "0", "by default"]
)
def test_copies_are_compared_after_the_update_of_the_steps_for_it(text, debug, last_step):
    """A replica drifts after step 2, and the run ends with the step that compares, 4; others go on."""

    def case(places):
        with ExitStack() as pipelines:
            runner = runner_of(text, pipelines, mesh=places, debug=debug)
            for step in range(1, STEPS):
                try:
                    runner.run_step(step)
                except PipelineError as error:
                    return step - 1, str(error)
                if step == 2 and places.replica == 1:
                    next(runner.trainer.pipeline.parameters()).detach().view(-1)[0] += 4.0
            return step, ""

    for step, problem in on_mesh(1, 2, case):
        assert step == last_step
        assert not problem or "rank 1 (pipeline 0, data 1) its copy 'embedding.weight', whose values differ" in problem


@pytest.mark.feature("H10")
def test_each_100th_step_of_a_run_compares_copies_by_default(text):
    config = config_from_table(tiny_table(text.parent / "run", text))

    assert config.debug.copies_every == 100
