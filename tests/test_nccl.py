"""Ranks that are processes, over NCCL itself, also where they share one GPU.

NCCL refuses two ranks of one host on one GPU. With a `NCCL_HOSTID` of its own each rank is a host to NCCL, and messages
go by sockets; to Penstock they are on one host.
"""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from penstock.errors import PeerLost
from penstock.execute.transport import TorchTransport
from tests.emulated.failing_steps import DEADLINE_S, Failing, train_around
from tests.emulated.pipelines import FEATURES, Cell, train_over
from tests.support.ranks import RankPool

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(90)]

NUM_RANKS = 2
SLACK_S = 2.0
START_S = 120.0
CELLS = [
    Cell("1f1b", "plain", 2),
    Cell("zb-h1", "late weights", 2, 1),
    Cell("interleaved-1f1b", "recompute", 2),
    Cell("zbv", "ties", 2, 2),
    Cell("gpipe", "variable shapes", 2, 1),
    Cell("1f1b", "dropout", 2, 2),
    Cell("seq1f1b", "slices", 2),
    Cell("dualpipe-v", "overlapped pairs", 2),
    Cell("dualpipe-v", "late weights", 2, 2),
]


def prepare(rank):
    os.environ.update(NCCL_HOSTID=f"rank {rank}", NCCL_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    torch.cuda.set_device(device_of(rank))


def device_of(rank):
    return torch.device("cuda", rank % torch.cuda.device_count())


def processes(num_ranks):
    return RankPool(num_ranks, backend="cpu:gloo,cuda:nccl", prepare=prepare)


@pytest.fixture(scope="module")
def pool():
    with processes(NUM_RANKS) as ranks:
        yield ranks


def train_on(rank, cell, kind, dtype):
    device = torch.device("cpu") if kind == "cpu" else device_of(rank)
    return train_over(TorchTransport(dist.group.WORLD, device=device, deadline_s=60.0), cell, device, dtype=dtype)


def on_gpu(pool, cell, dtype=torch.float64):
    return pool.run(train_on, cell, "cuda", dtype, timeout_s=START_S)


def expect_close(found, expected):
    """Kernels of a GPU add in another order than those of a CPU."""
    for own, others in zip(found, expected, strict=True):
        assert own.losses == pytest.approx(others.losses, rel=1e-10)
        assert own.weights.keys() == others.weights.keys()
        for name, (dtype, values) in own.weights.items():
            assert dtype == others.weights[name][0]
            torch.testing.assert_close(*map(torch.tensor, (values, others.weights[name][1])), rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("cell", CELLS, ids=str)
def test_a_training_is_the_cpus(pool, cell):
    expected = pool.run(train_on, cell, "cpu", torch.float64)

    found = on_gpu(pool, cell)

    expect_close(found, expected)
    follows = cell.run_ahead is not None and not FEATURES[cell.feature].is_overlapped
    assert [each.calls["follow"] > 0 for each in found] == [follows] * NUM_RANKS


@pytest.mark.parametrize("family", ["1f1b", "zbv"])
def test_run_ahead_changes_no_bit(pool, family):
    without, *others = [on_gpu(pool, Cell(family, "main gradients", 2, ahead), None) for ahead in (None, 1, 2)]

    for each in others:
        assert [own.losses for own in each] == [own.losses for own in without]
        assert [own.weights for own in each] == [own.weights for own in without]


def test_four_ranks_train_as_on_the_cpu():
    cell = Cell("interleaved-1f1b", "plain", 4, 2)
    with processes(4) as ranks:
        expect_close(on_gpu(ranks, cell), ranks.run(train_on, cell, "cpu", torch.float64))


def exchange_after_a_send_that_raised(rank):
    transport = TorchTransport(dist.group.WORLD, device=device_of(rank), deadline_s=DEADLINE_S)
    value = torch.full((3,), float(rank), device=device_of(rank))
    has_raised = False
    if rank == 0:
        transport.abort()
    else:
        end_s = time.monotonic() + START_S / 4
        while not has_raised and time.monotonic() < end_s:
            try:
                transport.post_send(0, value)
            except PeerLost:
                has_raised = True
    transport.recover()
    received = torch.zeros_like(value)
    tickets = [transport.post_receive(1 - rank, received), transport.post_send(1 - rank, value)]
    for ticket in tickets:
        transport.wait(ticket)
    transport.close()
    return has_raised, received.tolist()


def test_new_connections_carry_messages_after_a_send_that_raised(pool):
    found = pool.run(exchange_after_a_send_that_raised, timeout_s=START_S)

    assert found == [(False, [1.0] * 3), (True, [0.0] * 3)]


def train_around_on(rank, failing, kind):
    device = torch.device("cpu") if kind == "cpu" else device_of(rank)
    return train_around(TorchTransport(dist.group.WORLD, device=device, deadline_s=DEADLINE_S), failing, device)


def expect_right_steps_around(pool, found, failing):
    expected = pool.run(train_around_on, Failing(None, num_ranks=NUM_RANKS, family=failing.family), "cpu")
    for own, others in zip(found, expected, strict=True):
        assert own.losses == pytest.approx(others.losses, rel=1e-5)
        for name, values in own.weights.items():
            torch.testing.assert_close(*map(torch.tensor, (values, others.weights[name])), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("run_ahead", [None, 2])
@pytest.mark.parametrize("kind", ["raises", "late"])
def test_a_failure_is_named_in_time_and_a_later_step_is_right(pool, kind, run_ahead):
    failing = Failing(kind, "backward", num_ranks=NUM_RANKS, run_ahead=run_ahead)

    found = pool.run(train_around_on, failing, "cuda", timeout_s=START_S)

    limit_s = DEADLINE_S + 2 * SLACK_S
    assert [ended.blamed for ended in found] == [1, 1], [ended.text for ended in found]
    assert max(ended.ended_s for ended in found) - found[1].began_s < limit_s
    expect_right_steps_around(pool, found, failing)


@pytest.mark.parametrize("run_ahead", [None, 2])
def test_a_kernel_that_fails_on_the_device_is_named(run_ahead):
    failing = Failing("kernel", "forward", num_ranks=NUM_RANKS, run_ahead=run_ahead)
    with processes(NUM_RANKS) as ranks:
        found = ranks.run(train_around_on, failing, "cuda", timeout_s=START_S)

    assert [ended.blamed for ended in found] == [1, 1], [ended.text for ended in found]
    assert "device-side assert" in found[1].text
    assert max(ended.ended_s for ended in found) - found[1].began_s < DEADLINE_S + SLACK_S


@pytest.mark.parametrize("run_ahead", [None, 2])
def test_a_peer_that_is_killed_is_named(run_ahead):
    failing = Failing("dies", num_ranks=NUM_RANKS, run_ahead=run_ahead)
    with processes(NUM_RANKS) as ranks:
        begin_s = time.monotonic()
        outcome = ranks.attempt(train_around_on, failing, "cuda", timeout_s=START_S)

    assert outcome.exit_codes == {1: -signal.SIGKILL}
    print(f"ended after {time.monotonic() - begin_s:.1f} s: {outcome.results[0].text}")
    assert outcome.results[0].blamed == 1, str(outcome)
