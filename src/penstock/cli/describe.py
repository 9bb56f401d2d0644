"""Plans in words, for the commands that print them."""

from penstock.errors import count_of
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.proofs import Facts
from penstock.show.text import format_bytes


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
    held = ", ".join(str(most) for most in facts.peak_activations)
    omitted = "; it omits the reductions of its gradients: whoever runs it must do them" * facts.omits_reductions
    return f"{', '.join(parts)}; peak activations per rank {held}{_bytes(facts)}{omitted}"


def _bytes(facts: Facts) -> str:
    """The most bytes of each rank, with what counts as 0."""
    if facts.peak_bytes is None or facts.static_bytes is None:
        return ""
    totals = [sum(parts) for parts in zip(facts.peak_bytes, facts.static_bytes, strict=True)]
    missing = f" (not given, counted as 0: {', '.join(facts.not_counted)})" if facts.not_counted else ""
    return f"; peak bytes per rank {', '.join(map(format_bytes, totals))}{missing}"
