"""Plans in words, for the commands that print them."""

from penstock.check import Facts
from penstock.errors import count_of
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule


def describe_plan(plan: Schedule | Program, facts: Facts) -> str:
    """Return the size of a proved plan in words, with the most activations that each rank holds at once."""
    sizes = {
        "rank": plan.num_ranks,
        "stage": plan.num_stages,
        "microbatch": plan.num_microbatches,
        "action": facts.num_actions,
    }
    if isinstance(plan, Program):
        sizes["instruction"] = plan.num_instructions
    parts = [count_of(number, noun) for noun, number in sizes.items()]
    held = ", ".join(str(most) for most in facts.peak_activations)
    return f"{', '.join(parts)}; peak activations per rank {held}"
