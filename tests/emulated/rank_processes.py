"""Ranks as processes, each with the device and a default group of torch.distributed over it.

They take seconds to start, so they are for what only processes show: c10d's own calls, lost peers, aborts.
`with processes(2) as pool` gives the RankPool of tests/support/ranks.py; `device_of(rank)` is where a rank's tensors
belong.
"""

from functools import partial

import torch

from tests.support.ranks import RankPool


def processes(num_ranks, *, policy="lazy", seed=0):
    return RankPool(num_ranks, backend="cpu:gloo,emu:emunccl", prepare=partial(_prepare, policy, seed))


def device_of(rank):
    return torch.device("emu", rank)


def reports():
    """Run what is left on this rank's device, and return what its checker has found since the last call."""
    from tests.emulated.runtime import RUNTIME

    RUNTIME.finish()
    found = [str(report) for report in RUNTIME.checker.reports]
    RUNTIME.checker.reports.clear()
    return found


def _prepare(policy, seed, rank):
    from tests.emulated.install import install
    from tests.emulated.nccl import start_pump
    from tests.emulated.runtime import RUNTIME

    torch.set_num_threads(1)
    install()
    RUNTIME.reset(policy, seed, is_alone=False)
    RUNTIME.extension.set_device(rank)
    start_pump()
