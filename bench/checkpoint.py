"""What checkpoints cost a run, how fast it resumes, and whether a slow disk is waited for.

python bench/checkpoint.py                     all of it: 300 steps on 2 ranks, three turns with checkpoints and without
python bench/checkpoint.py --only steps --steps 100 --turns 1

steps       the mean step with asynchronous checkpoints over that without, in turns, and the median of the steps during
            a save over the median of the others; a step is during a save if it is one of the `--during` that follow it
resuming    from the start of the command to the end of the demo's first step after a checkpoint, beyond imports
slow-disk   a checkpoint of `--gib` on a disk that takes `--bytes-per-s`, while steps go on; as root, with cgroups
files       a file per rank, as checkpoints have, against a file per layer: the largest share of a rank over the mean
            share, for the shapes of Llama-3-8B; and the time to write `--mib` of its layers, in turns
"""

import argparse
import itertools
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import torch
from on_ranks import become_rank, give_rows, rows_of_ranks
from torch import nn

from penstock.checkpoints.content import owned_names
from penstock.checkpoints.shards import write_shard
from penstock.checkpoints.verification import find_newest
from penstock.checkpoints.writer import CheckpointWriter
from penstock.partition.balance import balance
from penstock.pipeline import Pipeline

ROOT = Path(__file__).resolve().parents[1]
BLOCK_DEVICES = Path("/sys/fs/cgroup/blkio")
OWN_GROUPS = Path("/proc/self/cgroup")
POLL_S = 0.002
STEP_PAUSE_S = 0.05
SLOW_DEADLINE_S = 10.0


def demo(folder: Path, steps: int, *, resume: bool = False, **more: object) -> "subprocess.Popen[bytes]":
    """Start the demo on its 2 ranks, without evaluation and sample."""
    settings = {
        "run.folder": str(folder),
        "run.steps": steps,
        "run.evaluate_every": 0,
        "run.evaluate_batches": 0,
        "run.record_step": 0,
        "sample.prompt": "",
        **more,
    }
    flags = [f"--set={key}={json.dumps(value)}" for key, value in settings.items()]
    how = ["--resume"] if resume else []
    command = [sys.executable, "-m", "penstock", "train", str(ROOT / "examples" / "demo.toml"), *how, *flags]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL)


def run_demo(folder: Path, steps: int) -> None:
    with demo(folder, steps) as training:
        training.wait()
    if training.returncode != 0:
        raise SystemExit(f"the demo ended with {training.returncode}")


def durations_of(folder: Path, steps: int, every: int, width: int) -> list[float]:
    """Train the demo's text on 2 ranks and return the seconds from the end of each step to that of the next.

    What is between two steps counts, such as copying what is saved: hence the clock is that of the lines' arrival.
    """
    training = demo(folder, steps, **{"model.width": width, "checkpoint.every": every})
    path, size, arrived_s = folder / "metrics.jsonl", 0, []
    while training.poll() is None:
        if path.exists() and path.stat().st_size != size:
            size = path.stat().st_size
            is_new = path.read_bytes().count(b"\n") > len(arrived_s)  # a line may come in two parts
            arrived_s += [time.perf_counter()] * is_new
        time.sleep(POLL_S)
    if training.returncode != 0 or len(arrived_s) != steps:
        raise SystemExit(f"the run ended with {training.returncode} and {len(arrived_s)} of {steps} steps were seen")
    return [end_s - begin_s for begin_s, end_s in itertools.pairwise(arrived_s)]


def measure_steps(arguments: argparse.Namespace, place: Path) -> None:
    """Print what checkpoints cost the steps of the demo."""
    without: list[float] = []
    saving: list[float] = []
    others: list[float] = []
    for turn in range(arguments.turns):
        without += durations_of(place / f"off-{turn}", arguments.steps, 0, arguments.width)
        steps = durations_of(place / f"on-{turn}", arguments.steps, arguments.every, arguments.width)
        for number, duration_s in enumerate(steps, start=2):  # the first one is that of step 2
            # The interval that ends with step 51 holds what was done after step 50.
            is_during = number > arguments.every and (number - 1) % arguments.every < arguments.during
            (saving if is_during else others).append(duration_s)
    mean = statistics.fmean(saving + others) / statistics.fmean(without)
    median = statistics.median(saving) / statistics.median(others)
    print(f"mean step with checkpoints: {mean:.3f} of that without ({statistics.fmean(without) * 1e3:.1f} ms)")
    print(f"median step during a save:  {median:.3f} of that of the others ({len(saving)} and {len(others)} steps)")


