"""The smallest run worth training, and how tests of the whole command line start it."""

import os
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from tests.support.forked_python import ForkedPython

RUN = """
[run]
folder = "run"
device = "cpu"
steps = 6
evaluate_batches = 1
record_step = 0

[pipeline]
ranks = 1
microbatches = 2

[model]
width = 16
layers = 2
heads = 2
key_value_heads = 2
hidden = 16

[data]
files = ["text.txt"]

[batch]
size = 4
length = 16

[optimizer]
warmup_steps = 1
"""
TEXT = "the quick brown fox jumps over the lazy dog. " * 300
PENSTOCK = ("-m", "penstock")
TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node")
TORCH_CACHE = "torchinductor_"
"""Torch makes this empty folder in the temporary folder, whatever is trained."""


def write_tiny_run(folder):
    """Write run.toml and its text into a folder; the run belongs into its folder `run`."""
    (folder / "run.toml").write_text(RUN)
    (folder / "text.txt").write_text(TEXT)
    (folder / "tmp").mkdir()


def settings(*pairs):
    """Return the flags that override settings."""
    return [word for pair in pairs for word in ("--set", pair)]


def start(arguments, folder, *, stdout=subprocess.PIPE, **environment):
    """Start Python with `arguments` in a folder, in a process group of its own, its messages on pipes or in a file."""
    return subprocess.Popen(
        [sys.executable, *arguments],
        cwd=folder,
        env={**_environment_of(folder), **environment},
        stdout=stdout,
        stderr=subprocess.PIPE if stdout == subprocess.PIPE else subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )


def fork(arguments, folder, *, plant="", output=None, **environment):
    """Start Python likewise, without its start-up; its processes run the code `plant` first (forked_python.py)."""
    return ForkedPython(arguments, folder, {**_environment_of(folder), **environment}, plant=plant, output=output)


def _environment_of(folder):
    own = {"TMPDIR": str(folder / "tmp"), "OMP_NUM_THREADS": "1"}
    return {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")} | own


def start_training(folder, *pairs, **environment):
    return start([*PENSTOCK, "train", "run.toml", *settings(*pairs)], folder, **environment)


def fork_training(folder, *pairs, **environment):
    return fork([*PENSTOCK, "train", "run.toml", *settings(*pairs)], folder, **environment)


def ranks_of(launcher):
    """Return the processes of the ranks that a launcher has started, by their rank."""
    found = {}
    with suppress(OSError):
        for child in map(int, Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()):
            of_fork = re.match(r"rank (\d+)", Path(f"/proc/{child}/comm").read_text())
            rank = of_fork or re.search(r"(?:^|\0)RANK=(\d+)", Path(f"/proc/{child}/environ").read_text())
            if rank:
                found[int(rank[1])] = child
    return found


def files_below(folder):
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if not path.name.startswith(TORCH_CACHE)}
