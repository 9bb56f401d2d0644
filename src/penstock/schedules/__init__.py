"""Families of schedules by name, and `build`, which makes a schedule.

A new family is one file here with a `FAMILY`, named in the tuple below, and its drawn test; `phases` is the vocabulary
for its order. Families of other distributions join through the registry.
"""

from collections.abc import Mapping
from dataclasses import replace
from operator import index

from penstock.errors import ConfigError, count_of, described, nearest, shortened
from penstock.ir.formats.cells import MAX_SLICE
from penstock.ir.schedule import Schedule
from penstock.schedules import (
    breadth_depth,
    chimera,
    dualpipe,
    dualpipe_v,
    forward_only,
    gpipe,
    group_interleaved,
    hanayo,
    interleaved_one_f_one_b,
    interleaved_zb,
    looped_bfs,
    one_f_one_b,
    seq1f1b,
    sequential,
    zb_h1,
    zb_h2,
    zbv,
)
from penstock.schedules.custom import RequestedSizes, ScheduleFunction, custom_schedule
from penstock.schedules.family import Family, Shape, with_common
from penstock.schedules.options import Choice, Number, Option, Options
from penstock.schedules.registry import find_installed, is_family_name, load_installed, plug_ins
from penstock.schedules.v import one_f_one_b_v, v_half, v_min, v_zb

MAX_FORWARDS = 50_000_000
"""Planning takes 180 to 250 bytes per forward at its peak (bench/planning.py --once), so this many take 9 to 13 GB."""

MAX_SLICES = MAX_SLICE + 1

MAX_NAMED_FAMILIES = 3
"""The number of families that a message names to take instead; `penstock schedules` lists all."""

STREAMS = ("deepspeed-train", "deepspeed-inference")
"""DeepSpeed's names of its two streams of instructions, which are a format here."""

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        sequential.FAMILY,
        gpipe.FAMILY,
        one_f_one_b.FAMILY,
        seq1f1b.FAMILY,
        zb_h1.FAMILY,
        zb_h2.FAMILY,
        zbv.FAMILY,
        interleaved_one_f_one_b.FAMILY,
        looped_bfs.FAMILY,
        breadth_depth.FAMILY,
        interleaved_zb.FAMILY,
        group_interleaved.FAMILY,
        dualpipe.FAMILY,
        dualpipe_v.FAMILY,
        chimera.FAMILY,
        hanayo.FAMILY,
        v_min.FAMILY,
        v_half.FAMILY,
        v_zb.FAMILY,
        one_f_one_b_v.FAMILY,
        forward_only.FAMILY,
    )
}


def find_family(name: str) -> Family:
    """Return a family that comes with Penstock, or else one of another distribution.

    Raises:
        ConfigError: for an unknown name, or a plug-in that cannot be used.
    """
    if name in FAMILIES:
        return FAMILIES[name]
    plug_in = find_installed(name)
    if plug_in is not None:
        return plug_in.family(FAMILIES)
    if name in STREAMS:
        flags = "--lowered" if name == STREAMS[0] else "--forward-only --lowered"
        raise ConfigError(
            f"there is no schedule {shortened(name)}: it is how DeepSpeed runs 1f1b, which `penstock show 1f1b {flags} "
            "--to deepspeed` writes"
        )
    names = [*FAMILIES, *sorted({plug_in.name for plug_in in plug_ins()} - set(FAMILIES))]
    raise ConfigError(f"there is no schedule {shortened(name)}; known: {', '.join(names)}.{nearest(name, names)}")


def installed_families() -> tuple[dict[str, Family], list[str]]:
    """Return the families of other distributions, and what is wrong with those that cannot be used."""
    return load_installed(FAMILIES)


def build(
    name: str | ScheduleFunction,
    *,
    ranks: int,
    microbatches: int,
    stages_per_rank: int | None = None,
    stages: int | None = None,
    slices: int = 1,
    forward_only: bool = False,
    **options: object,
) -> Schedule:
    """Make the schedule of a family, given by its name, or of your own function.

    `stages` is the total number of stages, where it is not `ranks` x `stages_per_rank`. Without either, a family takes
    its own default number of stages per rank. `slices` cuts each microbatch along the sequence into so many parts.
    `forward_only` drops the backwards, for evaluation. Your function gets what it names as parameters, and returns rows
    of actions (docs/schedules.md).

    Raises:
        ConfigError: for an unknown name or option, a count below 1, or a shape that the family refuses.
    """
    ranks, microbatches = _require_count("ranks", ranks), _require_count("microbatches", microbatches)
    slices = _require_count("slices", slices)
    if slices > MAX_SLICES:
        raise ConfigError(f"{slices} are too many; at most {MAX_SLICES:,} can be numbered, use fewer", key="slices")
    # None stands for a size that the caller leaves to the family or the function.
    stages_per_rank = None if stages_per_rank is None else _require_count("stages_per_rank", stages_per_rank)
    stages = None if stages is None else _require_count("stages", stages)
    sizes = RequestedSizes(ranks, microbatches, slices, stages_per_rank, stages, forward_only)
    if isinstance(name, str):
        schedule = _family_schedule(name, sizes, options)
    else:
        schedule = custom_schedule(name, sizes, options)
    if forward_only and not schedule.is_forward_only:
        return replace(schedule.forward_only(), name=schedule.name)
    return schedule


