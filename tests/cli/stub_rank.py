"""A rank for the tests of the launcher: `stub_rank.py MODE FOLDER` does what MODE says; its pid is a file in FOLDER."""

import os
import signal
import sys
import time
from pathlib import Path

from penstock.cli.lifetime import die_with, end_when_told, launcher_of
from penstock.errors import PeerLost

RANK = os.environ["RANK"]


def sleep_lightly():
    """Stand in for a rank without importing torch."""
    Path(sys.argv[2], RANK).write_text(str(os.getpid()))
    time.sleep(600)


def meet():
    """Join the others, prove it by a sum over all, then wait for a message that never comes."""
    import torch
    import torch.distributed as dist

    from penstock.cli.launch import join_ranks

    join_ranks(os.environ, timeout_s=60.0)
    total = torch.ones(1)
    dist.all_reduce(total)
    Path(sys.argv[2], RANK).write_text(f"{os.getpid()} {total.item():.0f} {os.environ['OMP_NUM_THREADS']}")
    if sys.argv[1] == "hang":
        dist.recv(total, 1 - dist.get_rank())


def lose_one():
    if RANK == "0":
        while not Path(sys.argv[2], "1").exists():
            time.sleep(0.01)
        raise PeerLost("rank 0 waited for rank 1, whose connection is gone", rank=0)
    Path(sys.argv[2], RANK).write_text(str(os.getpid()))
    time.sleep(0.1)
    raise RuntimeError("the cause")


def run_as_rank(body):
    from penstock.cli.rank import run_rank

    return run_rank(body, environment=os.environ)


def main(mode):
    if mode == "silent":
        return 3 if RANK == "0" else 0
    end_when_told()
    launcher = launcher_of(os.environ)
    if launcher is not None:
        die_with(launcher)
    if mode == "light":
        return sleep_lightly()
    if mode == "stopped" and RANK == "1":
        os.kill(os.getpid(), signal.SIGSTOP)
    if mode == "stopped":
        return 4
    return run_as_rank(meet if mode in ("hang", "meet") else lose_one)


sys.exit(main(sys.argv[1]))
