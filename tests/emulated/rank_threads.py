"""Ranks as threads of this process: `run_scenario` is what the kept process does for every scenario.

Within a scenario, `communicator()` returns this rank's end of a communicator of all ranks.
"""

import gc
import threading
import traceback
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from tests.emulated.queues import DeviceStopped
from tests.emulated.runtime import RUNTIME

_rank = threading.local()


@dataclass(frozen=True)
class Options:
    """How a scenario runs."""

    num_ranks: int = 1
    policy: str = "lazy"
    seed: int = 0
    hang_s: float = 20.0

    def __str__(self):
        return f"policy={self.policy!r}, seed={self.seed}, num_ranks={self.num_ranks}"


@dataclass
class Outcome:
    """What became of a scenario."""

    results: list
    reports: list
    tracebacks: dict = field(default_factory=dict)
    """By rank, of those that raised first; a rank that was stopped because of another is not here."""
    host_waits: dict = field(default_factory=dict)
    """How often hosts waited, by what made them wait."""

    def kinds(self):
        return sorted({report.kind for report in self.reports})


def communicator(name="messages", **options):
    """Return this rank's end of the communicator of that name; every rank of the scenario calls this."""
    from tests.emulated.nccl import Communicator

    return Communicator(store_of_scenario(name), _rank.rank, _rank.num_ranks, name=name, **options)


def store_of_scenario(name="ranks"):
    """Return a store in which the ranks of the scenario meet."""
    return dist.PrefixStore(name, _rank.store)


def run_scenario(function, arguments, options):
    """Call `function(rank, num_ranks, *arguments)` in a thread per rank, on a clean device each time."""
    RUNTIME.reset(options.policy, options.seed, num_ranks=options.num_ranks, hang_s=options.hang_s)
    outcome = Outcome([None] * options.num_ranks, [])
    store = dist.HashStore()
    threads = [
        threading.Thread(target=_be_rank, args=(rank, function, arguments, options, store, outcome))
        for rank in range(options.num_ranks)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    gc.collect()  # what only cycles hold dies within its own scenario
    RUNTIME.finish()
    outcome.reports = list(RUNTIME.checker.reports)
    outcome.host_waits = dict(RUNTIME.host_waits)
    RUNTIME.reset()
    return outcome


def _be_rank(rank, function, arguments, options, store, outcome):
    _rank.rank, _rank.num_ranks, _rank.store = rank, options.num_ranks, store
    RUNTIME.be_rank(rank)
    torch.manual_seed(rank)
    try:
        outcome.results[rank] = function(rank, options.num_ranks, *arguments)
    except BaseException as error:
        # torch gives errors that pass through C++ another type; the text remains.
        if DeviceStopped.__name__ not in f"{type(error).__name__}: {error}":
            outcome.tracebacks[rank] = traceback.format_exc()
        error.__traceback__ = None  # its frames hold tensors
        RUNTIME.queues.stop(f"rank {rank} raised {type(error).__name__}: {error}")
    finally:
        RUNTIME.leave_rank()
