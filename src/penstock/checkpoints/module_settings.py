"""What modules compute by beside their tensors, such as the scale of an adapter, which checkpoints compare."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.checkpoints.agreement import failing_as
from penstock.errors import CheckpointError, NotSaved
from penstock.execute.transport.calls import collective
from penstock.pipeline import Pipeline

Settings = dict[str, dict[str, Any]]
"""By name of a module, then by name of a setting: a number."""


def joined_settings(settings_of_ranks: Sequence[Settings]) -> Settings:
    """Return the settings of all modules; replicas and copies of a module have the same. Raises: NotSaved."""
    settings: Settings = {}
    entries = [
        (name, key, value)
        for rank_settings in settings_of_ranks
        for name, module_settings in rank_settings.items()
        for key, value in module_settings.items()
    ]
    for name, key, value in entries:
        known = settings.setdefault(name, {}).setdefault(key, value)
        if known != value:
            raise NotSaved(
                f"{name!r} has {key}={known!r} on one rank and {key}={value!r} on another; give all ranks one model"
            )
    return settings


@collective
def require_settings(pipeline: Pipeline, saved_settings: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Refuse a checkpoint whose modules computed by other settings than those of this model; every rank calls it.

    Modules that only one of the two has are left to the comparison of tensors. Raises: CheckpointError, on every rank.
    """

    def require_equal() -> None:
        entries = [(name, *item) for name, settings in pipeline.module_settings.items() for item in settings.items()]
        for name, key, value in entries:
            saved = saved_settings.get(name, {}).get(key, value)
            if saved != value:
                raise CheckpointError(
                    f"{path}: {name!r} was trained with {key}={saved!r}, but has {key}={value!r} in the model. Build "
                    f"the model with the settings that it was trained with: {key}={saved!r}"
                )

    pipeline.control.together(require_equal, failing_as(CheckpointError))
