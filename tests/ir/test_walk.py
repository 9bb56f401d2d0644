"""The walk: as early as possible, in order, complete exactly where an order can run."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir import walk as walk_file
from penstock.ir.deps import NONE, predecessors
from penstock.ir.walk import NOT_RUN, walk
from penstock.schedules import build
from tests.proofs.tables import schedule_of
from tests.support.strategies import feasible_schedules


def walked(schedule, durations=(1.0, 2.0, 1.0, 1.0), **options):
    duration = np.array(durations)[schedule.kind]
    return walk(schedule.offsets, predecessors(schedule), schedule.joined, duration, **options)


@given(feasible_schedules())
def test_whole_durations_make_whole_times(schedule):
    times, whole = walked(schedule), walked(schedule, durations=(1, 2, 1, 1))

    assert whole.start.dtype.kind == whole.end.dtype.kind == "i"
    assert np.array_equal(whole.start, times.start)
    assert np.array_equal(whole.end, times.end)


def test_a_lag_delays_its_edge_and_not_the_ranks():
    schedule = schedule_of("0F0 0F1\n1F0 1F1")

    result = walked(schedule, lag=np.array([[9.0], [9.0], [0.5], [2.0]]))

    assert predecessors(schedule)[:, 0].tolist() == [NONE, NONE, 0, 1]
    assert result.start.tolist() == [0, 1, 1.5, 4]


def test_edges_from_one_row_have_lags_of_their_own():
    before = np.array([[NONE, NONE], [0, NONE], [1, 0]], np.int32)
    lag = np.array([[0.0, 0.0], [0.25, 0.0], [0.5, 4.0]])

    with_both, with_first = (
        walk(np.arange(4), before, np.zeros(3, np.bool_), np.ones(3), lag=columns) for columns in (lag, lag[:, :1])
    )

    assert with_both.start.tolist() == [0, 1.25, 5]  # 4 after the end of row 0
    assert with_first.start.tolist() == [0, 1.25, 2.75]  # the second column has no lags


@given(feasible_schedules(), st.randoms(use_true_random=False))
def test_the_order_in_which_ranks_are_looked_at_changes_nothing(schedule, chance):
    visits = list(range(schedule.num_ranks))
    chance.shuffle(visits)

    result, usual = walked(schedule, rank_order=np.array(visits)), walked(schedule)

    assert result.start.tolist() == usual.start.tolist()
    assert result.end.tolist() == usual.end.tolist()


def test_what_goes_there_and_back_takes_a_few_rounds_on_any_number_of_ranks(monkeypatch):
    visit_all, num_rounds = walk_file._visit_all, []
    monkeypatch.setattr(walk_file, "_visit_all", lambda *columns: num_rounds.append(1) or visit_all(*columns))

    assert walked(build("1f1b", ranks=200, microbatches=1)).is_complete
    assert len(num_rounds) < 5


def test_an_order_that_blocks_itself_stops_where_it_blocks():
    result = walked(schedule_of("0F0 0B0 0F1 0B1\n1F1 1B1 1F0 1B0"))

    assert not result.is_complete
    assert result.reached.tolist() == [1, 4]
    assert result.end[0] == 1
    assert (result.end[1:] == NOT_RUN).all()


def test_joined_rows_do_not_wait_for_each_other():
    before = np.array([[1], [0], [1]], np.int32)
    joined = np.array([True, False, False])

    result = walk(np.array([0, 3]), before, joined, np.array([1.0, 2.0, 4.0]))

    assert result.start.tolist() == [0, 0, 3]
    assert result.end.tolist() == [3, 3, 7]


@given(feasible_schedules())
def test_no_row_could_start_earlier(schedule):
    result = walked(schedule)

    assert result.is_complete
    before, row = predecessors(schedule), 0
    while row < schedule.num_actions:
        last = row + int(schedule.joined[row])
        own = [result.end[row - 1]] if row not in schedule.offsets else [0.0]
        others = {int(b) for b in before[row : last + 1].ravel()} - {NONE, row, last}
        assert result.start[row] == max([*own, *(result.end[other] for other in others)])
        row = last + 1


def test_an_empty_table_is_complete():
    nothing = np.zeros(0)
    result = walk(np.zeros(2, np.int64), np.zeros((0, 3), np.int32), np.zeros(0, np.bool_), nothing)

    assert result.is_complete
