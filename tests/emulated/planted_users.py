"""Planted faults in what users write: the hook of overlapped pairs, observers, collectives.

Each function under `plant` takes what the name stands for, and returns what it stands for with the fault.
"""

import platform

import torch

from tests.emulated.checker import DIFFER, HANG, PINNED, UNORDERED
from tests.emulated.planting import does_nothing, table

FAULTS, plant = table()
CAN_STEP = platform.machine() == "x86_64"
"""Whether a page of pinned memory may be opened for one instruction."""
OWN = "tests.emulated.planted_hooks:"
ON_TWO_STREAMS = "tests.emulated.pipelines:OnTwoStreams."


# ---- hooks of overlapped pairs


def _on_two_streams(without):
    """Return the hook's call without its wait at the begin or the end of a pair."""

    def run(hook, first, second):
        main = torch.accelerator.current_stream()
        hook.num_pairs += 1
        if without != "begin":
            hook._side.wait_stream(main)
        with hook._side:
            first()
        second()
        if without != "end":
            main.wait_stream(hook._side)

    return run


@plant(
    "the stream of a pair's forward does not wait for its inputs",
    "overlapped_pairs",
    f"{ON_TWO_STREAMS}__call__",
    UNORDERED,
    "",
    "addmm",
)
def _(original):
    return _on_two_streams("begin")


@plant(
    "nobody waits for the stream of a pair's forward",
    "overlapped_pairs",
    f"{ON_TWO_STREAMS}__call__",
    UNORDERED,
    "addmm",
    "",
)
def _(original):
    return _on_two_streams("end")


# ---- users' own code


@plant(
    "an average does not wait for the weights", "averaged_weights", f"{OWN}Average.begin", UNORDERED, "add_", "lerp_"
)
def _(original):
    return does_nothing(original)


@plant(
    "the optimizer does not wait for an average", "averaged_weights", f"{OWN}Average.end", UNORDERED, "lerp_", "add_"
)
def _(original):
    return does_nothing(original)


@plant(
    "an observer reads before its copies are there",
    "peaks_of_activations",
    f"{OWN}Peaks.read",
    PINNED,
    "copy to the host",
    "the host",
)
def _(original):
    return lambda peaks: peaks.found.tolist()


@plant(
    "an observer's marker is recorded before the copy",
    "peaks_of_activations",
    f"{OWN}Peaks.note",
    PINNED,
    "copy to the host",
    "the host",
    missed="" if CAN_STEP else "its copies share a page, which stays open once the host has touched a free part of it",
)
def _(original):
    def note(peaks, number, values):
        largest = values.detach().abs().max().reshape(1)
        peaks.copied.record()
        peaks.found[number : number + 1].copy_(largest, non_blocking=True)

    return note


@plant("nobody waits for a collective", "norms_over_ranks", f"{OWN}Norm.wait", UNORDERED, "all_reduce", "sqrt")
def _(original):
    return does_nothing(original)


@plant("a rank reduces another shape", "norms_over_ranks", f"{OWN}Norm.own", DIFFER, "all_reduce", "all_reduce")
def _(original):
    def own(norm, gradient):
        square = original(norm, gradient)
        return square.expand(1 + norm.messages.rank).contiguous()

    return own


@plant("a rank runs its collectives in another order", "norms_over_ranks", f"{OWN}Norm.reduce", DIFFER, "")
def _(original):
    def reduce(norm, square):
        if norm.messages.rank:
            norm.scale(square)
        return original(norm, square)

    return reduce


@plant("a rank leaves a collective out", "norms_over_ranks", f"{OWN}Norm.scale", HANG)
def _(original):
    return lambda norm, values: None if norm.messages.rank else original(norm, values)


@plant("both ranks send first", "statistics_of_two_ranks", f"{OWN}Statistics.sends_first", HANG)
def _(original):
    return lambda statistics: True


@plant(
    "nobody waits for numbers of another rank",
    "statistics_of_two_ranks",
    f"{OWN}Statistics.wait",
    UNORDERED,
    "recv from",
    "add",
)
def _(original):
    return does_nothing(original)


@plant(
    "numbers are changed while they leave",
    "statistics_of_two_ranks",
    f"{OWN}Statistics.send",
    UNORDERED,
    "send to",
    "mul_",
)
def _(original):
    def send(statistics, values):
        work = original(statistics, values)
        values.mul_(2)
        return work

    return send
