"""Hot loops: the same result interpreted and compiled, and small tables never wait for a compiler."""

from typing import Any, NamedTuple

import numpy as np
import pytest

from penstock.ir.hot import BLOCK_ROWS, COMPILE_ABOVE_ROWS, Hot, blocks, frozen


def _add(total, value):
    return total + value


def _sum_into(column, result):
    total = 0.0
    for row in range(len(column)):
        total = _add(total, column[row])
    result[0] = total


class Pair(NamedTuple):
    left: Any
    right: Any
    factor: int


def _scaled_sum(pair, result):
    left, right, factor = pair
    result[0] = _add(left[0], right[0]) * factor


def total_of(hot, num_rows, *, as_if=None):
    column, result = np.arange(num_rows, dtype=np.float64), np.zeros(1)
    hot(as_if or num_rows, column, result)
    return result[0]


def test_a_small_table_runs_without_a_compiler():
    hot = Hot(_sum_into, _add)

    assert total_of(hot, 10, as_if=COMPILE_ABOVE_ROWS) == 45
    assert "compiled" not in vars(hot)


@pytest.mark.slow
def test_a_large_table_runs_compiled_with_its_helpers_and_gives_the_same():
    hot = Hot(_sum_into, _add)

    assert total_of(hot, 10, as_if=COMPILE_ABOVE_ROWS + 1) == 45
    assert "compiled" in vars(hot)


def test_what_is_no_array_is_passed_as_it_is():
    seen = []
    hot = Hot(lambda *columns: seen.extend(columns))

    hot(1, np.zeros(1), 7, True)

    assert isinstance(seen[0], memoryview)
    assert seen[1:] == [7, True]


def test_arrays_that_go_together_are_passed_like_others():
    seen = []

    Hot(seen.append)(1, Pair(np.zeros(1), np.ones(1), 7))

    assert isinstance(seen[0], Pair)
    assert [type(each) for each in seen[0]] == [memoryview, memoryview, int]


@pytest.mark.slow
def test_arrays_that_go_together_give_the_same_compiled():
    hot, pair = Hot(_scaled_sum, _add), Pair(np.full(1, 2.0), np.full(1, 5.0), 3)

    for run in (hot.interpreted, hot.compiled):
        result = np.zeros(1)
        run(pair, result)
        assert result[0] == 21


def test_the_result_of_the_function_is_returned():
    assert Hot(_add)(2, 3, 4) == 7


@pytest.mark.slow
def test_a_function_without_a_file_is_compiled_without_being_kept():
    names = {}
    exec("def double(column):\n    for row in range(len(column)):\n        column[row] *= 2", names)
    column = np.arange(3.0)

    Hot(names["double"]).compiled(column)

    assert column.tolist() == [0, 2, 4]


@pytest.mark.slow
def test_columns_that_can_be_written_and_columns_that_cannot_share_one_compiled_loop():
    hot = Hot(_sum_into, _add)
    can, cannot = np.arange(4.0), np.arange(4.0)
    cannot.flags.writeable = False

    for column in (can, cannot):
        hot.compiled(frozen(column), np.zeros(1))

    assert len(hot.compiled.signatures) == 1
    assert can.flags.writeable


@pytest.mark.parametrize("num_rows", [0, 1, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS])
def test_blocks_are_all_rows_in_order(num_rows):
    rows = [row for part in blocks(num_rows) for row in (part.start, part.stop - 1)]

    assert rows == sorted(rows)
    assert sum(part.stop - part.start for part in blocks(num_rows)) == num_rows
    assert all(0 < part.stop - part.start <= BLOCK_ROWS for part in blocks(num_rows))