def measure_resuming(place: Path) -> None:
    """Print after how long the demo, resumed on 2 ranks, has run its first step, and what imports take of that."""
    folder = place / "resumed"
    run_demo(folder, steps=2)
    begin_s, metrics = time.perf_counter(), folder / "metrics.jsonl"
    size = metrics.stat().st_size
    with demo(folder, steps=3, resume=True) as training:
        while training.poll() is None and metrics.stat().st_size == size:
            time.sleep(POLL_S)
        whole_s = time.perf_counter() - begin_s
    if training.returncode != 0:
        raise SystemExit(f"the resumed run ended with {training.returncode}")
    imports_s = import_s(1, "penstock.train.claim, torch.distributed.run") + import_s(
        2, "penstock.train.loop, torch._dynamo"
    )
    print(
        f"resuming to the first step: {whole_s:.1f} s, of which imports take {imports_s:.1f} s (the launcher, then two "
        f"ranks at once): {whole_s - imports_s:.1f} s beyond imports"
    )


def import_s(num_processes: int, modules: str) -> float:
    """Return how long some processes at once take to start, to import these modules and to end."""
    begin_s = time.perf_counter()
    command = [sys.executable, "-c", f"import {modules}"]
    for process in [subprocess.Popen(command) for _ in range(num_processes)]:
        process.wait()
    return time.perf_counter() - begin_s


def measure_slow_disk(arguments: argparse.Namespace, place: Path) -> None:
    """Save a large model on 2 ranks while the system lets them write little a second; print how long it took."""
    words = ["--folder", str(place / "slow"), "--gib", str(arguments.gib)]
    with throttled(place, arguments.bytes_per_s) as is_throttled:
        if not is_throttled:
            print("saving on a slow disk: not measured, for want of a cgroup with blkio that may be changed")
            return
        [row] = rows_of_ranks(__file__, words, num_ranks=2)
    print(
        f"saving {arguments.gib:g} GiB at {arguments.bytes_per_s / 1e6:g} MB/s: {row['saved_s']:.0f} s, in which "
        f"{row['steps']} steps ran; the deadline of a step is {SLOW_DEADLINE_S:g} s. It is whole and verifies"
    )


