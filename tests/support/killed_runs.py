"""What cases that harm ranks of real runs share: the layouts, random instants, and how a run must have ended."""

import json
import time
from dataclasses import dataclass

from penstock.checkpoints.folder import CheckpointFolder
from penstock.checkpoints.verification import verify
from tests.support.tiny_run import fork_training, ranks_of, write_tiny_run

LONGEST_S = 280
STARTING_POLL_S, SAVING_POLL_S = 0.05, 0.001


@dataclass(frozen=True)
class Layout:
    """The processes of a tiny run, what replicas share out, and how long it trains."""

    ranks: int
    replicas: int = 1
    num_steps: int = 60
    sections: tuple[str, ...] = ()

    @property
    def num_processes(self):
        return self.ranks * self.replicas

    @property
    def options(self):
        run = (f"run.steps={self.num_steps}", "run.evaluate_every=0", f"pipeline.ranks={self.ranks}")
        return (*run, f"parallel.data={self.replicas}", "checkpoint.every=2", "checkpoint.keep_last=2", *self.sections)

    def name_of(self, rank):
        """How messages name a rank: the replicas of a stage are neighbours."""
        return f"rank {rank} (pipeline {rank // self.replicas}, data {rank % self.replicas})"

    def __str__(self):
        told = [
            section.partition("=")[2] for section in self.sections if section.startswith(("parallel.shard", "prec"))
        ]
        return " ".join([f"{self.ranks}x{self.replicas}", *told[:2]])


def mesh(ranks, replicas, shard, *sections):
    """With several stages a rank of which one is whole at a time, `full` reduces a stage several times a step."""
    own = ("batch.size=8", "pipeline.schedule=interleaved-1f1b", f"parallel.shard={shard}", "parallel.residency=1")
    return Layout(ranks, replicas, 20, (*own, *sections))


SHARDS = ("none", "optimizer", "full")
# Half precision adds main weights, which are shared out, and a loss scale, for which some steps are skipped.
HALF = ("precision.compute=float16", "precision.loss_scale=1048576", "precision.loss_scale_growth_steps=4")
LINES = (Layout(4), Layout(2))
MESHES = (
    *(mesh(ranks, replicas, shard) for ranks, replicas in ((2, 2), (1, 2), (1, 4)) for shard in SHARDS),
    mesh(2, 2, "full", *HALF),
)


class Undisturbed:
    """Runs that nobody harms, each made when its weights are first asked for."""

    def __init__(self, folder):
        self._folder = folder
        self._weights = {}

    def weights_of(self, layout):
        """Without replicas any number of ranks comes to the weights of one; with them, each layout to its own."""
        layout = layout if layout.replicas > 1 else Layout(1, num_steps=layout.num_steps, sections=layout.sections)
        if layout not in self._weights:
            folder = self._folder / str(len(self._weights))
            folder.mkdir(parents=True)
            write_tiny_run(folder)
            training = fork_training(folder, *layout.options)
            _, complained = training.communicate(timeout=LONGEST_S)
            assert training.returncode == 0, complained
            self._weights[layout] = (folder / "run" / "weights.safetensors").read_bytes()
        return self._weights[layout]


def wait_for_ranks(training, layout, killed, chance, checkpoints):
    """Return the ranks at a random instant of an attempt; None where the run has ended before."""
    is_amid_save = chance.random() < 0.5
    goal = chance.randint(1, layout.num_steps // 2)  # the run is to be there still
    delay_s = chance.uniform(0.0, 0.02)
    end_s = time.monotonic() + LONGEST_S
    ranks = {}
    while training.poll() is None and time.monotonic() < end_s:
        if not ranks:
            time.sleep(STARTING_POLL_S)  # starting takes seconds, and looking takes time from it
            found = ranks_of(training.pid)
            ranks = found if len(found) == layout.num_processes and not killed & set(found.values()) else {}
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


def checkpoints_of(folder):
    return CheckpointFolder(folder / "run" / "checkpoints")


def lost(checkpoints, announced):
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


def problem_of_end(status, printed, folder, layout, weights):
    """Say what is wrong with a run that has come to its end, or nothing."""
    if status != 0:
        return f"ended with {status}: {printed[-3000:]}"
    if (folder / "run" / "weights.safetensors").read_bytes() != weights:
        return "the weights differ"
    steps = {json.loads(line)["step"] for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()}
    return "" if steps == set(range(1, layout.num_steps + 1)) else f"metrics have the steps {sorted(steps)}"
