"""A planned layout for other trainers: its schedule as torch's CSV, and settings with the modules of each part.

    torchtitan   schedule.csv, settings.toml   [parallelism] of a run of torchtitan
    automodel    schedule.csv, settings.yaml   the settings of NeMo Automodel's `AutoPipeline`

Both load the CSV by torch's runtime of schedules, which lays stages on ranks as a loop (rank = stage mod ranks) and has
no forward that runs again: so does the row that is exported.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import tomlkit

from penstock.errors import ConfigError
from penstock.ir.formats.torch_csv import table_to_csv
from penstock.ir.operations import Op
from penstock.lowering import FULL, NONE
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
    """Whether torch's runtime can run the schedule of a row: stages in a loop, none that runs again.

    With one rank, both trainers have no pipeline, and add up the gradients of one microbatch after the other.
    """
    placement = row.schedule.placement
    if placement.num_ranks == 1:
        return Op.RECOMPUTE not in row.schedule.ops
    loop = Placement.loop(placement.num_ranks, placement.num_stages)
    is_loop = placement.rank_of_stage == loop.rank_of_stage and len(placement.routes) == 1
    return is_loop and Op.RECOMPUTE not in row.schedule.ops and row.schedule.num_slices == 1


def export(
    kind: str, rows: Sequence[PlannedLayout], names: Sequence[Sequence[str]], batch: Batch, folder: str
) -> dict[str, str]:
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
    schedule = {SCHEDULE: table_to_csv(row.schedule)} if row.layout.pipeline > 1 else {}
    return schedule | {name: text}


def _sequences_at_once(row: PlannedLayout) -> int:
    """Return the sequences that a replica gets at once: those of a step, or without a pipeline of a microbatch.

    Without a pipeline the batch of a replica is one microbatch, and as many as the global batch asks for are added up.
    """
    layout = row.layout
    return layout.microbatch_size * (layout.microbatches if layout.pipeline > 1 else 1)


def module_names_of_parts(split: Sequence[int], names: Sequence[Sequence[str]]) -> list[list[str]]:
    """Return the names of modules of each stage, from those of each layer."""
    ends = [sum(split[: stage + 1]) for stage in range(len(split))]
    return [list(chain(*names[end - size : end])) for size, end in zip(split, ends, strict=True)]


def _torchtitan(row: PlannedLayout, parts: list[list[str]], batch: Batch, schedule: str) -> str:
    layout = row.layout
    shared = {"data_parallel_shard_degree": layout.data, "data_parallel_replicate_degree": 1}
    apart = {"data_parallel_shard_degree": 1, "data_parallel_replicate_degree": layout.data}
    pipeline = {
        "pipeline_parallel_schedule_csv": schedule,
        "pipeline_parallel_microbatch_size": layout.microbatch_size,
        "module_fqns_per_model_part": parts,
    }
    parallelism = {
        "pipeline_parallel_degree": layout.pipeline,
        **(pipeline if layout.pipeline > 1 else {}),
        **(apart if layout.shard == NONE else shared),
        # By default, weights stay whole beside a pipeline: those of stages that take turns would all be there at once.
        **({"fsdp_reshard_after_forward": "always"} if layout.shard == FULL else {}),
    }
    training = {
        "local_batch_size": _sequences_at_once(row),
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
        "pp_microbatch_size": layout.microbatch_size,
        "pp_batch_size": _sequences_at_once(row),
    }
    if layout.pipeline > 1:
        settings["pp_schedule_csv"] = schedule
        settings["module_fqns_per_model_part"] = [[*part, *_rotary_names(parts)] for part in parts]
    return "".join(f"{key}: {json.dumps(value)}\n" for key, value in settings.items())  # JSON is YAML, too


def _rotary_names(parts: Sequence[Sequence[str]]) -> list[str]:
    """Return the name of the module that makes rotary tables, beside the blocks of a model of transformers.

    Every part calls it. It has no parameters, so no layer names it, and Automodel removes what no part names.
    """
    blocks = (re.fullmatch(r"(.*\.)?layers\.\d+", name) for name in chain(*parts))
    prefixes = {block.group(1) or "" for block in blocks if block}
    return [f"{prefix}rotary_emb" for prefix in sorted(prefixes)]


SettingsOf = Callable[[PlannedLayout, list[list[str]], Batch, str], str]
SETTINGS: dict[str, tuple[str, SettingsOf]] = {
    "torchtitan": ("settings.toml", _torchtitan),
    "automodel": ("settings.yaml", _automodel),
}
"""The name of the file with settings, and what writes it, by the trainer."""
