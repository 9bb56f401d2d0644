"""A table of wrong calls, and a program that prints what each of them raises; run it with `python -O`, too.

An assert statement is no refusal: under -O nothing is left of it. So nothing here goes by one either.
"""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

import penstock as ps
from penstock.execute.control.collectives import Control
from penstock.execute.transport.local import LocalTransport
from penstock.execute.transport.torch_dist import TorchTransport
from penstock.moving.step_stage import RoutePlace, StepLoss, StepStage
from penstock.placement import Placement
from penstock.planning import plan
from penstock.searching.certifying import certify
from penstock.searching.search import search
from tests.support.local_pipelines import WIDTH, error_of, float_layers, on_ranks, square_loss, values

BATCH, TARGET = values(1, 8, WIDTH), values(2, 8, WIDTH)
COSTS = ps.Costs.uniform(forward=1.0, backward_input=1.0, backward_weight=1.0)


@dataclass(frozen=True)
class WrongCall:
    """A call that is refused, with the class and parts of the text of its error."""

    call: Callable[[], Any]
    """Raises the error."""
    kind: str
    """Name of the class of the error, or of a class that it is derived from."""
    texts: tuple[str, ...]


def pipeline_of(wires=None, schedule="1f1b", **options):
    return ps.Pipeline(float_layers(), schedule, 4, **{"loss": square_loss, "transport": wires} | options)


def with_pipeline(call, **options):
    """Return a function that makes a pipeline of one process for a call."""
    return lambda: call(pipeline_of(**options))


def closed(call):
    def case(pipeline):
        pipeline.close()
        call(pipeline)

    return with_pipeline(case)


def on_two_ranks(call):
    """Return a function that raises what the call raises on the last of two ranks, if both refuse it.

    The step after it must run.
    """

    def case(wires):
        with pipeline_of(wires) as pipeline:
            error = error_of(call, pipeline)
            pipeline.step(BATCH, target=TARGET)
            return error

    def run():
        first, last = on_ranks(2, case)
        raise last if isinstance(first, ps.PenstockError) else first

    return run


def after_abort():
    transport = LocalTransport.create(2, 1.0)[0]
    transport.abort()
    Control(transport).all_gather_object(1)


def certify_gpipe():
    slow = plan(ps.build("gpipe", ranks=4, microbatches=8), COSTS)
    result = replace(search(COSTS, 4, 8, evaluations=1), plan=slow)
    certify(result, {Placement.line(4): COSTS}, None, per_action=False)


def drained(stream, pipeline):
    pipeline.step(stream)
    pipeline.step(stream)


def of_one_step():
    return ps.Stream(list(zip(BATCH.chunk(4), TARGET.chunk(4), strict=True)))


def step(pipeline, rows=8, target=TARGET, **options):
    return pipeline.step(BATCH[:rows], target=target[:rows], **options)


PROGRAM = ps.lower(ps.build("1f1b", ranks=2, microbatches=2))

