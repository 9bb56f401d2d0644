"""A rank knows where the data of its rows come from and go to, from its own rows and those of its peers."""

import pytest

from penstock.execute.ops.rows import RankRows, arrived_before, used_after
from penstock.ir.deps import NONE, predecessors
from penstock.lowering import lower
from penstock.schedules import build


def test_each_row_has_the_row_of_this_rank_that_its_data_come_from():
    program = lower(build("1f1b", ranks=2, microbatches=1))
    rows = RankRows.of(program, 1)

    texts = {row: str(program.instruction(row)) for row in rows.rows} | {NONE: ""}
    found = {texts[row]: texts[source] for row, source in zip(rows.rows, rows.source.values(), strict=True)}
    assert found == {"1RECV_F0": "", "1F0": "1RECV_F0", "1B0": "", "1SEND_B0": "1B0", "1REDUCE_GRAD": ""}


@pytest.mark.parametrize("name", ["1f1b", "zbv", "dualpipe", "gpipe", "chimera"])
def test_the_rows_of_a_rank_and_its_peers_show_what_those_of_all_ranks_do(name):
    program = lower(build(name, ranks=4, microbatches=8))
    before = predecessors(program)[:, 0]

    for rank in range(4):
        rows, own = RankRows.of(program, rank), slice(*program.offsets[rank : rank + 2])
        sources = [row if own.start <= row < own.stop else NONE for row in before[own]]
        assert list(rows.source.values()) == sources
        arrived, used = arrived_before(program, before, rank), used_after(program, before, rank)
        assert rows.arrived == arrived
        assert rows.used == used


def test_the_columns_of_ranks_without_messages_are_not_looked_at(monkeypatch):
    program, seen = lower(build("1f1b", ranks=6, microbatches=4)), []
    select = type(program).select

    def looking(self, rows, **options):
        seen.append(sorted(set(program.rank_of_row[rows].tolist())))
        return select(self, rows, **options)

    monkeypatch.setattr(type(program), "select", looking)
    for rank in range(6):
        RankRows.of(program, rank)

    assert seen == [[0, 1], [0, 1, 2], [1, 2, 3], [2, 3, 4], [3, 4, 5], [4, 5]]
