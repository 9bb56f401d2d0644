"""What asynchronous checkpoints cost a run: steps with them and without, in turns.

python bench/checkpoint.py                     300 steps on 2 ranks, a checkpoint every 50, three turns of each
python bench/checkpoint.py --steps 100 --turns 1

Prints the mean step with checkpoints over that without, and the median of the steps during a save over the median of
the others. A step is during a save if it is one of the `--during` that follow it.
"""

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
POLL_S = 0.002


def durations_of(folder: Path, steps: int, every: int, width: int) -> list[float]:
    """Train the demo's text on 2 ranks and return the seconds from the end of each step to that of the next.

    What is between two steps counts, such as copying what is saved: hence the clock is that of the lines' arrival.
    """
    settings = {
        "run.folder": str(folder),
        "run.steps": steps,
        "run.evaluate_every": 0,
        "run.evaluate_batches": 0,
        "run.record_step": 0,
        "model.width": width,
        "checkpoint.every": every,
        "sample.prompt": "",
    }
    flags = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    command = [sys.executable, "-m", "penstock", "train", str(ROOT / "examples" / "demo.toml"), *flags]
    training = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    path, size, arrived_s = folder / "metrics.jsonl", 0, []
    while training.poll() is None:
        if path.exists() and path.stat().st_size != size:
            size = path.stat().st_size
            arrived_s.append(time.perf_counter())
        time.sleep(POLL_S)
    if training.returncode != 0 or len(arrived_s) != steps:
        raise SystemExit(f"the run ended with {training.returncode} and {len(arrived_s)} of {steps} steps were seen")
    return [end_s - begin_s for begin_s, end_s in itertools.pairwise(arrived_s)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--during", type=int, default=2)
    arguments = parser.parse_args()
    without: list[float] = []
    saving: list[float] = []
    others: list[float] = []
    with tempfile.TemporaryDirectory(prefix="penstock-checkpoint-") as folder:
        for turn in range(arguments.turns):
            place = Path(folder) / str(turn)
            without += durations_of(place / "off", arguments.steps, 0, arguments.width)
            steps = durations_of(place / "on", arguments.steps, arguments.every, arguments.width)
            for number, duration_s in enumerate(steps, start=2):  # the first one is that of step 2
                # The interval that ends with step 51 holds what was done after step 50.
                is_during = number > arguments.every and (number - 1) % arguments.every < arguments.during
                (saving if is_during else others).append(duration_s)
    mean = statistics.fmean(saving + others) / statistics.fmean(without)
    median = statistics.median(saving) / statistics.median(others)
    print(f"mean step with checkpoints: {mean:.3f} of that without ({statistics.fmean(without) * 1e3:.1f} ms)")
    print(f"median step during a save:  {median:.3f} of that of the others ({len(saving)} and {len(others)} steps)")


if __name__ == "__main__":
    main()
