"""How a rank tells its launcher why it failed, and how the launcher picks the first cause among several."""

import json
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import torch.distributed as dist

from penstock.cli.status import ExitStatus, status_of
from penstock.errors import PeerLost, PipelineError

FAILURE_KEY, FINISHED_KEY = "penstock/failure/{}", "penstock/finished/{}"
NO_RANK_AT_FAULT = (ExitStatus.WRONG_INPUT, ExitStatus.NO_CHECKPOINT, ExitStatus.NOT_FINITE)


@dataclass(frozen=True, slots=True)
class RankFailure:
    """The reason why a rank ended badly; the whole launch ends with `status`."""

    rank: int
    status: int
    message: str
    is_consequence: bool = False
    """True where the rank only noticed that another one is gone."""
    raised_at_s: float = 0.0
    """Seconds of the system's monotonic clock, which the processes of one machine share."""
    culprit: int | None = None
    """The rank that the error blames; None where it blames none."""
    is_silent: bool = False
    """True where the rank wrote no message, so that nobody knows what it did last."""

    @property
    def shown(self) -> str:
        """The message as it is printed; wrong input and a loss that diverges are no rank's fault."""
        if self.status in NO_RANK_AT_FAULT or self.message.startswith(("rank ", "no rank ")):
            return self.message
        return f"rank {self.rank if self.culprit is None else self.culprit} failed: {self.message}"

    @classmethod
    def of(cls, error: BaseException, rank: int, message: str) -> "RankFailure":
        culprit = error.rank if isinstance(error, PipelineError) else None
        return cls(rank, int(status_of(error)), message, isinstance(error, PeerLost), time.monotonic(), culprit)


def write_failure(store: dist.Store, failure: RankFailure) -> None:
    """Write a failure into the store, where the launcher reads it."""
    store.set(FAILURE_KEY.format(failure.rank), json.dumps(asdict(failure)))


def read_failures(store: dist.Store, num_ranks: int) -> list[RankFailure]:
    """Return the failures that the ranks have written, by rank."""
    keys = [FAILURE_KEY.format(rank) for rank in range(num_ranks)]
    return [RankFailure(**json.loads(store.get(key))) for key in keys if store.check([key])]


def first_cause(exit_codes: Mapping[int, int], written: Sequence[RankFailure]) -> RankFailure:
    """Pick the failure that explains the others.

    `exit_codes` are those of the ranks that did not end well, as `subprocess` gives them. A rank that a signal ended
    could write nothing, so it comes before those that only noticed a lost peer, unless it ended only because the
    launcher told it to. Any other written failure comes first, the earliest of them: a stopped rank, say, passes the
    deadline of another one long before the launcher kills it.
    """
    reported = sorted(written, key=lambda failure: (failure.is_consequence, failure.raised_at_s))
    silent = dict(sorted(exit_codes.items(), key=lambda item: item[1] == -signal.SIGTERM))
    for failure in reported:
        silent.pop(failure.rank, None)
    is_noticed_only = all(failure.is_consequence for failure in reported)
    if silent and (not reported or (is_noticed_only and _was_killed(next(iter(silent.values()))))):
        return _explain_silence(*next(iter(silent.items())), reported)
    return reported[0]


def _was_killed(exit_code: int) -> bool:
    return exit_code < 0 and exit_code != -signal.SIGTERM


def _explain_silence(rank: int, exit_code: int, reported: Sequence[RankFailure]) -> RankFailure:
    if exit_code == ExitStatus.INTERRUPTED:
        return RankFailure(rank, ExitStatus.INTERRUPTED, "")
    if exit_code < 0:
        return _killed(rank, -exit_code, reported)
    message = f"rank {rank} ended with status {exit_code} and left no message"
    return RankFailure(rank, ExitStatus.RANK_FAILED, message, is_silent=True)


def write_finished(store: dist.Store, rank: int) -> None:
    """Write into the store that a rank has done all that it was started for."""
    store.set(FINISHED_KEY.format(rank), "")


def unfinished(store: dist.Store, num_ranks: int) -> RankFailure | None:
    """Return the failure of the first rank that ended with status 0 in the midst of its work; None where none did."""
    rank = next((rank for rank in range(num_ranks) if not store.check([FINISHED_KEY.format(rank)])), None)
    if rank is None:
        return None
    return RankFailure(
        rank,
        ExitStatus.RANK_FAILED,
        f"rank {rank} ended with status 0 before the run was over: the model, its loss, the source of the data or a "
        "library ended the process, as os._exit does. Raise an error there",
        is_silent=True,
    )


def _killed(rank: int, number: int, reported: Sequence[RankFailure]) -> RankFailure:
    name = signal.Signals(number).name if number in {int(member) for member in signal.Signals} else f"signal {number}"
    advice: dict[int, str] = {
        signal.SIGKILL: "Where nobody killed it, the system did for lack of memory: see the kernel's log, and lower "
        "batch.size or the activations that the schedule keeps.",
        signal.SIGSEGV: "It crashed in compiled code: run it with PYTHONFAULTHANDLER=1 to see the place.",
    }
    lines = [f"rank {rank} was ended by {name}. {advice.get(number, '')}".rstrip()]
    lines += [failure.shown for failure in reported[:1]]
    return RankFailure(rank, ExitStatus.RANK_FAILED, "\n".join(lines))
