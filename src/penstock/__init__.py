"""Pipeline-parallel training for PyTorch in which the schedule is data.

    schedule = ps.build("1f1b", ranks=4, microbatches=8)      what every rank does, in order
    ps.check(schedule)                                        proved before it runs
    program = ps.lower(schedule)                              with messages, reductions and buffers
    timeline = ps.simulate(program, ps.Costs.uniform())       predicted
    pipeline = ps.Pipeline(layers, schedule, loss=loss)       executed unchanged, on 1 process or many

Every name loads on first use, so that planning starts without torch, and `penstock --help` without numpy. Type checkers
read `__init__.pyi`.
"""

from importlib import import_module
from typing import Any

from penstock.version import VERSION

__version__ = VERSION

_HOMES = {
    "Action": "penstock.ir.action",
    "AuxiliaryLoss": "penstock.models",
    "BatchSpec": "penstock.execute.batch.microbatch",
    "Carry": "penstock.models",
    "CheckpointError": "penstock.errors",
    "Concat": "penstock.execute.batch.microbatch",
    "ConfigError": "penstock.errors",
    "Costs": "penstock.simulation",
    "DeadlineExceeded": "penstock.errors",
    "EndOfData": "penstock.errors",
    "FormatError": "penstock.errors",
    "Kind": "penstock.ir.action",
    "LayerCosts": "penstock.simulation",
    "LayerSpec": "penstock.models",
    "LossOutput": "penstock.execute.losses.output",
    "NotFinite": "penstock.errors",
    "NotSaved": "penstock.errors",
    "Observer": "penstock.execute.observing.observer",
    "Part": "penstock.execute.batch.stream",
    "PartitionError": "penstock.errors",
    "PeerLost": "penstock.errors",
    "PenstockError": "penstock.errors",
    "PenstockWarning": "penstock.errors",
    "Pipeline": "penstock.pipeline",
    "PipelineError": "penstock.errors",
    "Placement": "penstock.placement",
    "PreSplit": "penstock.execute.batch.microbatch",
    "Program": "penstock.ir.program",
    "Replicate": "penstock.execute.batch.microbatch",
    "Schedule": "penstock.ir.schedule",
    "ScheduleError": "penstock.errors",
    "Skip": "penstock.models",
    "Split": "penstock.execute.batch.microbatch",
    "Stack": "penstock.execute.batch.microbatch",
    "StepRefused": "penstock.errors",
    "Stream": "penstock.execute.batch.stream",
    "Sum": "penstock.execute.batch.microbatch",
    "Timeline": "penstock.ir.timeline",
    "build": "penstock.schedules",
    "check": "penstock.proofs",
    "cut": "penstock.checkpoints.cutting",
    "draw": "penstock.show.picture",
    "from_transformers": "penstock.hugging_face.from_transformers",
    "latest_checkpoint": "penstock.checkpoints.verification",
    "load_checkpoint": "penstock.checkpoints.loading",
    "lower": "penstock.lowering",
    "measure_layers": "penstock.train.measuring.measure",
    "plan": "penstock.planning",
    "save_checkpoint": "penstock.checkpoints.writer",
    "search": "penstock.searching.search",
    "simulate": "penstock.simulation",
    "wants_input_gradient": "penstock.execute.split.wanted",
    "wants_weight_gradient": "penstock.execute.split.wanted",
    "with_recompute": "penstock.ir.recompute",
}
"""The module of each public name."""

__all__ = ["__version__", *_HOMES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
