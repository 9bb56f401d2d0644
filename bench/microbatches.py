"""Measure what a new number of microbatches costs a step, and what rounds cost beside a schedule that was made for it.

Ranks of this machine run one pipeline of 8 microbatches with every number from 1 to 40, in random order: each number
twice, so that the second step has its program. What the first one takes longer is given in processor time of the thread
that runs the steps, of which a busy machine takes least. Python's collections of garbage, 100 to 200 ms each beside
torch, are left out: one comes in some 40 new numbers, as in any loop. Simulated makespans say what rounds cost.

    python bench/microbatches.py --ranks 2

Exit status 1 where the median of a schedule is more than 20 ms.
"""

import gc
import random
import statistics
import sys
import time
from typing import Any

import torch
import torch.distributed as dist
from on_ranks import Table, become_rank, bench_parser, give_rows, rows_of_ranks, write_rows
from torch import nn

import penstock as ps
from penstock.ir.rounds import in_rounds
from penstock.planning import prove_and_lower

SCHEDULES = ("1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "zbv", "1f1b in rounds", "zbv in rounds")
MICROBATCHES, MOST, WIDTH, LAYERS = 8, 40, 8, 16
BUDGET_S = 0.02
NUMBERS_IN_ROUNDS = (12, 20, 24, 40, 64)


def measured() -> list[dict[str, Any]]:
    """Run the steps on this rank; return a row per schedule, with this rank's seconds per number."""
    rows = []
    gc.disable()
    for name in SCHEDULES:
        family = name.removesuffix(" in rounds")
        is_family = family == name
        ranks = dist.get_world_size()
        schedule = family if is_family else ps.build(family, ranks=ranks, microbatches=MICROBATCHES)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)]
        pipeline = ps.Pipeline(layers, schedule, MICROBATCHES if is_family else None, nn.functional.mse_loss)
        _seconds_of_step(pipeline, MICROBATCHES)
        _seconds_of_step(pipeline, MICROBATCHES)
        numbers = random.Random(0).sample(range(1, MOST + 1), MOST)
        new = [_seconds_of_step(pipeline, n) - _seconds_of_step(pipeline, n) for n in numbers if n != MICROBATCHES]
        rows.append({"schedule": name, "seconds": new})
    return rows


def _seconds_of_step(pipeline: ps.Pipeline, number: int) -> float:
    rows = torch.zeros(number, WIDTH)
    begin_s = time.thread_time()
    pipeline.step(rows, target=rows, microbatches=number)
    return time.thread_time() - begin_s


def makespans(family: str, ranks: int) -> list[str]:
    """Return what rounds of 16 microbatches take beside the schedule of each number, where all actions take 1 s."""
    base = ps.build(family, ranks=ranks, microbatches=16)
    texts = []
    for number in NUMBERS_IN_ROUNDS:
        tables = in_rounds(base, number), ps.build(family, ranks=ranks, microbatches=number)
        rounds_s, own_s = (ps.simulate(prove_and_lower(table), ps.Costs.uniform()).makespan_s for table in tables)
        texts.append(f"{rounds_s / own_s:.2f}")
    return texts


def main() -> int:
    parser = bench_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    words = parser.parse_args()
    if words.rows:
        become_rank(measures_time=False)
        give_rows(words.rows, measured())
        return 0
    rows = rows_of_ranks(__file__, [], num_ranks=words.ranks)
    table = Table({"schedule": 18, "a new number, ms": 16, "most, ms": 9})
    for row in rows:
        middle, most = statistics.median(row["seconds"]), max(row["seconds"])
        table.print([row["schedule"], f"{1000 * middle:.1f}", f"{1000 * most:.1f}"])
    print()
    table = Table({"rounds beside": 16, **{f"{number}": 5 for number in NUMBERS_IN_ROUNDS}})
    for family in ("1f1b", "interleaved-1f1b", "zbv", "dualpipe-v"):
        table.print([family, *makespans(family, 4)])
    write_rows(words.output, rows)
    missed = [row["schedule"] for row in rows if statistics.median(row["seconds"]) > BUDGET_S]
    print(f"missed: {', '.join(missed) or 'nothing'}")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
