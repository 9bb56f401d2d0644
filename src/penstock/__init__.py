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

_NAMES = {
    "penstock.checkpoints.cutting": "cut",
    "penstock.checkpoints.loading": "load_checkpoint",
    "penstock.checkpoints.verification": "latest_checkpoint",
    "penstock.checkpoints.writer": "save_checkpoint",
    "penstock.errors": (
        "CheckpointError ConfigError DeadlineExceeded EndOfData FormatError NotFinite NotSaved PartitionError "
        "PeerLost PenstockError PenstockWarning PipelineError ScheduleError StepRefused"
    ),
    "penstock.execute.batch.microbatch": "BatchSpec Concat PreSplit Replicate Split Stack Sum",
    "penstock.execute.batch.preprocessing": "StreamContext",
    "penstock.execute.batch.stream": "Part Stream",
    "penstock.execute.losses.output": "LossOutput",
    "penstock.execute.observing.observer": "Observer",
    "penstock.execute.split.wanted": "wants_input_gradient wants_weight_gradient",
    "penstock.hugging_face.from_transformers": "from_transformers",
    "penstock.ir.action": "Action Kind",
    "penstock.ir.chain": "chain",
    "penstock.ir.program": "Program",
    "penstock.ir.recompute": "with_recompute",
    "penstock.ir.schedule": "Schedule",
    "penstock.ir.timeline": "Timeline",
    "penstock.lowering": "lower",
    "penstock.microbatch_place": "MicrobatchPlace",
    "penstock.models": "AuxiliaryLoss Carry LayerSpec Skip",
    "penstock.pipeline": "Pipeline",
    "penstock.placement": "Placement",
    "penstock.planning": "plan",
    "penstock.proofs": "check",
    "penstock.schedules": "build",
    "penstock.searching.joint.search_joint": "search_joint",
    "penstock.searching.search": "search",
    "penstock.show.picture": "draw",
    "penstock.simulation": "Costs LayerCosts simulate",
    "penstock.sizing.estimate": "estimate",
    "penstock.train.measuring.measure": "measure_layers",
    "penstock.verifying.verify": "verify",
}
"""The public names of each module."""
_MODULES = ("losses",)
"""The modules that are public as they are."""
_HOMES = {name: module for module, names in _NAMES.items() for name in names.split()}
"""The module of each public name."""

__all__ = ["__version__", *_HOMES, *_MODULES]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    if name in _MODULES:
        return import_module(f"penstock.{name}")
    raise AttributeError(f"module 'penstock' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
