"""Every number of the published tables whose family is there, counted: the simulator gives the same."""

import json
from pathlib import Path

import pytest

from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import Costs, simulate

PARTS = ("forward", "backward_input", "backward_weight")
STAGES_PER_RANK = {"whole_stage": 1, "half_stage": 2}
"""In the rows of a table, times are those of a rank, or of one of two stages of a rank."""
DIGITS = 5e-5  # printed with four decimals


def rows(file, table):
    text = (Path(__file__).parents[1] / "data" / f"published_{file}.json").read_text(encoding="utf-8")
    return json.loads(text)[table]


class Cells:
    """Counts the cells of a table that are as printed."""

    def __init__(self):
        self.wrong, self.num_cells = [], 0

    def compare(self, row, column, found, printed, digits=0.0):
        self.num_cells += 1
        if not abs(found - printed) <= digits:
            self.wrong.append(f"{column} of {row}: {found}, printed {printed}")

    def report(self, table):
        print(f"{table}: {self.num_cells - len(self.wrong)} of {self.num_cells} cells")
        assert not self.wrong, "\n" + "\n".join(self.wrong)


def timed(name, row, costs, **options):
    return simulate(lower(build(name, ranks=row["ranks"], microbatches=row["microbatches"], **options)), costs)


def of_a_rank(row, table):
    return {part: STAGES_PER_RANK[table] * row[part] for part in PARTS}


@pytest.mark.slow
@pytest.mark.parametrize("table", STAGES_PER_RANK)
def test_the_bubbles_of_the_zero_bubble_paper(table):
    cells = Cells()
    for row in rows("1f1b", table):
        timeline = timed("1f1b", row, Costs.uniform(**of_a_rank(row, table), transfer=row["transfer"]))
        cells.compare(row, "1f1b", timeline.bubble_rate, row["bubble_rate"], DIGITS)
    for row in rows("zero_bubble", table):
        for name in ("zb-h1", "zb-h2"):
            timeline = timed(name, row, Costs.uniform(**of_a_rank(row, table), transfer=row["transfer"]))
            cells.compare(row, name, timeline.bubble_rate, row[name], DIGITS)
    cells.report(f"arXiv 2401.10241, {table}")


@pytest.mark.slow
@pytest.mark.parametrize("table", STAGES_PER_RANK)
def test_interleaved_1f1b_in_the_zero_bubble_paper(table):
    """The paper's formula counts (2vp - p - 2) transfers; run in its order, the schedule has 2vp - 2 of them.

    So its bubble rates are those of the simulated step without p of its transfers.
    """
    rates, transfers = Cells(), Cells()
    for row in rows("interleaved", table):
        num_ranks, num_microbatches, stages_per_rank = (
            row[key] for key in ("ranks", "microbatches", "stages_per_rank")
        )
        parts, transfer_s = of_a_rank(row, table), row["transfer"]
        per_stage = {part: seconds / stages_per_rank for part, seconds in parts.items()}
        costs = Costs.uniform(**per_stage, transfer=transfer_s)
        timeline = timed("interleaved-1f1b", row, costs, stages_per_rank=stages_per_rank)

        work_s = num_microbatches * sum(parts.values())
        rates.compare(
            row, "1f1b-i", 1 - work_s / (timeline.span_s - num_ranks * transfer_s), row["bubble_rate"], DIGITS
        )

        filled_s = work_s + (num_ranks - 1) * sum(parts.values()) / stages_per_rank
        num_transfers = (timeline.span_s - filled_s) / transfer_s
        transfers.compare(row, "transfers", num_transfers, 2 * stages_per_rank * num_ranks - 2, 1e-6)
    rates.report(f"interleaved 1F1B without p transfers, {table}")
    transfers.report(f"transfers of interleaved 1F1B, {table}")


def test_spans_and_peaks_at_unit_costs():
    cells = Cells()
    halves = Costs.uniform(activation_bytes=(2,), weight_context_bytes=(1,))
    for row in rows("1f1b", "unit_costs"):
        timeline = timed("1f1b", row, halves)
        cells.compare(row, "span", timeline.span_s, row["span"])
        cells.compare(row, "makespan", timeline.makespan_s, row["span"])
        for rank, peak in enumerate(row["peak_activations"]):
            cells.compare(row, f"peak of rank {rank}", timeline.peak_bytes[rank], 2 * peak)
    for row in rows("zero_bubble", "unit_costs"):
        timeline = timed(row["schedule"], row, halves)
        cells.compare(row, "span", timeline.span_s, row["span"])
        cells.compare(row, "makespan", timeline.makespan_s, row.get("makespan", row["span"]))
        for rank, peak in enumerate(row["peaks_half_activations"]):
            cells.compare(row, f"peak of rank {rank}", timeline.peak_bytes[rank], peak)
    cells.report("unit costs")


def test_time_and_peaks_of_seq1f1b():
    cells = Cells()
    for row in rows("seq1f1b", "uniform"):
        forward, backward = row["forward"] / row["slices"], row["backward"] / row["slices"]
        timeline = timed("seq1f1b", row, Costs(forward_s=(forward,), backward_s=(backward,)), slices=row["slices"])
        cells.compare(row, "makespan", timeline.makespan_s, row["makespan"])
        cells.compare(row, "peak", max(timeline.peak_activations), row["peak_slices"])
    cells.report("arXiv 2406.03488")
