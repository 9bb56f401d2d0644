"""Kill ranks of real runs at random instants, and compare the weights at the end with those of an undisturbed run.

python -m tests.kills --cases 50             half of them on 2 ranks, half on 4; half of the kills amid a checkpoint
python -m tests.kills --cases 1 --seed 17    one of them again

torchrun starts the ranks again. After each kill, the newest checkpoint that was announced must still be there and
verify, or a newer one. Exit status 0 if every case holds.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from contextlib import suppress
from pathlib import Path

from penstock.checkpoints.folder import CheckpointFolder
from penstock.checkpoints.verification import verify
from tests.tiny_run import PENSTOCK, fork_training, ranks_of, settings, start, write_tiny_run

NUM_STEPS = 60
LONGEST_S = 280
MOST_KILLS = 2
STARTING_POLL_S, SAVING_POLL_S = 0.05, 0.001
RESTARTS = ("--max-restarts", str(MOST_KILLS), "--monitor-interval", "0.1")
OPTIONS = (f"run.steps={NUM_STEPS}", "run.evaluate_every=0", "checkpoint.every=2", "checkpoint.keep_last=2")


def undisturbed(folder):
    """Train without a kill, on one rank, and return the weights: any number of ranks comes to the same ones."""
    folder.mkdir()
    write_tiny_run(folder)
    training = fork_training(folder, *OPTIONS)
    _, complained = training.communicate(timeout=LONGEST_S)
    assert training.returncode == 0, complained
    return (folder / "run" / "weights.safetensors").read_bytes()


def case(folder, seed, weights):
    """Train on 2 or 4 ranks of which some are killed; return what is wrong, or nothing, and how many were killed."""
    chance = random.Random(seed)
    num_ranks = 2 if seed % 2 else 4
    folder.mkdir()
    write_tiny_run(folder)
    torchrun = ["-m", "torch.distributed.run", "--standalone", *RESTARTS, "--nproc-per-node", str(num_ranks)]
    options = settings(*OPTIONS, f"pipeline.ranks={num_ranks}", f"checkpoint.asynchronous={str(seed % 3 > 0).lower()}")
    command = [*torchrun, *PENSTOCK, "train", "run.toml", *options]
    with (folder / "output.txt").open("w") as output:
        training = start(command, folder, stdout=output)
    try:
        num_kills, problem = _kill(training, folder, chance, num_ranks)
        training.wait(timeout=LONGEST_S)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(training.pid, signal.SIGKILL)
    return problem or _problem_of_end(training.returncode, folder, weights), num_kills


def _kill(training, folder, chance, num_ranks):
    """Kill ranks until the restarts are used up; return how many, and whether a checkpoint was lost."""
    checkpoints = CheckpointFolder(folder / "run" / "checkpoints")
    num_kills, killed = 0, set()
    for _ in range(chance.randint(1, MOST_KILLS)):
        ranks = _wait_for_ranks(training, num_ranks, killed, chance, checkpoints)
        if ranks is None:
            break
        announced = max(checkpoints.steps(), default=0)
        try:
            os.kill(ranks[chance.randrange(num_ranks)], signal.SIGKILL)
        except ProcessLookupError:  # the run has just ended
            break
        num_kills += 1
        killed |= set(ranks.values())
        problem = _lost(checkpoints, announced)
        if problem:
            return num_kills, problem
    return num_kills, ""


def _wait_for_ranks(training, num_ranks, killed, chance, checkpoints):
    """Return the ranks at a random instant of an attempt; None where the run has ended before."""
    is_amid_save = chance.random() < 0.5
    goal = chance.randint(1, NUM_STEPS // 2)  # the run is to be there still
    delay_s = chance.uniform(0.0, 0.02)
    end_s = time.monotonic() + LONGEST_S
    ranks = {}
    while training.poll() is None and time.monotonic() < end_s:
        if not ranks:
            time.sleep(STARTING_POLL_S)  # starting takes seconds, and looking takes time from it
            found = ranks_of(training.pid)
            ranks = found if len(found) == num_ranks and not killed & set(found.values()) else {}
            continue
        is_far = max(checkpoints.steps(), default=0) >= goal
        is_saving = any(checkpoints.path.glob("step-*.partial"))
        if (is_far or goal <= 3) and (is_saving or not is_amid_save):
            time.sleep(delay_s)
            if ranks_of(training.pid) == ranks:
                return ranks
            ranks = {}  # they have ended, and others may follow
            continue
        time.sleep(SAVING_POLL_S)
    return None


def _lost(checkpoints, announced):
    """Look for a checkpoint at least as new as what was announced, while the others may still remove older ones."""
    problems = []
    for _ in range(20):
        for step in checkpoints.steps():
            try:
                verify(checkpoints.of_step(step))
            except Exception as error:
                problems.append(str(error))
                continue
            if step >= announced:
                return ""
        if not announced:
            return ""
        time.sleep(0.05)
    return f"step {announced} was announced, and nothing as new verifies: {problems[-3:]}"


def _problem_of_end(status, folder, weights):
    if status != 0:
        return f"ended with {status}: {(folder / 'output.txt').read_text()[-3000:]}"
    if (folder / "run" / "weights.safetensors").read_bytes() != weights:
        return "the weights differ"
    steps = {json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()}
    return "" if steps == set(range(1, NUM_STEPS + 1)) else f"metrics have the steps {sorted(steps)}"


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=50)
    parser.add_argument("--seed", type=int, default=1, help="of the first case")
    arguments = parser.parse_args()
    num_failed = num_kills = 0
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="penstock-kills-") as folder:
        print("training once without a kill ...", flush=True)
        weights = undisturbed(Path(folder) / "whole")
        first_s = time.monotonic()
        for number in range(1, arguments.cases + 1):
            seed = arguments.seed + number - 1
            begin_s = time.monotonic()
            problem, killed = case(Path(folder) / str(seed), seed, weights)
            num_kills += killed
            num_failed += bool(problem)
            now_s = time.monotonic()
            left_s = (now_s - first_s) / number * (arguments.cases - number)
            print(
                f"case {number} of {arguments.cases}, seed {seed}: {killed} killed, {now_s - begin_s:.0f} s, "
                f"{problem or 'ok'}; about {left_s / 60:.0f} min left",
                flush=True,
            )
            shutil.rmtree(Path(folder) / str(seed))
    print(
        f"{arguments.cases - num_failed} of {arguments.cases} cases hold, {num_kills} ranks were killed, "
        f"{(time.monotonic() - started_s) / 60:.0f} min"
    )
    return 1 if num_failed else 0


if __name__ == "__main__":
    sys.exit(main())
