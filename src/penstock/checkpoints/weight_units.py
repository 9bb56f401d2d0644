"""Which rank gives which units of weights to others: to files, or to processes that receive weights."""

from collections.abc import Collection, Sequence

from penstock.checkpoints.agreement import failing_as
from penstock.checkpoints.content import RankDescription
from penstock.checkpoints.weight_format import ConversionUnit, WeightFormat
from penstock.errors import NotSaved
from penstock.pipeline import Pipeline


def units_by_rank(
    pipeline: Pipeline,
    format: WeightFormat,
    descriptions: Sequence[RankDescription],
    names_by_rank: Sequence[Collection[str]],
) -> list[list[ConversionUnit]]:
    """Return the units of each rank, per rank: a unit is of the rank that owns its first name, by `names_by_rank`.

    Every rank calls it. Raises: NotSaved, on every rank.
    """
    control = pipeline.control
    local_types = descriptions[control.rank]["weights"]
    units: list[list[ConversionUnit]] = control.together(lambda: format.units(local_types), failing_as(NotSaved))
    owned_units = [
        [unit for unit in rank_units if unit["names"][0] in names]
        for rank_units, names in zip(units, names_by_rank, strict=True)
    ]
    control.together(lambda: _require_all(format, owned_units), failing_as(NotSaved))
    return owned_units


def _require_all(format: WeightFormat, units: Sequence[Sequence[ConversionUnit]]) -> None:
    """Refuse units of all ranks that lack a tensor, or of which two make the same one. Raises: CheckpointError."""
    all_units = [unit for rank_units in units for unit in rank_units]
    format.require_all([name for unit in all_units for name in unit["names"]])
    makers: dict[str, list[str]] = {}
    for unit in all_units:
        for name in unit["file_types"]:
            if name in makers:
                raise NotSaved(
                    f"{unit['names'][0]!r} and {makers[name][0]!r} are saved as one tensor, {name!r}, but no rank has "
                    "both; let one stage hold them"
                )
            makers[name] = unit["names"]
