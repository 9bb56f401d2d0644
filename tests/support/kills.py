"""Kill ranks of real runs at random instants, and compare the weights at the end with those of an undisturbed run.

python -m tests.support.kills --cases 50               30 lines of ranks and 10 meshes under torchrun, which starts the
                                               ranks again, and 10 meshes that `penstock train` starts
python -m tests.support.kills --cases 1 --seed 1007    one of them again

Half of the kills come amid a checkpoint. After each, the newest checkpoint that was announced must still be there and
verify, or a newer one. Exit status 0 if every case holds.
"""

import argparse
import os
import random
import shutil
import signal
import sys
import tempfile
from contextlib import suppress
from pathlib import Path

from tests.support import lost_replicas
from tests.support.killed_runs import (
    LINES,
    LONGEST_S,
    MESHES,
    Undisturbed,
    checkpoints_of,
    lost,
    problem_of_end,
    wait_for_ranks,
)
from tests.support.tiny_run import PENSTOCK, fork, settings, start, write_tiny_run

MOST_KILLS = 2
RESTARTS = ("--max-restarts", str(MOST_KILLS), "--monitor-interval", "0.1")
MESH_SEEDS, LOST_SEEDS = 1000, 2000
"""Seeds from here on are those of meshes under torchrun, and of meshes that are started once."""


def layout_of(seed):
    return LINES[seed % len(LINES)] if seed < MESH_SEEDS else MESHES[seed % len(MESHES)]


def case(folder, seed, undisturbed):
    """Train on ranks of which some are killed; return what it was, what is wrong, if anything, and how many."""
    if seed >= LOST_SEEDS:
        return lost_replicas.case(folder, seed, undisturbed)
    chance = random.Random(seed)
    layout = layout_of(seed)
    weights = undisturbed.weights_of(layout)
    folder.mkdir()
    write_tiny_run(folder)
    training = _start(layout, folder, is_asynchronous=seed % 3 > 0)
    try:
        num_kills, problem = _kill(training, folder, chance, layout)
        training.wait(timeout=LONGEST_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(training.pid, signal.SIGKILL)
    printed = (folder / "output.txt").read_text()
    return str(layout), problem or problem_of_end(training.returncode, printed, folder, layout, weights), num_kills


def _start(layout, folder, *, is_asynchronous):
    torchrun = ["-m", "torch.distributed.run", "--standalone", *RESTARTS, "--nproc-per-node", str(layout.num_processes)]
    options = settings(*layout.options, f"checkpoint.asynchronous={str(is_asynchronous).lower()}")
    command = [*torchrun, *PENSTOCK, "train", "run.toml", *options]
    with (folder / "output.txt").open("w") as output:
        if layout.replicas > 1:  # four imports of torch per attempt would take longer than the run
            return fork(command, folder, output=output.name)
        return start(command, folder, stdout=output)


def _kill(training, folder, chance, layout):
    """Kill ranks until the restarts are used up; return how many, and whether a checkpoint was lost."""
    checkpoints = checkpoints_of(folder)
    num_kills, killed = 0, set()
    for _ in range(chance.randint(1, MOST_KILLS)):
        ranks = wait_for_ranks(training, layout, killed, chance, checkpoints)
        if ranks is None:
            break
        announced = max(checkpoints.steps(), default=0)
        try:
            os.kill(ranks[chance.randrange(layout.num_processes)], signal.SIGKILL)
        except ProcessLookupError:  # the run has just ended
            break
        num_kills += 1
        killed |= set(ranks.values())
        problem = lost(checkpoints, announced)
        if problem:
            return num_kills, problem
    return num_kills, ""


def seeds_of(num_cases, first):
    """Of five cases three are lines and two are meshes; from the seed of a mesh on, all are of its sort."""
    if first >= MESH_SEEDS:
        return list(range(first, first + num_cases))
    num_meshes = num_cases // 5
    num_lines = num_cases - 2 * num_meshes
    begins = (first, num_lines), (first + MESH_SEEDS - 1, num_meshes), (first + LOST_SEEDS - 1, num_meshes)
    return [seed for begin, count in begins for seed in range(begin, begin + count)]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1, help="of the first case")
    arguments = parser.parse_args()
    num_failed = num_kills = 0
    with tempfile.TemporaryDirectory(prefix="penstock-kills-") as folder:
        undisturbed = Undisturbed(Path(folder) / "undisturbed")
        for number, seed in enumerate(seeds_of(arguments.cases, arguments.seed), start=1):
            told, problem, killed = case(Path(folder) / str(seed), seed, undisturbed)
            num_kills += killed
            num_failed += bool(problem)
            print(f"case {number}, seed {seed}, {told}: {killed} killed, {problem or 'ok'}", flush=True)
            shutil.rmtree(Path(folder) / str(seed))
    print(f"{arguments.cases - num_failed} of {arguments.cases} cases hold, {num_kills} ranks were killed")
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
