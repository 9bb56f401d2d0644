"""Hot loops: the same result interpreted and compiled, and small tables never wait for a compiler."""

import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

import penstock
from penstock.ir.hot import BLOCK_ROWS, COMPILE_ABOVE_ROWS, Hot, blocks, frozen

SRC = Path(penstock.__file__).parents[1]


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


def test_a_small_table_runs_without_a_compiler(caplog):
    caplog.set_level(logging.INFO)
    hot = Hot(_sum_into, _add)

    assert total_of(hot, 10, as_if=COMPILE_ABOVE_ROWS) == 45
    assert not caplog.records


def test_a_compilation_is_logged_before_and_after_and_happens_once(caplog):
    caplog.set_level(logging.INFO)
    hot = Hot(_sum_into, _add)

    for _ in range(2):
        assert total_of(hot, 10, as_if=COMPILE_ABOVE_ROWS + 1) == 45

    before, after = caplog.records
    assert before.getMessage() == "compiling _sum_into"
    assert not hasattr(before, "compiled_s")
    assert after.compiled_s > 0


def test_helpers_may_become_parts_of_the_loop():
    pair, result = Pair(np.full(1, 2.0), np.full(1, 5.0), 3), np.zeros(1)

    Hot(_scaled_sum, _add, inlines=True).compiled(pair, result)

    assert result[0] == 21


def test_columns_of_another_type_get_code_of_their_own():
    """A column that cannot be written has another type, and so has one of whole numbers."""
    hot = Hot(_sum_into, _add)
    columns = [np.arange(4.0), frozen(np.arange(4.0)), np.arange(4), np.arange(8.0)[::2]]

    totals = [np.zeros(1) for _ in columns]
    for column, total in zip(columns, totals, strict=True):
        hot.compiled(column, total)

    assert [total[0] for total in totals] == [6, 6, 6, 12]


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
def test_columns_that_can_be_written_and_columns_that_cannot_share_one_compiled_loop(caplog):
    caplog.set_level(logging.INFO)
    hot = Hot(_sum_into, _add)
    can, cannot = np.arange(4.0), np.arange(4.0)
    cannot.flags.writeable = False

    for column in (can, cannot):
        hot.compiled(frozen(column), np.zeros(1))

    assert len(caplog.records) == 2  # of one compilation
    assert can.flags.writeable


LOOP = """
from penstock.ir.hot import Hot
from others import FACTOR, TABLE, Pair, shifted

def loop(column, pair):
    column[0] = shifted(column[0]) * FACTOR + TABLE[0] + pair.left

HOT = Hot(loop, shifted)
"""
OTHERS = """
from typing import NamedTuple
import numpy as np

FACTOR = 2
TABLE = np.array([100, 7])

class Pair(NamedTuple):
    left: int
    right: int

def shifted(value):
    return value + 1
"""
RUN = """
import numpy as np
from loop import HOT
from others import Pair

column = np.array([3])
HOT.compiled(column, Pair(left=1000, right=4000))
print(column[0])
"""


@pytest.fixture
def run_loop(tmp_path):
    """Run LOOP compiled in a new process, which keeps its machine code in a folder of the test; return its result."""
    (tmp_path / "loop.py").write_text(LOOP)
    (tmp_path / "others.py").write_text(OTHERS)

    def run(**environment):
        own = {"PYTHONPATH": f"{tmp_path}:{SRC}", "NUMBA_CACHE_DIR": str(tmp_path / "kept"), **environment}
        command = [sys.executable, "-B", "-c", RUN]
        done = subprocess.run(command, env=os.environ | own, check=True, capture_output=True, text=True, timeout=100)
        return int(done.stdout)

    return run


def kept_files(folder):
    return {file: file.stat().st_mtime_ns for file in folder.rglob("*.nb[ci]")}


@pytest.mark.slow
def test_machine_code_is_loaded_by_the_next_process(run_loop, tmp_path):
    assert run_loop() == 1108
    before = kept_files(tmp_path)

    assert run_loop() == 1108
    assert len(before) == 2  # index and code
    assert kept_files(tmp_path) == before


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "result"),
    [
        ("FACTOR = 2", "FACTOR = 3", 1112),
        ("    left: int\n    right: int", "    right: int\n    left: int", 1108),
    ],
)
def test_what_another_file_changes_counts_in_the_next_process(run_loop, tmp_path, old, new, result):
    run_loop()
    (tmp_path / "others.py").write_text(OTHERS.replace(old, new))

    assert run_loop() == result


@pytest.mark.slow
@pytest.mark.parametrize("content", [b"damaged", b"cno_such_module\nNoSuchClass\n."])
@pytest.mark.parametrize("kind", ["nbi", "nbc"])
def test_kept_code_that_cannot_be_loaded_is_made_again_and_kept(run_loop, tmp_path, kind, content):
    run_loop()
    (damaged,) = tmp_path.rglob(f"*.{kind}")
    damaged.write_bytes(content)

    assert run_loop() == 1108
    repaired = kept_files(tmp_path)
    assert len(repaired) == 4
    assert run_loop() == 1108
    assert kept_files(tmp_path) == repaired


@pytest.mark.slow
def test_without_a_folder_that_can_be_written_nothing_is_kept(run_loop, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "__pycache__").touch()

    nowhere = str(tmp_path / "file")
    assert run_loop(NUMBA_CACHE_DIR=nowhere, XDG_CACHE_HOME=nowhere, HOME=nowhere) == 1108
    assert not kept_files(tmp_path)


@pytest.mark.slow
def test_a_loop_that_reads_what_cannot_be_compared_is_refused():
    def outer(column):
        return total_of(column, 1)

    with pytest.raises(TypeError, match=r"outer reads <function total_of.*as a helper"):
        Hot(outer).compiled(np.zeros(1))


@pytest.mark.parametrize("num_rows", [0, 1, BLOCK_ROWS, BLOCK_ROWS + 1, 3 * BLOCK_ROWS])
def test_blocks_are_all_rows_in_order(num_rows):
    rows = [row for part in blocks(num_rows) for row in (part.start, part.stop - 1)]

    assert rows == sorted(rows)
    assert sum(part.stop - part.start for part in blocks(num_rows)) == num_rows
    assert all(0 < part.stop - part.start <= BLOCK_ROWS for part in blocks(num_rows))
