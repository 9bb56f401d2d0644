"""A session holds all that a rank has of a pipeline, and does not change from step to step."""

from dataclasses import fields

from penstock.execute.control.agreement import Mode
from penstock.execute.session import ProgramKey, Session
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import float_task, step_task


def test_a_step_replaces_nothing_of_a_session():
    task = float_task(4)
    with Pipeline(task.make_layers(), "gpipe", 2, task.loss) as pipeline:
        session = pipeline._runner.session
        before = {each.name: getattr(session, each.name) for each in fields(Session)}
        step_task(pipeline, task)

        assert all(getattr(session, name) is value for name, value in before.items())
        assert session.programs.of(ProgramKey(Mode.TRAIN, 2, 2)) is pipeline.program
