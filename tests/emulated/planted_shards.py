"""Waits for what replicas with shards exchange, and faults in them: gathers, scattered sums, rows of checkpoints.

Each function under `plant` takes what the name stands for, and returns what it stands for with the fault.
"""

import torch

from penstock.checkpoints import row_exchange
from penstock.checkpoints.local_tensors import LocalTensor
from penstock.execute.replicas.rows import Rows
from tests.emulated.checker import UNORDERED
from tests.emulated.pipelines import transport_of
from tests.emulated.planted_waits import WithoutWaits
from tests.emulated.planting import table
from tests.emulated.replicas import train

FAULTS, plant = table()
NUM_ROWS, WIDTH = 5, 64


# ---- scenarios


def shards(rank, num_ranks):
    """Each rank is a replica, and gathers one stage at a time."""
    return train(rank, num_ranks, num_ranks, torch.device("emu", rank), shard="full", residency=1)[0]


def exchanged_rows(rank, num_ranks):
    """Each rank gets the rows of one tensor, which all share out, and adds them up."""
    device = torch.device("emu", rank)
    transport = transport_of(rank, num_ranks, device, deadline_s=3.0)  # for which the fault lets the others wait
    whole = torch.zeros(NUM_ROWS, WIDTH, device=device)
    own = Rows(whole.shape, (), num_ranks).of_replica(rank)
    local = torch.full((len(own), WIDTH), 1.0 + rank, device=device)
    whole[own.start : own.stop] = local
    held = LocalTensor(local, tuple(whole.shape), own)
    row_exchange.exchange_rows(transport, [[held]] * num_ranks, [whole], device)
    total = whole.sum().item()
    transport.close()
    return total


# ---- faults


def _without_wait(original):
    return lambda exchange: exchange._use_results()


plant(
    "gathered weights are used before they are there",
    "shards",
    "penstock.execute.replicas.exchanges:_Exchange.complete",
    UNORDERED,
    "all_gather_into_tensor",
    "",
    make=_without_wait,
)

plant(
    "rows of a sum are used before they are there",
    "shards",
    "penstock.execute.replicas.exchanges:_Exchange.complete",
    UNORDERED,
    "reduce_scatter_tensor",
    "",
    make=_without_wait,
)

plant(
    "rows of another replica are used before they are there",
    "exchanged_rows",
    "penstock.checkpoints.row_exchange:exchange_rows",
    UNORDERED,
    "recv from",
    "",
    make=lambda original: lambda transport, *rest: original(WithoutWaits(transport, torch.uint8), *rest),
)
