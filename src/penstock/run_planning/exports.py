"""A planned layout for other trainers: its schedule as torch's CSV, and settings with the modules of each part.

    torchtitan   schedule.csv, settings.toml   [parallelism] of a run of torchtitan
    automodel    schedule.csv, settings.yaml   the settings of NeMo Automodel's `AutoPipeline`

Both load the CSV by torch's runtime of schedules, which lays stages on ranks as a loop (rank = stage mod ranks) and has
no forward that runs again: so does the row that is exported.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tomlkit

from penstock.errors import ConfigError
from penstock.ir.formats.torch_csv import table_to_csv
from penstock.ir.operations import Op
from penstock.lowering import NONE
from penstock.placement import Placement
from penstock.searching.layouts.planned import PlannedLayout

SCHEDULE = "schedule.csv"


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The batch of a step."""

    sequences: int
    """Sequences over all replicas."""
    sequence_length: int


def exportable(row: PlannedLayout) -> bool:
    """Whether torch's runtime can run the schedule of a row: stages in a loop, none that runs again."""
    placement = row.schedule.placement
    loop = Placement.loop(placement.num_ranks, placement.num_stages)
    is_loop = placement.rank_of_stage == loop.rank_of_stage and len(placement.routes) == 1
    return is_loop and Op.RECOMPUTE not in row.schedule.ops and row.schedule.num_slices == 1


def export(kind: str, rows: Sequence[PlannedLayout], names: Sequence[str], batch: Batch, folder: str) -> dict[str, str]:
    """Return the files of an export, by their names, for the best row that torch's runtime can run.

    `names` are those of the modules of each layer, `folder` is where the files will lie.

    Raises:
        ConfigError: no row has such a schedule.
    """
    row = next(filter(exportable, rows), None)
    if row is None:
        styles = ", ".join(sorted({row.schedule_name for row in rows}))
        raise ConfigError(
            f"torch's runtime lays stages as a loop and runs no forward again, but the layouts have {styles}; run them "
            "with penstock train",
            key="--export",
        )
    name, settings_of = SETTINGS[kind]
    text = settings_of(row, module_names_of_parts(row.split, names), batch, f"{folder}/{SCHEDULE}")
    return {SCHEDULE: table_to_csv(row.schedule), name: text}


def module_names_of_parts(split: Sequence[int], names: Sequence[str]) -> list[list[str]]:
    """Return the names of modules of each stage."""
    ends = [sum(split[: stage + 1]) for stage in range(len(split))]
    return [list(names[end - size : end]) for size, end in zip(split, ends, strict=True)]


def _torchtitan(row: PlannedLayout, parts: list[list[str]], batch: Batch, schedule: str) -> str:
    layout = row.layout
    shared = {"data_parallel_shard_degree": layout.data, "data_parallel_replicate_degree": 1}
    apart = {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": layout.data}
    parallelism = {
        "pipeline_parallel_degree": layout.pipeline,
        "pipeline_parallel_schedule_csv": schedule,
        "pipeline_parallel_microbatch_size": layout.microbatch_size,
        "module_fqns_per_model_part": parts,
        **(apart if layout.shard == NONE else shared),
    }
    training = {
        "local_batch_size": layout.microbatch_size * layout.microbatches,
        "global_batch_size": batch.sequences,
        "seq_len": batch.sequence_length,
    }
    checkpoint = {"mode": layout.checkpointing}
    sections: Mapping[str, Any] = {
        "training": training,
        "parallelism": parallelism,
        "activation_checkpoint": checkpoint,
    }
    return tomlkit.dumps(sections)


def _automodel(row: PlannedLayout, parts: list[list[str]], batch: Batch, schedule: str) -> str:
    layout = row.layout
    settings: dict[str, Any] = {
        "pp_size": layout.pipeline,
        "dp_size": layout.data,
        "pp_schedule_csv": schedule,
        "pp_microbatch_size": layout.microbatch_size,
        "pp_batch_size": layout.microbatch_size * layout.microbatches,
        "module_fqns_per_model_part": parts,
    }
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())  # JSON is YAML, too


SettingsOf = Callable[[PlannedLayout, list[list[str]], Batch, str], str]
SETTINGS: dict[str, tuple[str, SettingsOf]] = {
    "torchtitan": ("settings.toml", _torchtitan),
    "automodel": ("settings.yaml", _automodel),
}
"""The name of the file with settings, and what writes it, by the trainer."""