WRONG_CALLS = {
    # ---- a call in the wrong state
    "a step after close": WrongCall(closed(step), "PipelineError", ("the pipeline is closed; make a new one",)),
    "an evaluation after close": WrongCall(closed(lambda own: own.evaluate(BATCH)), "PipelineError", ("is closed",)),
    "an abort": WrongCall(after_abort, "PeerLost", ("rank 0",)),
    "no process group": WrongCall(TorchTransport, "PipelineError", ("init_process_group",)),
    "a step without a loss": WrongCall(with_pipeline(step, loss=None), "ConfigError", ("needs a loss; pass loss=",)),
    "a step without backwards": WrongCall(
        with_pipeline(step, schedule="forward-only"), "ConfigError", ("no backwards to train with",)
    ),
    "the end of a stream": WrongCall(with_pipeline(lambda own: drained(of_one_step(), own)), "EndOfData", ("stream",)),
    "a model part outside of its call": WrongCall(
        lambda: StepStage(nn.Linear(2, 2), RoutePlace(0, 1, 0), step_loss=StepLoss())(torch.ones(2), microbatch=0),
        "PipelineError",
        ("stage 0: no forward step", "call that function"),
    ),
    # ---- wrong orders
    "a backward before its forward": WrongCall(
        lambda: ps.check(ps.Schedule.from_csv("0B0,0F0\n")), "ScheduleError", ("rank 0, position 0: 0B0",)
    ),
    "a deadlock": WrongCall(
        lambda: ps.check(ps.Schedule.from_csv("0F0,0B0,0F1,0B1\n1F1,1F0,1B1,1B0\n")),
        "ScheduleError",
        ("rank 0, position 1: 0B0 waits for",),
    ),
    "an order that is no text of one": WrongCall(lambda: ps.Schedule.from_csv("0F0,0X0\n"), "FormatError", ("0X0",)),
    "a stage out of range": WrongCall(
        lambda: replace(PROGRAM, stage=PROGRAM.stage + 5), "ScheduleError", ("stage 5 is out of range",)
    ),
    "a schedule of other ranks": WrongCall(
        lambda: pipeline_of(schedule=ps.build("1f1b", ranks=3, microbatches=4)), "ConfigError", ("3 ranks", "1")
    ),
    "an unknown family": WrongCall(lambda: ps.build("1f2b", ranks=2, microbatches=4), "ConfigError", ("'1f1b'",)),
    "an order that fits no memory": WrongCall(
        lambda: ps.check(ps.build("gpipe", ranks=2, microbatches=8), memory_limit="2 microbatches"),
        "ScheduleError",
        ("microbatches",),
    ),
    "a wrong result of a search": WrongCall(certify_gpipe, "AssertionError", ("which fits, takes",)),
    # ---- wrong batches, on every rank
    "rows that do not divide": WrongCall(on_two_ranks(lambda own: step(own, 7)), "StepRefused", ("allow_ragged",)),
    "a step without a target": WrongCall(
        on_two_ranks(lambda own: own.step(BATCH)), "PipelineError", ("no target was given",)
    ),
    "other batches": WrongCall(
        on_two_ranks(lambda own: step(own, 8 - 4 * own.rank)), "StepRefused", ("same batch on every rank",)
    ),
    "a step beside an evaluation": WrongCall(
        on_two_ranks(lambda own: own.evaluate(BATCH) if own.rank else step(own)), "StepRefused", ("evaluate", "step")
    ),
    "a keyword of no layer": WrongCall(
        on_two_ranks(lambda own: step(own, mask=1)), "StepRefused", ("no layer's forward names 'mask'",)
    ),
    "layers that fail": WrongCall(
        on_two_ranks(lambda own: own.step(BATCH[:, :1], target=TARGET)), "PipelineError", ("in layer 0 (Sequential)",)
    ),
    "a loss of many numbers": WrongCall(
        with_pipeline(step, loss=lambda output, target: output - target), "PipelineError", (".mean() or .sum()",)
    ),
    "a detached loss": WrongCall(
        with_pipeline(step, loss=lambda output, target: output.sum().detach()), "PipelineError", ("detach()",)
    ),
    "a negative count": WrongCall(with_pipeline(step, count=lambda target: -1), "PipelineError", ("count returned",)),
    # ---- wrong settings
    "no microbatch": WrongCall(
        lambda: ps.Pipeline(float_layers(), "1f1b", 0, square_loss), "ConfigError", ("below 1",)
    ),
    "more stages than layers": WrongCall(
        lambda: pipeline_of(schedule="interleaved-1f1b", stages_per_rank=9), "PartitionError", ("5 layers", "9")
    ),
    "a count beside a sum": WrongCall(
        lambda: pipeline_of(reduction="sum", count=len), "ConfigError", ("count: a sum is not divided",)
    ),
    "no checkpoint": WrongCall(
        with_pipeline(lambda own: ps.load_checkpoint("/nowhere", own)), "CheckpointError", ("/nowhere",)
    ),
}


def outcome_of(name):
    """Return the names of the classes of what a call raises, and its text."""
    error = error_of(WRONG_CALLS[name].call)
    return [kind.__name__ for kind in type(error).__mro__], str(error)


if __name__ == "__main__":
    json.dump({"optimized": not __debug__, "outcomes": {name: outcome_of(name) for name in WRONG_CALLS}}, sys.stdout)
