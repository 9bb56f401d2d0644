"""With one stream, nothing on a device runs beside anything else, and every bit stays as it is."""

from contextlib import contextmanager
from itertools import pairwise

import pytest
import torch

from penstock.errors import ConfigError
from tests.emulated.failing_steps import Failing, OtherRanks, train_around_a_failure
from tests.emulated.pipelines import Cell, expect_equal_training, train, transport_of
from tests.emulated.rank_threads import store_of_scenario
from tests.emulated.replicas import ended_by, places_of
from tests.emulated.replicas import train as train_replicas
from tests.emulated.runtime import RUNTIME
from tests.support.local_pipelines import error_of, square_loss

pytestmark = pytest.mark.emulated

DEADLINE_S = 2.0


@contextmanager
def noting_operations(intervals):
    """Note begin and end of every operation of a device that takes time, on the simulated clock."""
    queues, run = RUNTIME.queues, RUNTIME.queues._run

    def run_and_note(queue, item):
        run(queue, item)
        if item.cost_s:
            intervals.append((queue.device, queue.now_s - item.cost_s, queue.now_s, item.name))

    queues._run = run_and_note
    try:
        yield
    finally:
        del queues._run


def overlapping(intervals):
    """Return pairs of operations of one device that ran at one time."""
    found = []
    for device in {device for device, *_ in intervals}:
        of_device = sorted(entry[1:] for entry in intervals if entry[0] == device)
        found += [(one[2], other[2]) for one, other in pairwise(of_device) if other[0] < one[1] - 1e-9]
    return found


def noted_of_rank_0(rank, call):
    """Call on all ranks, and note on rank 0, whose thread is of the same process, what all devices run."""
    intervals = []
    if rank:
        call()
        return []
    with noting_operations(intervals):
        call()
    return overlapping(intervals)


def train_and_note(rank, num_ranks, cell):
    return noted_of_rank_0(rank, lambda: train(rank, num_ranks, cell, "emu"))


def train_replicas_and_note(rank, num_ranks, options):
    return noted_of_rank_0(rank, lambda: train_replicas(rank, num_ranks, 2, torch.device("emu", rank), **options))


CELLS = [
    Cell("1f1b", "plain", 3, 2, memory="host", offloads=True),
    Cell("zbv", "ties", 2, 2, memory="pinned"),
    Cell("interleaved-1f1b", "dropout", 2, None, memory="host", offloads=True),
    Cell("gpipe", "variable shapes", 4, 1, memory="host"),
    Cell("zb-h1", "late weights", 3, 2, offloads=True),
    Cell("seq1f1b", "slices", 2, 2, memory="host", offloads=True),
    Cell("dualpipe-v", "main gradients", 2, 2, offloads=True),
]


@pytest.mark.feature("H1")
@pytest.mark.parametrize(
    "cell", [*CELLS[:2], *(pytest.param(cell, marks=pytest.mark.slow) for cell in CELLS[2:])], ids=str
)
@pytest.mark.parametrize(("policy", "seed"), [("lazy", 0), pytest.param("random", 5, marks=pytest.mark.slow)])
def test_a_training_on_one_stream_is_the_cpus_to_the_bit(emulated, cell, policy, seed):
    expect_equal_training(emulated, Cell(**vars(cell) | {"one_stream": True}), policy, seed)


@pytest.mark.feature("H1")
def test_nothing_on_a_device_runs_at_one_time(emulated):
    cell = Cell("1f1b", "plain", 2, 2, memory="host", offloads=True)

    assert emulated.run(train_and_note, Cell(**vars(cell) | {"one_stream": True}), num_ranks=2)[0] == []
    assert emulated.run(train_and_note, cell, num_ranks=2)[0] != []


@pytest.mark.feature("H1")
@pytest.mark.parametrize("options", [{"norm": True}, {"shard": "full", "residency": 1}])
def test_sums_and_gathers_of_replicas_run_among_the_computations(emulated, options):
    in_order = options | {"one_stream": True}

    assert emulated.run(train_replicas_and_note, in_order, num_ranks=4)[0] == []
    assert emulated.run(train_replicas_and_note, options, num_ranks=4)[0] != []


def replicas_on(rank, num_ranks, kind, options):
    device = torch.device("cpu") if kind == "cpu" else torch.device(kind, rank)
    return train_replicas(rank, num_ranks, 2, device, **options)


@pytest.mark.parametrize(
    "options", [{"norm": True}, {"fails": True}, {"shard": "full", "schedule": "zbv", "residency": 1}], ids=str
)
def test_replicas_on_one_stream_train_as_on_the_cpu_to_the_bit(emulated, options):
    found = emulated.run(replicas_on, "emu", options | {"one_stream": True}, num_ranks=4, timeout_s=110)
    expected = emulated.run(replicas_on, "cpu", options, num_ranks=4, timeout_s=110)

    for (losses, weights, _), (cpu_losses, cpu_weights, _) in zip(found, expected, strict=True):
        assert losses == cpu_losses
        assert all(torch.equal(weights[name], value) for name, value in cpu_weights.items())


def refused_with(rank, num_ranks):
    """Try transports whose messages run beside the computations, or would never end."""
    device = torch.device("emu", rank)
    options = {"device": device, "frees_other_stages": False}
    errors = []
    for ways, one_stream in (
        ({}, True),
        ({"coalesces": True}, True),
        ({"one_stream": True}, True),
        ({"one_stream": True}, False),
    ):
        transport = transport_of(rank, num_ranks, device, **ways)
        layers = [torch.nn.Linear(2, 2) for _ in range(num_ranks)]
        errors.append(error_of(_make, layers, transport, options | {"one_stream": one_stream}))
        transport.close()
    return errors


def _make(layers, transport, options):
    from penstock.pipeline import Pipeline

    Pipeline(layers, "1f1b", 4, square_loss, transport=transport, **options)


def test_a_transport_with_streams_of_its_own_or_without_groups_is_refused(emulated):
    for errors in emulated.run(refused_with, num_ranks=2):
        for error in errors:
            assert isinstance(error, ConfigError)
            assert "make it with coalesces=True and one_stream=True" in str(error)


def late_replica(rank, num_ranks, options):
    """Let the last rank go on when all others have given up."""
    others = OtherRanks(store_of_scenario("ends of steps"), num_ranks)
    device, is_bad = torch.device("emu", rank), rank == num_ranks - 1
    places = places_of(rank, num_ranks // 2, 2, device, DEADLINE_S, one_stream=True)
    ended = ended_by(places, 2, device, others.wait, is_bad=is_bad, deadline_s=DEADLINE_S, **options)
    others.note_end()
    return ended


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"shard": "full", "residency": 1}])
def test_a_late_replica_is_named(emulated, options):
    found = emulated.run(late_replica, options | {"one_stream": True}, num_ranks=4, timeout_s=60)

    assert [blamed for _, blamed in found] == [3] * 4, str(found)


@pytest.mark.slow
@pytest.mark.parametrize("run_ahead", [None, 2])
def test_a_late_rank_is_named(emulated, run_ahead):
    failing = Failing("late", run_ahead=run_ahead, one_stream=True)

    found = emulated.run(train_around_a_failure, failing, "emu", num_ranks=3, timeout_s=60)

    assert [ended.blamed for ended in found] == [1] * 3, [ended.text for ended in found]
