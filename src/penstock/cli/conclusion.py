"""The single lines of a diagnosis: the largest cause, whether the machine was busy, and what to do next."""

import shlex
from collections.abc import Sequence

from penstock.searching.advice import WORTH_SHARE, Advice
from penstock.searching.what_if import Change
from penstock.show.text import count_of, format_share
from penstock.simulation.causes import NAME_OF_CAUSE, Cause
from penstock.simulation.costs.costs import Spread
from penstock.simulation.costs.variation import BUSY_SHARE, largest_variation
from penstock.simulation.losses import Loss
from penstock.train.watching.diagnosis import Diagnosis

FIXES = {
    Cause.TRANSFER: "use a faster link between neighbours",
    Cause.STRAGGLER: "look for other programs, clocks and thermal limits (penstock doctor --system)",
    Cause.LAUNCH: "use larger microbatches, or compile the layers",
    Cause.DATA: "load the data sooner, with workers or ps.Stream",
}
"""The fix of each cause that another split, schedule or number of microbatches does not remove."""


def headline(diagnosis: Diagnosis) -> str:
    """Return a line with the largest cause, as it is in the first row of the table, and the second."""
    costly = [loss for loss in diagnosis.losses if loss.duration_s >= WORTH_SHARE * diagnosis.step_s]
    if not costly:
        return f"no cause costs {100 * WORTH_SHARE:.0f} % of the step"
    first_text, *more_texts = [_cause_text(diagnosis, loss) for loss in costly[:2]]
    return f"largest cause: {'; then '.join([first_text, *more_texts])}"


def _cause_text(diagnosis: Diagnosis, loss: Loss) -> str:
    who = f" ({who_of(loss)})" if loss.culprit else ""
    return f"{NAME_OF_CAUSE[loss.cause]}, {format_share(loss.duration_s / diagnosis.step_s)} of the step{who}"


def who_of(loss: Loss) -> str:
    return f"the order of {loss.culprit}" if loss.cause is Cause.DEPENDENCY else loss.culprit


def busy_line(spreads: Sequence[Spread], rank_of_stage: Sequence[int]) -> str:
    """Return a line that the machine was busy while it was measured; empty where it was not."""
    variation = largest_variation(spreads)
    if variation is None or not variation.is_busy:
        return ""
    where = f"stage {variation.stage} on rank {rank_of_stage[variation.stage]}"
    return (
        f"busy machine: the middle half of equal computations of {where} spreads over {format_share(variation.share)} "
        f"of their median (expected: under {100 * BUSY_SHARE:.0f} %); measure again on an idle machine"
    )


def next_step(diagnosis: Diagnosis, advice: Advice) -> str:
    """Return a line on what to do next, or that nothing is worth doing."""
    steps = [*_fix(diagnosis, advice), *([_with_cost(advice.best)] if advice.best else [])]
    text = "; then ".join(steps) if steps else _nothing(diagnosis, advice)
    more = _more_for_memory(advice) if advice.best else ""
    if diagnosis.is_busy:
        return f"do next: measure again on an idle machine. If the result is the same: {text}{more}"
    return f"do next: {text}{more}"


def _fix(diagnosis: Diagnosis, advice: Advice) -> list[str]:
    """Return the fix of the largest cause that no change of plan removes, if it costs more than the best one saves."""
    least = max(WORTH_SHARE, -advice.best.step_change if advice.best else 0.0)
    fixable = (loss for loss in diagnosis.losses if loss.cause in FIXES)  # the largest comes first
    loss = next((loss for loss in fixable if loss.duration_s > least * diagnosis.step_s), None)
    if loss is None:
        return []
    who = f", {loss.culprit}" if loss.culprit else ""
    cost = f"{format_share(loss.duration_s / diagnosis.step_s)} of the step{who}"
    program = diagnosis.timeline.program
    has_fewer = loss.cause is Cause.TRANSFER and program.num_stages > program.num_ranks
    or_fewer = ", or fewer stages per rank" if has_fewer else ""
    return [f"against {NAME_OF_CAUSE[loss.cause]} ({cost}): {FIXES[loss.cause]}{or_fewer}"]


def _with_cost(change: Change) -> str:
    command = f"penstock train RUN.toml {options_of(change)}" if change.settings else change.text
    memory_text = f", {format_share(change.memory_change)} more activations" if change.memory_change > 0 else ""
    label = f"{change.text}: " if change.settings else ""
    return f"{command} ({label}{format_share(-change.step_change)} less step time{memory_text})"


def options_of(change: Change) -> str:
    """Return the options of the command line that make a change."""
    return " ".join(f"--set {shlex.quote(setting)}" for setting in change.settings)


def _more_for_memory(advice: Advice) -> str:
    """Return a sentence on the change that saves notably more than the best one, but costs memory; empty for none."""
    assert advice.best is not None
    enough = advice.best.step_change - WORTH_SHARE
    better_changes = [change for change in advice.costly if change.step_change <= enough]
    return f". For more memory: {_saving(better_changes[0])}" if better_changes else ""


def _nothing(diagnosis: Diagnosis, advice: Advice) -> str:
    if advice.costly:
        return f"nothing, unless memory is left over: {_saving(advice.costly[0])}"
    if advice.second_copy:
        return f"nothing, unless memory is left over: {_saving(advice.second_copy[0])}"
    tried = count_of(len(diagnosis.changes), "simulated change")
    return f"nothing; of {tried} none saves {100 * WORTH_SHARE:.0f} % of the step"


def _saving(change: Change) -> str:
    price = f"{format_share(change.memory_change)} more activations"
    if change.copies_weights:
        price = "a second copy of the weights" + (f" and {price}" if change.memory_change > 0 else "")
    return f"{change.text} saves {format_share(-change.step_change)} of the step with {price}"
