"""The place of every block of a timeline: pure data, which charts and the viewer draw alike.

    lane of rank 1   [2F0][2F1]....[2F2|      low and high are shares of the lane's height; of an overlapped pair,
                                   |2B0]      the first action has the upper half and the second the lower one

A block's shade is the place of its stage among the stages of its rank, so stages that share a rank can be told apart;
so can the two copies of a bidirectional schedule, of which every rank holds one stage each.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from penstock.ir.program import Program
from penstock.ir.timeline import Timeline

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Blocks:
    """The computations of one rank, in order; one entry of each column per computation."""

    row: Ints
    """The block's row of the program."""
    start_s: Floats
    end_s: Floats
    low: Floats
    high: Floats
    kind: Ints
    shade: Ints

    def __len__(self) -> int:
        return len(self.row)


def blocks_of_rank(timeline: Timeline, rank: int) -> Blocks:
    """Lay out the computations of one rank."""
    program = timeline.program
    rows = timeline.compute_rows(rank)
    is_first = program.joined[rows]
    is_second = np.append(False, is_first[:-1])[: len(rows)]
    return Blocks(
        row=rows,
        start_s=timeline.start_s[rows],
        end_s=timeline.end_s[rows],
        low=np.where(is_first, 0.5, 0.0),
        high=np.where(is_second, 0.5, 1.0),
        kind=program.op[rows].astype(np.int64),
        shade=shade_of_stage(program)[program.stage[rows]],
    )


def shade_of_stage(program: Program) -> Ints:
    """Return [num_stages] the place of each stage among those of its rank."""
    shades = np.zeros(program.num_stages, np.int64)
    for stages in program.placement.stages_of_rank:
        shades[list(stages)] = range(len(stages))
    return shades


def num_shades(program: Program) -> int:
    """Return the most stages that a rank holds."""
    return max(len(stages) for stages in program.placement.stages_of_rank)


def block_numbers(program: Program, blocks: Blocks) -> list[str]:
    """Return what is written on each block: its microbatch, and its slice where sequences are cut."""
    microbatches = program.microbatch[blocks.row].tolist()
    if program.num_slices == 1:
        return [str(microbatch) for microbatch in microbatches]
    slices = program.slice[blocks.row].tolist()
    return [f"{microbatch}.{part}" for microbatch, part in zip(microbatches, slices, strict=True)]


def longest_number(program: Program) -> int:
    """Return how many letters the longest text of `block_numbers` has."""
    longest = len(str(program.num_microbatches - 1))
    return longest if program.num_slices == 1 else longest + 1 + len(str(program.num_slices - 1))


def describe_shades(program: Program) -> str:
    """Return what the shades of blocks mean; empty where every rank holds a single stage."""
    count = num_shades(program)
    if count == 1:
        return ""
    placement = program.placement
    copies = [sorted(route) for route in placement.routes]
    if len(copies) == 2 and count == 2:
        first, second = (f"{stages[0]}-{stages[-1]}" for stages in copies)
        return f"dark: stages {first}, first copy of the model; pale: stages {second}, second copy"
    stages_of_rank_0 = placement.stages_of_rank[0]
    return f"from dark to pale: the {count} stages of a rank ({', '.join(map(str, stages_of_rank_0))} on rank 0)"


def period_s(timeline: Timeline) -> float:
    """Return the seconds that the busiest rank works per microbatch: how long the steady state takes to repeat."""
    return float(timeline.work_s.max(initial=0.0)) / max(timeline.program.num_microbatches, 1)


def typical_block_s(timelines: list[Timeline]) -> float:
    """Return the median duration of a block; 0 where there is none."""
    durations = [timeline.end_s - timeline.start_s for timeline in timelines]
    block_durations_s = [
        duration[timeline.program.is_compute] for duration, timeline in zip(durations, timelines, strict=True)
    ]
    all_durations_s = np.concatenate([*block_durations_s, np.zeros(0)])
    return float(np.median(all_durations_s)) if len(all_durations_s) else 0.0


def num_blocks(timelines: list[Timeline]) -> int:
    """Return how many computations there are to draw."""
    return sum(int(timeline.program.is_compute.sum()) for timeline in timelines)


def kinds_used(timelines: list[Timeline]) -> list[int]:
    """Return the kinds that occur, in order."""
    used = [np.unique(timeline.program.op[timeline.program.is_compute]).tolist() for timeline in timelines]
    return sorted(set(chain.from_iterable(used)))
