"""Pipeline-parallel training for PyTorch in which the schedule is data.

    schedule = ps.build("1f1b", ranks=4, microbatches=8)      what every rank does, in order
    ps.check(schedule)                                        proved before it runs
    program = ps.lower(schedule)                              with messages, reductions and buffers
    timeline = ps.simulate(program, ps.Costs.uniform())       predicted
    pipeline = ps.Pipeline(layers, schedule, loss=loss)       executed unchanged, on 1 process or many

Names that need torch load on first use, so that planning starts without it.
"""

from importlib import import_module
from typing import Any

from penstock.errors import (
    CheckpointError,
    ConfigError,
    DeadlineExceeded,
    EndOfData,
    FormatError,
    NotFinite,
    PartitionError,
    PeerLost,
    PenstockError,
    PenstockWarning,
    PipelineError,
    ScheduleError,
    StepRefused,
)
from penstock.ir.action import Action, Kind
from penstock.ir.program import Program
from penstock.ir.recompute import with_recompute
from penstock.ir.schedule import Schedule
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.planning import plan
from penstock.proofs import check
from penstock.schedules import build
from penstock.simulation import Costs, LayerCosts, simulate
from penstock.version import VERSION

__version__ = VERSION

_ON_FIRST_USE = {
    "AuxiliaryLoss": "penstock.models",
    "BatchSpec": "penstock.execute.batch.microbatch",
    "Carry": "penstock.models",
    "LayerSpec": "penstock.models",
    "LossOutput": "penstock.execute.losses.output",
    "Observer": "penstock.execute.observing.observer",
    "Pipeline": "penstock.pipeline",
    "PreSplit": "penstock.execute.batch.microbatch",
    "Replicate": "penstock.execute.batch.microbatch",
    "Skip": "penstock.models",
    "Split": "penstock.execute.batch.microbatch",
    "Stream": "penstock.execute.batch.stream",
    "measure_layers": "penstock.train.measure",
}


def __getattr__(name: str) -> Any:
    if name in _ON_FIRST_USE:
        return getattr(import_module(_ON_FIRST_USE[name]), name)
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__


__all__ = [
    "Action",
    "AuxiliaryLoss",
    "BatchSpec",
    "Carry",
    "CheckpointError",
    "ConfigError",
    "Costs",
    "DeadlineExceeded",
    "EndOfData",
    "FormatError",
    "Kind",
    "LayerCosts",
    "LayerSpec",
    "LossOutput",
    "NotFinite",
    "Observer",
    "PartitionError",
    "PeerLost",
    "PenstockError",
    "PenstockWarning",
    "Pipeline",
    "PipelineError",
    "Placement",
    "PreSplit",
    "Program",
    "Replicate",
    "Schedule",
    "ScheduleError",
    "Skip",
    "Split",
    "StepRefused",
    "Stream",
    "__version__",
    "build",
    "check",
    "lower",
    "measure_layers",
    "plan",
    "simulate",
    "with_recompute",
]
