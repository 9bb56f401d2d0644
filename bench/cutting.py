"""Measure what cutting costs: processor time per layer and microbatch, of one source or of several in turns.

A tiny Llama computes next to nothing, so what is left is the way from layer to layer: one rank, 8 blocks, 16
microbatches, with an `attention_mask` in the batch and without.

    python bench/cutting.py --source /path/to/other/worktree/src --source src

Each `--source` is a folder that holds a `penstock` package, in a process of its own that waits for its turn. The last
column is what a source takes beyond the first one. Exit status 1 where that is more than `--most` milliseconds.
"""

import os
import statistics
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import torch
from on_ranks import NUM_WARM_UP_ROUNDS, Table, bench_parser, spread_of, write_rows

SHAPE = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 8}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
MICROBATCHES, LENGTH, STEPS_AT_ONCE = 16, 8, 3
CASES = ("plain", "padded")


def answer_turns() -> None:
    """Run steps for each line that comes in, the name of a case, and print the processor seconds of a step."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    import penstock as ps

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = ps.from_transformers(AutoModelForCausalLM.from_config(LlamaConfig(**SHAPE, **HEADS)))
    pipeline = ps.Pipeline(model, "1f1b", MICROBATCHES, model.loss, count=model.count, ranks=1)
    tokens = torch.randint(3, SHAPE["vocab_size"], (MICROBATCHES, LENGTH))
    mask = torch.ones_like(tokens)
    mask[::2, LENGTH - 2 :] = 0
    keywords: dict[str, dict[str, Any]] = {"plain": {}, "padded": {"attention_mask": mask}}
    for line in sys.stdin:
        begin_s = time.process_time()
        for _ in range(STEPS_AT_ONCE):
            pipeline.step(tokens, target=tokens, **keywords[line.strip()])
        print((time.process_time() - begin_s) / STEPS_AT_ONCE, flush=True)


def measured(words: Namespace) -> list[dict[str, Any]]:
    """Return the seconds of the steps of each case and source, which run one after another, round by round."""
    sources = words.source or [str(Path(__file__).parents[1] / "src")]
    processes = [_start(source) for source in sources]
    rows: list[dict[str, Any]] = [
        {"case": case, "source": source, "seconds": []} for case in CASES for source in sources
    ]
    for number in range(NUM_WARM_UP_ROUNDS + words.rounds):
        for row, process in zip(rows, processes * len(CASES), strict=True):
            assert process.stdin is not None, "it is a pipe"
            assert process.stdout is not None, "it is a pipe"
            process.stdin.write(f"{row['case']}\n")
            process.stdin.flush()
            seconds = float(process.stdout.readline())
            row["seconds"] += [seconds] if number >= NUM_WARM_UP_ROUNDS else []
    for process in processes:
        process.communicate()  # closes its input, which ends it
    return rows


def _start(source: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(Path(source).resolve())}
    command = [sys.executable, __file__, "--alone"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)


def print_table(rows: list[dict[str, Any]]) -> float:
    """Print medians; return the most milliseconds per layer and microbatch that a source takes beyond the first."""
    table = Table({"case": 6, "source": 30, "step, ms": 16, "per layer and microbatch, ms": 28, "beyond": 7})
    per_unit = 1000 / (SHAPE["num_hidden_layers"] * MICROBATCHES)
    first: dict[str, list[float]] = {}
    most = 0.0
    for row in rows:
        seconds = row["seconds"]
        base = first.setdefault(row["case"], seconds)
        beyond = per_unit * statistics.median(mine - theirs for mine, theirs in zip(seconds, base, strict=True))
        most = max(most, beyond)
        step = f"{1000 * statistics.median(seconds):.1f} ({100 * spread_of(seconds):.0f} %)"
        table.print(
            [row["case"], row["source"][-30:], step, f"{per_unit * statistics.median(seconds):.3f}", f"{beyond:.3f}"]
        )
    return most


def main() -> int:
    parser = bench_parser(__doc__)
    parser.set_defaults(rounds=20)
    parser.add_argument("--source", action="append", help="a folder with a penstock package (default: this one's)")
    parser.add_argument("--most", type=float, default=0.3, help="milliseconds beyond the first source (default: 0.3)")
    parser.add_argument("--alone", action="store_true", help="measure the one source, a line of input at a time")
    words = parser.parse_args()
    if words.alone:
        answer_turns()
        return 0
    rows = measured(words)
    most = print_table(rows)
    write_rows(words.output, rows)
    print(f"missed: {f'{most:.3f} ms beyond the first source' if most > words.most else 'nothing'}")
    return int(most > words.most)


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
