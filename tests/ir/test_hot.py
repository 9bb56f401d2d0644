"""Hot loops: the same result interpreted and compiled, and small tables never wait for a compiler."""

import numpy as np
import pytest

from penstock.ir.hot import COMPILE_ABOVE_ROWS, Hot


def _add(total, value):
    return total + value


def _sum_into(column, result):
    total = 0.0
    for row in range(len(column)):
        total = _add(total, column[row])
    result[0] = total


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


def test_the_result_of_the_function_is_returned():
    assert Hot(_add)(2, 3, 4) == 7