@contextmanager
def throttled(place: Path, bytes_per_s: int) -> Iterator[bool]:
    """Let this process and those that it starts write so much a second to the disk of a folder, where that is allowed.

    By a control group (version 1) for block devices: so it is the disk's own writes that wait, as in `fsync`.
    """
    group, device = BLOCK_DEVICES / f"penstock-{os.getpid()}", place.stat().st_dev
    own = [line.split(":", 2)[2] for line in OWN_GROUPS.read_text().splitlines() if ":blkio:" in line]
    try:
        group.mkdir()
        limit = f"{os.major(device)}:{os.minor(device)} {bytes_per_s}"
        (group / "blkio.throttle.write_bps_device").write_text(limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
    except OSError:
        with suppress(OSError):
            group.rmdir()
        yield False
        return
    try:
        yield True
    finally:
        (BLOCK_DEVICES / own[0].lstrip("/") / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


class Heavy(nn.Module):
    """A layer with much to save and little to compute."""

    def __init__(self, num_bytes: int) -> None:
        super().__init__()
        self.register_buffer("weight", torch.randn(num_bytes // 4))
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


def save_as_rank(arguments: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Save once, and run steps until the checkpoint is announced."""
    layers = [Heavy(int(arguments.gib * 2**30) // 2) for _ in range(2)]
    pipeline = Pipeline(layers, "1f1b", 2, nn.functional.mse_loss, deadline_s=SLOW_DEADLINE_S)
    writer = CheckpointWriter(arguments.folder, pipeline)
    begin_s, path, steps = time.perf_counter(), Path(arguments.folder, "step-1"), 0
    writer.save(1)
    while not max(pipeline.control.all_gather_object(path.exists())):
        pipeline.step(torch.ones(4, 1), target=torch.ones(4, 1))
        writer.poll()
        steps += 1
        time.sleep(STEP_PAUSE_S)
    writer.finish()
    saved_s = time.perf_counter() - begin_s
    find_newest(pipeline.control, path)
    pipeline.close()
    yield {"saved_s": saved_s, "steps": steps}


def shapes_by_layer(width: int, hidden: int, vocabulary: int, num_blocks: int) -> list[dict[str, list[int]]]:
    """Return the shapes of a decoder's weights: embedding, blocks with 4 queries for a key, and norm and head."""
    block = {
        **{f"norm{index}": [width] for index in range(2)},
        **{"q": [width, width], "k": [width // 4, width], "v": [width // 4, width], "o": [width, width]},
        **{"gate": [hidden, width], "up": [hidden, width], "down": [width, hidden]},
    }
    return [{"embedding": [vocabulary, width]}, *[block] * num_blocks, {"norm": [width], "head": [vocabulary, width]}]


def largest_share(layers: Sequence[dict[str, list[int]]], replicas: int, *, by_layer: bool) -> tuple[float, int]:
    """Return the bytes of the rank that saves most over those of the mean, and how many ranks save nothing.

    The layers are on 4 stages, of about as many weights each, under AdamW in float32.
    """
    sizes = [sum(map(math.prod, layer.values())) for layer in layers]
    stages, first = [], 0
    for count in balance(sizes, 4):
        stages.append(range(first, first := first + count))
    num_numbers = {
        f"{index}.{name}": math.prod(shape) for index, layer in enumerate(layers) for name, shape in layer.items()
    }
    if by_layer:
        num_numbers = {str(index): size for index, size in enumerate(sizes)}
    descriptions = [
        {
            "weights": {
                name: ("F32", [size]) for name, size in num_numbers.items() if int(name.split(".")[0]) in stage
            },
            "state": {
                name: {"exp_avg": ("F32", [size]), "exp_avg_sq": ("F32", [size])} for name, size in num_numbers.items()
            },
        }
        for _ in range(replicas)
        for stage in stages
    ]
    shares = [sum(num_numbers[name] for name in names) for names in owned_names(descriptions)]
    return max(shares) / statistics.fmean(shares), shares.count(0)


def measure_files(arguments: argparse.Namespace, place: Path) -> None:
    """Print how evenly ranks write by tensors and by layers, and what it costs to write many files."""
    llama = shapes_by_layer(4096, 14336, 128256, 32)
    for replicas in (1, 2, 4, 8, 16):
        (by_tensor, _), (by_layer, idle) = (largest_share(llama, replicas, by_layer=way) for way in (False, True))
        print(
            f"4 stages x {replicas} replicas: the largest share is {by_tensor:.2f} of the mean by tensors, and "
            f"{by_layer:.2f} by layers, where {idle} ranks write nothing"
        )
    size = arguments.mib * 2**20 // 4 // 34
    tensors = {str(index): torch.randn(size) for index in range(34)}
    seconds: dict[int, list[float]] = {1: [], 34: []}
    for _, num_files in itertools.product(range(arguments.turns), seconds):
        names, begin_s = list(tensors), time.perf_counter()
        for index in range(num_files):
            write_shard(place / f"{index}.safetensors", {name: tensors[name] for name in names[index::num_files]})
        seconds[num_files].append(time.perf_counter() - begin_s)
    ratios = sorted(many / one for one, many in zip(seconds[1], seconds[34], strict=True))
    spread = f"{ratios[0]:.2f} to {ratios[-1]:.2f}"
    print(f"{arguments.mib} MiB in 34 files: {statistics.median(ratios):.2f} of the time of one ({spread})")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--width", type=int, default=160)
    parser.add_argument("--during", type=int, default=2)
    parser.add_argument("--gib", type=float, default=2.0)
    parser.add_argument("--bytes-per-s", type=int, default=20_000_000)
    parser.add_argument("--only", choices=("steps", "resuming", "slow-disk", "files"))
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--rows", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rows:
        become_rank(measures_time=False)
        give_rows(arguments.rows, save_as_rank(arguments))
        return
    with tempfile.TemporaryDirectory(prefix="penstock-checkpoint-") as folder:
        if arguments.only in (None, "steps"):
            measure_steps(arguments, Path(folder))
        if arguments.only in (None, "resuming"):
            measure_resuming(Path(folder))
        if arguments.only in (None, "slow-disk"):
            measure_slow_disk(arguments, Path(folder))
        if arguments.only in (None, "files"):
            measure_files(arguments, Path(folder))


if __name__ == "__main__":
    main()
