"""Plans in words, for the commands that print them."""

from penstock.errors import count_of
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.proofs import Facts


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
    return f"{', '.join(parts)}; peak activations per rank {held}{omitted}"
