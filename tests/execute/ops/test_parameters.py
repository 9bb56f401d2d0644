"""Handlers ask layouts, tied copies and the optimizer; what a layout launches goes on until a row needs it."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.compile.program import compile_program
from penstock.execute.observing.observer import Observer
from penstock.execute.ops.parameters import reduce
from penstock.execute.parameters.layout import ParameterLayout
from penstock.execute.stages.stage import Stage
from penstock.ir.collectives import REDUCES_REPLICAS
from penstock.ir.program import Program
from penstock.lowering import lower
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.support.compiled import context_of, row_of, run_calls, step_for
from tests.support.local_pipelines import error_of
from tests.support.one_stage import passes_of

TRAINING = lower(build("1f1b", ranks=2, microbatches=2), tied_groups=[(0, 1)], optimizer_step=True)
SHARDED = Program.from_csv("0UNSHARD,0F0,0B0,0RESHARD", name="gathered")
ROWS = {
    "1REDUCE_GRAD": (TRAINING, ("reduce stage", 1)),
    "1REDUCE_TIED0": (TRAINING, ("reduce tied", "wires", "store")),
    "1STEP": (TRAINING, ("optimizer step",)),
    "0UNSHARD": (SHARDED, ("unshard",)),
    "0RESHARD": (SHARDED, ("reshard",)),
}


@pytest.mark.parametrize("text", ROWS)
def test_a_row_asks_once(text):
    (program, call), said, stage = ROWS[text], [], int(text[0])
    context = context_of(program, stage, said, passes={stage: passes_of(Stage(stage, {}))})
    step, row = step_for(context), row_of(program, text, stage)

    [bound] = [bound for bound in compile_program(context).bounds if bound.row == row]
    bound.call(step)

    assert said == [call]
    assert step.values == {}


def test_copies_of_a_stage_on_one_rank_are_reduced_once_behind_the_later_one():
    program, said, layer = Program.from_csv("0F0,0B0,1F0,1B0,0REDUCE_GRAD,1REDUCE_GRAD"), [], nn.Linear(2, 2)
    passes = {stage: passes_of(Stage(stage, {"0": layer})) for stage in (0, 1)}
    context = context_of(program, 0, said, passes=passes)

    for text in ("0REDUCE_GRAD", "1REDUCE_GRAD"):
        run_calls(reduce(context, row_of(program, text)), step_for(context))

    assert said == [("reduce stage", 1)]


GATHERED = Program.from_csv("0UNSHARD,0F0,0B0,0RESHARD,0REDUCE_GRAD", name="gathered")


class Launching(ParameterLayout):
    """Notes what it launches, and when that is waited for."""

    launches = True

    def __init__(self, said, fails=False):
        self.said, self.fails = said, fails

    def unshard(self):
        return self.ticket("gather")

    def reshard(self):
        self.said.append("reshard")

    def reduce(self, stage, *, is_last):
        return self.ticket(f"reduction {stage}")

    def end_step(self):
        self.said.append("over")

    def end_failed_step(self):
        self.said.append("failed")

    def ticket(self, name):
        def wait():
            if self.fails:
                raise PipelineError("the replica is gone")
            self.said.append(f"{name} is here")

        self.said.append(name)
        return SimpleNamespace(wait=wait)


class Calls(Observer):
    """Notes each call, and whether it is a wait."""

    def __init__(self, said):
        self.said = said

    def around(self, program, bound):
        self.said.append((str(program.instruction(bound.row)), bound.awaits))


def pipeline_of(program, *, launches=True, fails=False, **options):
    """Return a pipeline of one rank whose layouts launch, what is said in a step, and its calls."""
    said, calls, layers = [], [], [nn.Linear(2, 2) for _ in range(program.num_stages)]
    for layer in layers:
        layer.register_forward_pre_hook(lambda *_: said.append("forward"))
    pipeline = Pipeline(layers, program, loss=nn.functional.mse_loss, observers=[Calls(calls)], **options)
    for unit in pipeline._runner.session.parameters.unit_of.values() if launches else ():
        object.__setattr__(unit, "layout", Launching(said, fails))
    return pipeline, said, calls


def step(pipeline, **options):
    pipeline.step(torch.ones(2, 2), target=torch.zeros(2, 2), **options)


def ends_of(said):
    """Return what says that the reductions are over, in their order."""
    return [f"{each} is here" for each in said if each in ("reduction 0", "reduction 1")]


def test_a_computation_waits_for_the_gather_of_its_stage():
    pipeline, said, calls = pipeline_of(GATHERED)

    step(pipeline)

    assert said == ["gather", "gather is here", "forward", "reshard", "reduction 0", "reduction 0 is here", "over"]
    assert [text for text, awaited in calls if awaited is not None] == ["0F0", "0REDUCE_GRAD"]


def test_what_no_row_waits_for_is_over_behind_the_last_row_and_recorded_as_such():
    program = lower(build("interleaved-1f1b", ranks=1, microbatches=1, stages_per_rank=2))
    pipeline, said, calls = pipeline_of(program)

    step(pipeline, record=True)

    assert said[-4:] == [*ends_of(said), "over", "over"]
    last, rows = str(program.instruction(program.num_rows - 1)), program.rows_of(REDUCES_REPLICAS)
    assert {(text, awaited) for text, awaited in calls if awaited is not None} == {(last, row) for row in rows}
    end_s = pipeline.timeline.end_s
    assert end_s[rows].tolist() == sorted(end_s[rows])
    assert (end_s[rows] >= end_s[program.compute_rows(0)].max()).all()


def test_the_optimizer_waits_for_all_reductions():
    program = lower(build("interleaved-1f1b", ranks=1, microbatches=1, stages_per_rank=2), optimizer_step=True)
    pipeline, said, calls = pipeline_of(program, optimizer_step=lambda: said.append("step"))

    step(pipeline)

    assert len(ends_of(said)) == 2
    assert said[-5:] == [*ends_of(said), "step", "over", "over"]
    assert [text for text, awaited in calls if awaited is not None] == ["0STEP", "0STEP"]


def test_without_such_layouts_nothing_waits():
    pipeline, _, calls = pipeline_of(GATHERED, launches=False)

    step(pipeline)

    assert {awaited for _, awaited in calls} == {None}


def test_a_callers_function_finds_the_gradients_whole():
    pipeline, said, _ = pipeline_of(GATHERED, reduce_stage=lambda stage: said.append("caller"))

    step(pipeline)

    assert said[-4:] == ["reduction 0", "reduction 0 is here", "caller", "over"]


@pytest.mark.parametrize("program", [GATHERED, lower(build("gpipe", ranks=1, microbatches=1), optimizer_step=True)])
def test_what_fails_fails_the_step(program):
    pipeline, said, _ = pipeline_of(program, fails=True)

    assert "the replica is gone" in str(error_of(step, pipeline))
    assert said[-2:] == ["failed", "over"]
