"""Lose one rank of a mesh that `penstock train` started once: killed, stopped, slow, or with an error.

All other ranks must end in time, with one message that names it and the exit status of the fault. The same command must
then continue, and come to the weights of an undisturbed run. The cases have seeds of their own in kills.py.
"""

import os
import random
import re
import signal
import time
from contextlib import suppress
from dataclasses import dataclass

from penstock.cli.status import ExitStatus
from tests.cli.processes import is_alive
from tests.support.killed_runs import LONGEST_S, MESHES, checkpoints_of, lost, problem_of_end, wait_for_ranks
from tests.support.tiny_run import fork_training, ranks_of, write_tiny_run

DEADLINE_S, PATIENT_S = 4.0, 60.0
NOTICE_S, SURPLUS_S, LEAVE_S = 16.0, 16.0, 8.0
"""Together less than the time for which torch's launcher waits for a process that does not end."""
POLL_S = 0.01
SQUARES = [layout for layout in MESHES if layout.ranks == layout.replicas == 2]

PLANT = """
import os

if os.environ.get("RANK") == "{rank}":
    import time
    from pathlib import Path

    from penstock.models.decoder import Block

    forward, calls = Block.forward, []

    def planted(self, features):
        calls.append(features.shape)
        if len(calls) == {call}:
            Path("struck").touch()
            {harm}
        return forward(self, features)

    Block.forward = planted
"""


@dataclass(frozen=True)
class Fault:
    """What happens to one rank, and how the launch must end."""

    name: str
    status: ExitStatus
    words: str
    """How the message begins, a regular expression."""
    deadline_s: float = PATIENT_S
    number: signal.Signals | None = None
    """The signal, at a random instant of the run."""
    harm: str = ""
    """Or the statement, in a random forward of its block."""

    leave_s: float = LEAVE_S
    """How much longer the command may take than the other ranks."""

    @property
    def longest_s(self):
        """In which all other ranks must have ended."""
        return NOTICE_S if self.deadline_s == PATIENT_S else self.deadline_s + SURPLUS_S


KILL = Fault("kill", ExitStatus.RANK_FAILED, "rank {rank} was ended by SIGKILL", number=signal.SIGKILL)
STOP = Fault("stop", ExitStatus.HANG_ENDED, "{name} is the culprit: its process", DEADLINE_S, number=signal.SIGSTOP)
SLOW = Fault(
    "slow",
    ExitStatus.HANG_ENDED,
    "{name} is the culprit: it has been in",
    DEADLINE_S,
    harm="time.sleep(600)",
    leave_s=2 * DEADLINE_S + LEAVE_S,  # told to end, a rank that computes has twice the deadline for its step
)
RAISE = Fault("raise", ExitStatus.RANK_FAILED, "{name}, .*ValueError: planted", harm="raise ValueError('planted')")
FAULTS = (KILL, KILL, STOP, SLOW, RAISE)


@dataclass(frozen=True)
class Loss:
    """Which rank of which mesh is lost, and how."""

    layout: object
    rank: int
    fault: Fault
    call: int

    @classmethod
    def drawn(cls, seed):
        """Any ten seeds in a row have all faults, all meshes of 2x2, and a kill of each rank."""
        layout = SQUARES[seed % len(SQUARES)]
        rank = (seed + seed // len(FAULTS)) % layout.num_processes
        return cls(layout, rank, FAULTS[seed % len(FAULTS)], random.Random(seed).randint(2, layout.num_steps))

    def __str__(self):
        return f"{self.layout}, {self.fault.name} rank {self.rank}"


def case(folder, seed, undisturbed):
    """Lose a rank and continue; return what it was, what is wrong, if anything, and how many ranks were lost."""
    loss = Loss.drawn(seed)
    weights = undisturbed.weights_of(loss.layout)
    folder.mkdir()
    write_tiny_run(folder)
    options = (*loss.layout.options, f"run.deadline_s={loss.fault.deadline_s}")
    plant = PLANT.format(rank=loss.rank, call=loss.call, harm=loss.fault.harm) if loss.fault.harm else ""
    training = fork_training(folder, *options, plant=plant)
    try:
        told, problem = _lose(training, folder, loss, random.Random(seed))
    finally:
        if training.poll() is None:
            training.kill()
    if problem:
        return f"{loss}{told}", problem, 1
    again = fork_training(folder, *options)
    printed, complained = again.communicate(timeout=LONGEST_S)
    problem = problem_of_end(again.returncode, printed + complained, folder, loss.layout, weights)
    return f"{loss}{told}", problem, 1


def _lose(training, folder, loss, chance):
    """Strike, wait for the end of all; return how long the others took, and what is wrong."""
    checkpoints = checkpoints_of(folder)
    ranks = _strike(training, folder, loss, chance, checkpoints)
    if ranks is None:
        return "", f"the run ended before: {training.communicate(timeout=LONGEST_S)}"
    begin_s = time.monotonic()
    announced = max(checkpoints.steps(), default=0)
    others = [process for rank, process in ranks.items() if rank != loss.rank]
    while any(map(is_alive, others)) and time.monotonic() < begin_s + LONGEST_S:
        time.sleep(POLL_S)
    others_s = time.monotonic() - begin_s
    _, complained = training.communicate(timeout=LONGEST_S)
    left_s = time.monotonic() - begin_s
    told = f", others ended after {others_s:.2f} s, the command after {left_s:.2f} s"
    if others_s > loss.fault.longest_s or left_s > loss.fault.longest_s + loss.fault.leave_s:
        return told, f"allowed were {loss.fault.longest_s} s: {complained}"
    if any(map(is_alive, ranks.values())):
        return told, "a rank is still there"
    return told, _problem_of_message(training.returncode, complained, loss) or lost(checkpoints, announced)


def _strike(training, folder, loss, chance, checkpoints):
    """Return the ranks at the moment of the fault; None where the run has ended before."""
    if loss.fault.number is not None:
        ranks = wait_for_ranks(training, loss.layout, set(), chance, checkpoints)
        with suppress(ProcessLookupError):
            if ranks is not None:
                os.kill(ranks[loss.rank], loss.fault.number)
        return ranks
    ranks = {}
    while training.poll() is None and not (folder / "struck").exists():
        ranks = ranks_of(training.pid) or ranks
        time.sleep(POLL_S)
    return ranks if (folder / "struck").exists() else None


def _problem_of_message(status, complained, loss):
    words = loss.fault.words.format(rank=loss.rank, name=re.escape(loss.layout.name_of(loss.rank)))
    messages = re.findall("^penstock: (.*)", complained, re.MULTILINE)
    if status == loss.fault.status and len(messages) == 1 and re.match(words, messages[0]):
        return ""
    return f"ended with {status} without {words!r}: {complained[-3000:]}"
