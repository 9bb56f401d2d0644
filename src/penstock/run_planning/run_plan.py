"""`RunPlan`: the best layouts of a training on a cluster, and how far they are from a bound."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError
from penstock.run_planning.exports import Batch, export
from penstock.run_planning.model import PlannedModel
from penstock.run_planning.run_file import layout_settings, run_file_text, settings_of_model
from penstock.searching.layouts.bounds import LayoutBound
from penstock.searching.layouts.choosing import ChosenLayouts
from penstock.searching.layouts.planned import PlannedLayout
from penstock.searching.layouts.problem import LayoutQuestion
from penstock.searching.result import gap_of

SCHEDULE_FILE = "schedule.json"


@dataclass(frozen=True, slots=True, eq=False)
class RunLayout:
    """One layout of a plan, and what is predicted of it."""

    planned: PlannedLayout
    question: LayoutQuestion
    step_flops: float
    """Floating-point operations of the model in a step, without what runs again; 0: unknown."""
    device_flops_per_s: float
    """What one device can do at most; 0: unknown."""

    @property
    def pipeline(self) -> int:
        return self.planned.layout.pipeline

    @property
    def data(self) -> int:
        return self.planned.layout.data

    @property
    def shard(self) -> str:
        return self.planned.layout.shard

    @property
    def schedule(self) -> str:
        """The name of its schedule."""
        return self.planned.schedule_name

    @property
    def step_s(self) -> float:
        return self.planned.step_s

    @property
    def step_range_s(self) -> tuple[float, float]:
        """The seconds between which a measured step is expected."""
        low, high = self.question.seconds_range
        return low * self.step_s, high * self.step_s

    @property
    def tokens_per_s(self) -> float:
        return self.question.global_batch * self.question.sequence_length / self.step_s

    @property
    def peak_bytes(self) -> int:
        """The most bytes that a rank holds."""
        return self.planned.peak_bytes

    @property
    def flops_utilization(self) -> float | None:
        """The model's operations as a share of what the devices can do; None where either is not known."""
        most = self.question.cluster.gpus * self.device_flops_per_s * self.step_s
        return self.step_flops / most if self.step_flops and most else None

    def to_dict(self) -> dict[str, Any]:
        """Return the layout and its prediction as plain values."""
        planned = self.planned
        return {
            "pipeline": self.pipeline,
            "data": self.data,
            "shard": self.shard,
            "schedule": self.schedule,
            "stages_per_rank": planned.stages_per_rank,
            "split": list(planned.split),
            "microbatches": planned.layout.microbatches,
            "microbatch_size": planned.layout.microbatch_size,
            "activation_checkpointing": planned.layout.checkpointing,
            "recomputed_stages": planned.num_recomputed,
            "step_s": self.step_s,
            "step_range_s": list(self.step_range_s),
            "tokens_per_s": self.tokens_per_s,
            "model_flops_utilization": self.flops_utilization,
            "peak_bytes": self.peak_bytes,
            "peak_bytes_of_ranks": planned.rank_bytes,
        }


@dataclass(frozen=True, slots=True, eq=False)
class RunPlan:
    """The best layouts of a training on a cluster."""

    chosen: ChosenLayouts
    question: LayoutQuestion
    model: PlannedModel
    step_flops: float = 0.0
    device_flops_per_s: float = 0.0
    notes: tuple[str, ...] = ()
    """How the bytes and seconds were found, and what was left out: a line each."""

    @property
    def layouts(self) -> tuple[RunLayout, ...]:
        """The layouts that were planned, the best first."""
        figures = (self.question, self.step_flops, self.device_flops_per_s)
        return tuple(RunLayout(planned, *figures) for planned in self.chosen.layouts)

    @property
    def best(self) -> RunLayout:
        return self.layouts[0]

    @property
    def bound(self) -> LayoutBound:
        """Seconds that no layout which may fit goes below."""
        return self.chosen.bound

    @property
    def gap(self) -> float:
        """The share of the bound by which the best step is above it."""
        return gap_of(self.best.step_s, self.bound.seconds)

    def to_json(self) -> str:
        """Return the plan as JSON."""
        chosen = self.chosen
        figures: Mapping[str, Any] = {
            "fits": True,
            "bound_s": self.bound.seconds,
            "bound": self.bound.name,
            "gap": self.gap,
            "num_layouts": chosen.num_layouts,
            "num_may_fit": chosen.num_may_fit,
            "num_evaluated": chosen.num_evaluated,
            "limit_bytes": self.question.cluster.limit_bytes,
            "layouts": [layout.to_dict() for layout in self.layouts],
            "notes": list(self.notes),
        }
        return json.dumps(figures, indent=2)

    def export(self, kind: str, folder: str) -> dict[str, str]:
        """Return files for another trainer, `torchtitan` or `automodel`, by name; they will lie in `folder`.

        They are of the best layout that torch's runtime of schedules can run. Raises: ConfigError, where none is.
        """
        question = self.question
        batch = Batch(sequences=question.global_batch, sequence_length=question.sequence_length)
        return export(kind, self.chosen.layouts, self.model.module_names, batch, folder)

    def run_toml(self, schedule_file: str = SCHEDULE_FILE, *, folder: str = "runs/planned") -> str:
        """Return the run file of the best layout; `schedule_file` is where a searched schedule will lie.

        With a base run file its comments and its other keys stay; a new one writes to `folder`.

        Raises:
            ConfigError: the model is none that a run file can name, or has no weights; or the result is no run file.
        """
        reason = self.model.no_run_file
        if reason:
            raise ConfigError(reason, key="model")
        best = self.best
        settings = settings_of_model(self.model.base_text, self.model.settings, folder)
        question = self.question
        batch = {"size": question.global_batch, "length": question.sequence_length}
        settings["batch"] = batch | dict.fromkeys(("accumulate", "samples", "tokens", "ramp_from", "ramp_steps"))
        settings |= layout_settings(best.planned, schedule_file)
        settings["plan"] = {
            "step_s": float(f"{best.step_s:.6g}"),
            "step_range_s": [float(f"{seconds:.6g}") for seconds in best.step_range_s],
            "peak_bytes": best.planned.rank_bytes,
        }
        return run_file_text(self.model.base_text, settings)
