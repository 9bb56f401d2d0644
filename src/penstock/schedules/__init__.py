"""Families of schedules: the registry, and `build`, which makes a schedule by name.

A new family is one file here with a `FAMILY`, named in the tuple below, and its drawn test.
"""

from penstock.errors import ConfigError, nearest
from penstock.ir.schedule import Schedule
from penstock.schedules import forward_only, gpipe, one_f_one_b, sequential
from penstock.schedules.family import Family, Shape
from penstock.schedules.options import Choice, Number, Option, Options

MAX_FORWARDS = 50_000_000
"""A table of this many forwards, with backwards and messages, takes some 10 GB."""

FAMILIES: dict[str, Family] = {
    family.name: family for family in (sequential.FAMILY, gpipe.FAMILY, one_f_one_b.FAMILY, forward_only.FAMILY)
}


def build(
    name: str,
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    stages: int | None = None,
    slices: int = 1,
    forward_only: bool = False,
    **options: object,
) -> Schedule:
    """Make the schedule of a family.

    `stages` is the total number, where it is not `ranks` x `stages_per_rank`. Without either, a family takes its own
    default number of stages per rank.

    Raises:
        ConfigError: for an unknown name or option, a count below 1, or a shape that the family refuses.
    """
    family = FAMILIES.get(name)
    if family is None:
        raise ConfigError(f"there is no schedule {name!r}; known: {', '.join(FAMILIES)}.{nearest(name, FAMILIES)}")
    counts = {"ranks": ranks, "microbatches": microbatches, "slices": slices}
    counts |= {
        key: value for key, value in (("stages_per_rank", stages_per_rank), ("stages", stages)) if value is not None
    }
    for key, count in counts.items():
        if count < 1:
            raise ConfigError(f"{count} is below 1; give a number of 1 or more", key=key)
    num_stages = _resolve_stages(family, ranks, stages_per_rank, stages)
    if slices > 1 and not family.takes_slices:
        raise ConfigError(
            f"{name} does not cut microbatches, got {slices}; use 1 slice or a family that does", key="slices"
        )
    num_actions = num_stages * microbatches * slices
    if num_actions > MAX_FORWARDS:
        raise ConfigError(
            f"{num_stages} stages x {microbatches} microbatches x {slices} slices are {num_actions:,} forwards; "
            f"at most {MAX_FORWARDS:,} fit in memory, use fewer"
        )
    shape = Shape(ranks, num_stages, microbatches, slices, forward_only)
    return family.generate(shape, family.read_options(options))


def _resolve_stages(family: Family, ranks: int, stages_per_rank: int | None, stages: int | None) -> int:
    """The total number of stages; 0 among the family's choices stands for any number."""
    allowed = family.stages_per_rank
    if stages is not None:
        per_rank, rest = divmod(stages, ranks)
        if stages_per_rank not in (None, per_rank):
            raise ConfigError(
                f"{stages} stages on {ranks} ranks are not {stages_per_rank} per rank; give one of the two",
                key="stages",
            )
        if 0 not in allowed and (rest or per_rank not in allowed):
            raise ConfigError(f"{family.name} takes {_allowed(family)} per rank, not {stages} on {ranks}", key="stages")
        if stages < ranks:
            raise ConfigError(f"{stages} stages leave some of {ranks} ranks empty; give {ranks} or more", key="stages")
        return stages
    chosen = allowed[0] if stages_per_rank is None else stages_per_rank
    if chosen not in allowed and 0 not in allowed:
        raise ConfigError(f"{family.name} takes {_allowed(family)} per rank, got {chosen}", key="stages_per_rank")
    return ranks * chosen


def _allowed(family: Family) -> str:
    counts = " or ".join(str(count) for count in family.stages_per_rank)
    return f"{counts} stage{'' if counts == '1' else 's'}"


__all__ = ["FAMILIES", "Choice", "Family", "Number", "Option", "Options", "Shape", "build"]
