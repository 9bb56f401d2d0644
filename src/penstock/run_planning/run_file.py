"""The run file of a planned layout: a base run file with other keys, whose comments stay, or a new one.

BASE.toml  ──► [pipeline] ranks, schedule, split ...   [parallel] data, shard   [batch] size, length   [plan]
"""

from collections.abc import Mapping
from typing import Any

import tomlkit
from tomlkit.items import Table

from penstock.searching.layouts.planned import PlannedLayout
from penstock.train.settings.config import config_from_table
from penstock.train.settings.sections import ModelSection

Settings = Mapping[str, Mapping[str, Any]]
"""Values by section and key; None takes a key out."""

HEADER = "Written by penstock plan; penstock train runs it as it is."
STAY_FOR_TRANSFORMERS = ("dtype", "length", "verify")
"""The keys of [model] that stay where a model of transformers takes the place of another one."""
STAY_FOR_SOURCE = ("vocabulary", "length", "options", "loss")
"""The keys of [model] that stay where a function that makes layers takes the place of another model."""
PLACEHOLDER = "the sources of Python's standard library; your own text goes here, as files = [...]"


def layout_settings(row: PlannedLayout, schedule_file: str) -> dict[str, dict[str, Any]]:
    """Return the keys that make a run of a layout; a searched schedule is named by its file."""
    layout, is_family = row.layout, bool(row.family)
    pipeline = {
        "ranks": layout.pipeline,
        "schedule": row.family if is_family else schedule_file,
        "stages_per_rank": row.stages_per_rank if is_family else None,
        "microbatches": layout.microbatches,
        "split": list(row.split),
        "activation_checkpointing": layout.checkpointing,
    }
    # What another plan has said of the same things would contradict this one.
    replaced = ("options", "microbatch_size", "slices", "layers_per_stage", "memory_limit", "costs", "offload")
    return {
        "pipeline": pipeline | dict.fromkeys(replaced),
        "parallel": {"data": layout.data, "shard": layout.shard, "residency": None, "look_ahead": None},
    }


def run_file_text(base: str, settings: Settings) -> str:
    """Return a run file with these settings in the place of those of `base`, whose comments and other keys stay.

    Raises:
        ConfigError: the result is no run file, with all reasons.
    """
    document = tomlkit.parse(base)
    if not base:
        document.add(tomlkit.comment(HEADER))
    for name, values in settings.items():
        section = document.setdefault(name, tomlkit.table())
        for key, value in values.items():
            _set(section, key, value)
        if not section:
            document.remove(name)
    config_from_table(document.unwrap())
    return tomlkit.dumps(document)


def settings_of_model(base: str, model: Mapping[str, Any], folder: str) -> dict[str, dict[str, Any]]:
    """Return the settings by which a run file names a model: in a base in the place of those of its own model.

    `model` are the keys of [model] that name it, none where those of the base do; a new run file writes to `folder`.
    """
    if not base:
        return new_run_settings(folder, model)
    if not model:
        return {}
    stay = STAY_FOR_TRANSFORMERS if "transformers" in model else STAY_FOR_SOURCE
    return {"model": dict.fromkeys(key for key in ModelSection.model_fields if key not in stay) | dict(model)}


def new_run_settings(folder: str, model: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the settings of a run that has no base: where it writes, its model, some text, and its precision."""
    corpus = tomlkit.item("stdlib")
    corpus.comment(PLACEHOLDER)
    return {
        "run": {"folder": folder},
        "model": dict(model),
        "data": {"corpus": corpus},
        "precision": {"compute": "bfloat16"},
    }


def _set(section: Any, key: str, value: Any) -> None:
    """Put a value in the place of the one that is there, whose comment stays; None takes the key out."""
    if value is None:
        section.pop(key, None)
        return
    item = tomlkit.item(value)
    if isinstance(item, Table):
        item = tomlkit.inline_table()
        item.update(value)
    if key in section and hasattr(section[key], "trivia"):
        old = section[key].trivia
        item.trivia.comment_ws, item.trivia.comment, item.trivia.trail = old.comment_ws, old.comment, old.trail
    section[key] = item