def _family_schedule(name: str, sizes: RequestedSizes, options: Mapping[str, object]) -> Schedule:
    family = find_family(name)
    option_values = family.read_options(options)
    if sizes.stages_per_rank is None and sizes.stages is None:
        sizes = replace(sizes, stages_per_rank=family.default_stages_per_rank(option_values))
    num_stages = _resolve_stages(family, sizes)
    ranks, microbatches, slices = sizes.ranks, sizes.microbatches, sizes.slices
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
    return with_common(family.generate(Shape(ranks, num_stages, microbatches, slices), option_values), option_values)


def _require_count(key: str, value: object) -> int:
    """Return a count as an int, also where it is one of numpy's. Raises: ConfigError, for anything but a count."""
    try:
        count = index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConfigError(f"{described(value)}; give a whole number of 1 or more", key=key) from None
    if isinstance(value, bool):
        raise ConfigError(f"{described(value)}; give a whole number of 1 or more", key=key)
    if count < 1:
        raise ConfigError(f"{count} is below 1; give a number of 1 or more", key=key)
    return count


def _resolve_stages(family: Family, sizes: RequestedSizes) -> int:
    """Return the total number of stages of a schedule: as the caller asks for, or by the family's default per rank.

    `family.stages_per_rank` are the numbers per rank that the family allows, its default first; a 0 among them allows
    any number, also stages that do not divide evenly among the ranks.

    Raises:
        ConfigError: the family does not allow the number, the two numbers of `sizes` differ, or a rank would be empty.
    """
    allowed_counts, ranks = family.stages_per_rank, sizes.ranks
    stages_per_rank, stages = sizes.stages_per_rank, sizes.stages
    if stages is not None:
        per_rank, remainder = divmod(stages, ranks)
        if stages_per_rank not in (None, per_rank):
            raise ConfigError(
                f"{count_of(stages, 'stage')} on {count_of(ranks, 'rank')} and {stages_per_rank} per rank are given; "
                "give one of the two",
                key="stages",
            )
        if 0 not in allowed_counts and (remainder or per_rank not in allowed_counts):
            fix = f"give {ranks * allowed_counts[0]}" if remainder else _fix_for(per_rank, family)
            raise ConfigError(
                f"{family.name} takes {_allowed_text(family)} per rank, not {stages} on {ranks}; {fix}", key="stages"
            )
        if stages < ranks:
            raise ConfigError(
                f"{count_of(stages, 'stage')} for {ranks} ranks; give {ranks} or more, so that none is empty",
                key="stages",
            )
        return stages
    num_per_rank = allowed_counts[0] if stages_per_rank is None else stages_per_rank
    if num_per_rank not in allowed_counts and 0 not in allowed_counts:
        raise ConfigError(
            f"{family.name} takes {_allowed_text(family)} per rank, got {num_per_rank}; "
            f"{_fix_for(num_per_rank, family)}",
            key="stages_per_rank",
        )
    return ranks * num_per_rank


def _fix_for(per_rank: int, family: Family) -> str:
    """Name families that take so many stages per rank, those first whose names contain the name of this one."""
    names = [name for name, candidate in FAMILIES.items() if {per_rank, 0}.intersection(candidate.stages_per_rank)]
    names.sort(key=lambda name: family.name not in name)
    return f"leave it out, or take a family with {per_rank}, such as {', '.join(names[:MAX_NAMED_FAMILIES])}"


def _allowed_text(family: Family) -> str:
    counts = " or ".join(str(count) for count in family.stages_per_rank)
    return f"{counts} stage{'' if counts == '1' else 's'}"


__all__ = [
    "FAMILIES",
    "Choice",
    "Family",
    "Number",
    "Option",
    "Options",
    "ScheduleFunction",
    "Shape",
    "build",
    "find_family",
    "installed_families",
    "is_family_name",
]
