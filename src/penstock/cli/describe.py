"""Text about families and plans, for the commands that print them."""

from penstock.check import Facts
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.schedules import Choice, Family, Option


def describe_family(family: Family) -> str:
    """Return the facts of a family, one a line, then its options."""
    facts = {
        "placement": family.placement,
        "limits": family.restrictions,
        "bubble": family.bubble,
        "memory": family.memory,
        "use it": family.advice,
        "source": family.source,
    }
    lines = [f"{family.name}: {family.summary}"]
    lines += [f"  {name:<9}  {fact}" for name, fact in facts.items()]
    lines += [f"  {'option':<9}  {_describe_option(name, option)}" for name, option in family.options.items()]
    return "\n".join(lines)


def _describe_option(name: str, option: Option) -> str:
    values = "|".join(option.choices) if isinstance(option, Choice) else "N"
    return f"{name}={values} (default {option.default}): {option.help}"


def describe_plan(plan: Schedule | Program, facts: Facts) -> str:
    """Return the size of a proved plan in words, with the most activations that each rank holds at once."""
    parts = [
        f"{plan.num_ranks} ranks, {plan.num_stages} stages, {plan.num_microbatches} microbatches",
        f"{facts.num_actions} actions",
    ]
    if isinstance(plan, Program):
        parts.append(f"{plan.num_instructions} instructions")
    held = ", ".join(str(most) for most in facts.peak_activations)
    return f"{', '.join(parts)}; peak activations per rank {held}"
