"""Benchmarks can be started, and those that call parts of the package by themselves still fit them."""

import importlib
import os
import subprocess
import sys
from pathlib import Path
from textwrap import dedent

import pytest

from tests.support.tiny_run import fork

BENCH = Path(__file__).resolve().parents[3] / "bench"


@pytest.fixture
def run_python(tmp_path):
    """Run some lines with the benchmarks as modules, in a process that has imported torch already."""
    (tmp_path / "tmp").mkdir()

    def run(code):
        (tmp_path / "lines.py").write_text(f"import sys\nsys.path.insert(0, {str(BENCH)!r})\n{code}")
        process = fork(["lines.py"], tmp_path)
        _, complained = process.communicate(timeout=100)
        assert process.returncode == 0, complained

    return run


@pytest.fixture
def bench(monkeypatch):
    """Return the benchmark of a name, as a module of this process."""
    monkeypatch.syspath_prepend(BENCH)
    return importlib.import_module


KEPT = "from budgets import Budget, verdict\nraise SystemExit(verdict([Budget('small', 1.0, 1.2, 'times')]))"
MISSED = KEPT.replace("[", "[Budget('large', 2.2, 1.2, 'times'), Budget('fast', 90, 100, 'times', is_least=True), ")
CRASHED = "raise SystemExit(3)"


@pytest.mark.parametrize(
    ("scripts", "status", "lines"),
    [
        ([KEPT, KEPT], 0, ["0.py kept 1 of 1 budgets: small", "1.py kept 1 of 1 budgets: small"]),
        (
            [MISSED, KEPT],
            1,
            [
                "0.py kept 1 of 3 budgets: small",
                "    MISSED  large: 2.2, at most 1.2 times",
                "    MISSED  fast: 90, at least 100 times",
                "1.py kept 1 of 1 budgets: small",
            ],
        ),
        (
            [CRASHED, KEPT],
            1,
            [
                "0.py kept 0 of 0 budgets: none",
                "    FAILED  it ended with status 3; see what it printed above",
                "1.py kept 1 of 1 budgets: small",
            ],
        ),
    ],
    ids=["kept", "missed", "crashed"],
)
def test_all_benchmarks_run_and_end_with_one_verdict(scripts, status, lines, bench, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PYTHONPATH", str(BENCH))
    paths = [tmp_path / f"{number}.py" for number in range(len(scripts))]
    for path, script in zip(paths, scripts, strict=True):
        path.write_text(script)

    assert bench("budgets").run_all(paths) == status

    _, verdict = capsys.readouterr().out.split("\nVerdict\n")
    assert verdict.splitlines() == [*lines, "a budget is missed" if status else "every budget is kept"]


@pytest.mark.parametrize(
    ("figures", "missed"),
    [
        ({}, []),
        ({"first_plan_s": [0.2]}, ["first plan, zbv on 8 ranks"]),
        ({"penstock_s": [3.0]}, ["zbv on 64 ranks, torch", "zbv on 128 ranks", "zbv on 128 ranks, torch"]),
        ({"plan_s": 9.0}, ["1f1b on 1024 ranks, proof of lifetimes"]),
        ({"plan_s": 9.0, "reference_s": 0.05}, ["1f1b on 1024 ranks, proof of lifetimes", "1f1b on 1024 ranks"]),
        ({"peak_bytes": 3 * 2**30}, ["1f1b on 1024 ranks, peak"]),
    ],
)
def test_planning_that_is_slow_or_large_misses_its_budget(figures, missed, bench):
    planning = bench("planning")
    times = {
        "first_plan_s": [0.02],
        "penstock_s": [0.5],
        "bare_start_s": [0.1],
        "reference_s": [0.1],
        "torch_s": [90.0],
    }
    times |= {name: value for name, value in figures.items() if name in ("first_plan_s", "penstock_s")}
    rows = [planning.Row("zbv", ranks, 8 * ranks, 1, is_first_plan_compiled=False, **times) for ranks in (8, 64, 128)]
    without = {"plan_s": 7.0, "peak_bytes": 2**30, "reference_s": 0.1}
    huge = {"without": [without], "with": [without | {name: figures[name] for name in without if name in figures}]}

    budgets = planning.budgets_of(rows, huge)
    assert [budget.name for budget in budgets if not budget.is_kept] == missed
    assert bench("budgets").verdict(budgets) == bool(missed)


def test_make_bench_runs_all_budgets():
    assert "\nbench: environment-dev\n\t$(BIN)/python bench/budgets.py\n\n" in (BENCH.parent / "Makefile").read_text()


@pytest.mark.slow
def test_each_benchmark_finds_what_it_imports():
    """In a Python of its own, which has the benchmarks and the package alone on its path."""
    names = sorted(path.stem for path in BENCH.glob("*.py"))
    code = f"import importlib\nfor name in {names!r}:\n    importlib.import_module(name)"
    path = os.pathsep.join([str(BENCH), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path}
    run = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=100)
    assert run.returncode == 0, run.stderr


LINES = {
    "instructions of a split schedule without their work": """
        import overhead
        overhead.NUM_REPETITIONS = 3
        times_s = overhead.instruction_times_s('zbv')
        assert len(times_s) == 2 and min(times_s) > 0, times_s
    """,
    "both parts of a backward": """
        import torch, split_backward
        row = split_backward.measure(split_backward.TINY, torch.device('cpu'), 1)
        assert min(row.input_s + row.weight_s + row.whole_s) > 0, row
    """,
    "what an emulated link brings, one message after another": """
        import time, torch, emulated_replicas as bench
        from penstock.execute.transport import LocalTransport
        sender, receiver = LocalTransport.create(2, 10.0)
        link, values = bench.EmulatedLink(receiver), torch.ones(10_000)
        def two_messages_s():
            for _ in range(2): sender.post_send(1, values)
            begin_s = time.perf_counter()
            tickets = [link.post_receive(0, torch.empty(10_000)) for _ in range(2)]
            for ticket in tickets: link.wait(ticket)
            return time.perf_counter() - begin_s
        expected_s = 2 * (bench.LATENCY_S + 40_000 / bench.BYTES_PER_S)
        taken_s = min(two_messages_s() for _ in range(5))
        assert expected_s <= taken_s < 10 * expected_s, taken_s
    """,
}


@pytest.mark.slow
@pytest.mark.parametrize("lines", LINES.values(), ids=LINES)
def test_a_benchmark_measures_by_parts_of_the_package(run_python, lines):
    run_python(dedent(lines))


@pytest.mark.full
@pytest.mark.slow
def test_four_replicas_with_shards_hold_at_most_half():
    command = [sys.executable, str(BENCH / "replicas.py"), "--parts", "memory"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout + run.stderr
