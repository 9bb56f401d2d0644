"""Texts of schedules and programs: read, written in another format, proved on the way, and told in words."""

from dataclasses import replace

from penstock.errors import count_of
from penstock.ir.formats import WITH_COMMUNICATION
from penstock.ir.program import Program
from penstock.ir.reading import format_of, read_table
from penstock.ir.schedule import Schedule
from penstock.ir.writing import write_table
from penstock.lowering import assign_slots, lower
from penstock.proofs import Facts, check
from penstock.show.text import format_bytes


def read_plan(text: str, *, file: str, name: str | None = None, format: str | None = None) -> Schedule | Program:
    """Read a schedule or program, by default in the format of its content; `name` is for a text without one.

    Raises:
        FormatError: with line and column, for a text that cannot be read.
    """
    format = format or format_of(text)
    plan = read_table(text, file=file, name=name, format=format)
    # CSV has no place for slots.
    return assign_slots(plan) if isinstance(plan, Program) and format == "csv" else plan


def convert(plan: Schedule | Program, format: str, *, file: str, is_lowered: bool = False) -> tuple[str, str]:
    """Return the text of a proved plan, lowered with `is_lowered`, and the plan in words.

    Formats that cannot hold communication drop it. `file` is what errors name.

    Raises:
        ConfigError: if the new format cannot express the plan.
        ScheduleError: if it is wrong.
    """
    if format not in WITH_COMMUNICATION:
        plan = plan.actions()
    facts = check(replace(plan, name=file))
    if is_lowered and isinstance(plan, Schedule):
        plan = lower(plan)
        facts = check(plan)
    return write_table(plan, format), describe_plan(plan, facts)


def describe_plan(plan: Schedule | Program, facts: Facts) -> str:
    """Return the size of a proved plan in words, with the most activations that each rank holds at once.

    A training program without its reductions is named as such: whoever runs it must reduce the gradients.
    """
    sizes = {
        "rank": plan.num_ranks,
        "stage": plan.num_stages,
        "microbatch": plan.num_microbatches,
        "action": facts.num_actions,
    }
    if isinstance(plan, Program):
        sizes["instruction"] = plan.num_instructions
    parts = [count_of(number, noun) for noun, number in sizes.items()]
    peaks = ", ".join(str(most) for most in facts.peak_activations)
    omitted = "; it omits the reductions of its gradients: whoever runs it must do them" * facts.omits_reductions
    whole_stages = (
        "" if facts.peak_whole is None else f"; whole stages per rank {', '.join(map(str, facts.peak_whole))}"
    )
    return f"{', '.join(parts)}; peak activations per rank {peaks}{_bytes(facts)}{whole_stages}{omitted}"


def _bytes(facts: Facts) -> str:
    """Return the most bytes of each rank, and the sizes that were counted as 0; empty where no bytes were proved."""
    if facts.peak_bytes is None or facts.static_bytes is None:
        return ""
    totals = [sum(parts) for parts in zip(facts.peak_bytes, facts.static_bytes, strict=True)]
    missing = f" (not given, counted as 0: {', '.join(facts.not_counted)})" if facts.not_counted else ""
    return f"; peak bytes per rank {', '.join(map(format_bytes, totals))}{missing}"
