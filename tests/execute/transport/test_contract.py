"""The contract of transports: every test here runs on threads of one process and on gloo."""

import gc
import math
import os
import re
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from penstock.errors import DeadlineExceeded, PeerLost, PipelineError
from penstock.execute.control.collectives import Control
from penstock.execute.transport import LocalTransport, TorchTransport
from tests.support.local_wires import ordered
from tests.support.ranks import RankPool, run_ranks, run_ranks_with_deaths

MAX_WAIT_S = 60.0
"""How long a test may take on a busy machine."""
DEADLINE_S = 10 * MAX_WAIT_S
"""Of every wait for which a test sets no other: what ends within MAX_WAIT_S did not wait for it."""


@pytest.fixture(scope="module")
def pools():
    started = {}
    yield started
    for pool in started.values():
        pool.close()


@pytest.fixture(params=["local", "gloo and direct sockets", "gloo alone"])
def on_ranks(request, pools):
    """`on_ranks(num_ranks, case, *args)` gives what `case(transport, *args)` returned on every rank."""
    if request.param == "local":
        return run_on_threads
    return partial(run_on_gloo, pools, request.param != "gloo alone")


def run_on_threads(num_ranks, case, *args):
    with ThreadPoolExecutor(num_ranks) as threads:
        transports = LocalTransport.create(num_ranks, DEADLINE_S)
        futures = [threads.submit(run_and_close, transport, case, args) for transport in transports]
    return [future.result() for future in futures]


def run_and_close(transport, case, args):
    try:
        return case(transport, *args)
    finally:
        transport.close()


def run_on_gloo(pools, is_direct, num_ranks, case, *args):
    pool = pools.setdefault(num_ranks, RankPool(num_ranks))
    return pool.run(run_on_one_rank, is_direct, case, args, timeout_s=MAX_WAIT_S)


def run_on_one_rank(rank, is_direct, case, args):
    return run_and_close(TorchTransport(deadline_s=DEADLINE_S, is_direct=is_direct), case, args)


def send(transport, peer, tensor):
    transport.wait(transport.post_send(peer, tensor))


def wait_for_all(transport, *tickets):
    for ticket in tickets:
        transport.wait(ticket)


def receive(transport, peer, like):
    tensor = torch.zeros_like(like)
    transport.wait(transport.post_receive(peer, tensor))
    return tensor


def failure_of(action, *args):
    """The error's kind and fields, as plain values."""
    try:
        action(*args)
    except PipelineError as error:
        return {
            "kind": type(error),
            "rank": error.rank,
            "peer": error.peer,
            "waited_s": error.waited_s,
            "text": str(error),
        }
    return None


# --- messages


def posted_ahead(transport, num_messages):
    peer = 1 - transport.rank
    filled = [torch.zeros(4) for _ in range(num_messages)]
    receives = [transport.post_receive(peer, tensor) for tensor in filled]
    sends = [transport.post_send(peer, torch.full((4,), 100.0 * transport.rank + k)) for k in range(num_messages)]
    wait_for_all(transport, *reversed(receives), *sends)
    return [tensor[3].item() for tensor in filled]


@pytest.mark.feature("0.14")
def test_receives_posted_ahead_in_both_directions_match_in_order_whatever_the_order_of_waits(on_ranks):
    answers = on_ranks(2, posted_ahead, 30)

    assert answers == [[100.0 + k for k in range(30)], [float(k) for k in range(30)]]


def all_to_all(transport):
    peers = [peer for peer in range(transport.num_ranks) if peer != transport.rank]
    filled = {peer: torch.zeros(1) for peer in peers}
    tickets = [transport.post_receive(peer, filled[peer]) for peer in peers]
    tickets += [transport.post_send(peer, torch.tensor([10.0 * transport.rank + peer])) for peer in peers]
    wait_for_all(transport, *tickets)
    return [filled[peer].item() for peer in peers]


@pytest.mark.feature("C2")
def test_every_ordered_pair_of_ranks_is_a_channel_of_its_own(on_ranks):
    assert on_ranks(3, all_to_all) == [[10.0, 20.0], [1.0, 21.0], [2.0, 12.0]]


_COMPLEX = torch.tensor([[1 + 2j, 3 - 4j], [5j, 6]])
SAMPLES = {
    "plain": [
        torch.tensor([True, False, True]),
        torch.tensor([-(2**40), 7]),
        torch.tensor([1.5, -2.0], dtype=torch.bfloat16),
        torch.tensor([math.pi, math.inf], dtype=torch.float64),
        torch.tensor(3.25),
        torch.zeros(0, 4),
        torch.zeros(5, dtype=torch.float16),
        torch.arange(6.0).reshape(2, 3).t(),
        torch.arange(100_000.0),
    ],
    # Torch conjugates or negates them only when they are read; their memory holds other values.
    "lazy": [_COMPLEX.conj(), _COMPLEX.conj().t(), _COMPLEX[:, :1].conj(), _COMPLEX.conj().imag],
    "with a graph": [torch.ones(2, requires_grad=True) * 3],
}


def exchange_samples(transport, kind):
    """Send samples from rank 0 to rank 1; return whether each has arrived unchanged."""
    if transport.rank == 0:
        for sample in SAMPLES[kind]:
            send(transport, 1, sample)
        return []
    received = [receive(transport, 0, torch.empty(sample.shape, dtype=sample.dtype)) for sample in SAMPLES[kind]]
    return [torch.equal(got, sample) for got, sample in zip(received, SAMPLES[kind], strict=True)]


@pytest.mark.feature("X34")
def test_types_empty_scalar_and_non_contiguous_tensors_arrive_unchanged(on_ranks):
    assert on_ranks(2, exchange_samples, "plain")[1] == [True] * len(SAMPLES["plain"])


@pytest.mark.parametrize("kind", ["lazy", "with a graph"])
def test_the_values_arrive_of_what_torch_computes_when_it_is_read_or_has_a_graph(on_ranks, kind):
    assert all(sample.is_conj() or sample.is_neg() or sample.requires_grad for sample in SAMPLES[kind])

    assert on_ranks(2, exchange_samples, kind)[1] == [True] * len(SAMPLES[kind])


def drop_tensors_after_posting(transport):
    if transport.rank == 0:
        tickets = [transport.post_send(1, torch.full((50_000,), float(k))) for k in range(5)]
        gc.collect()
        torch.full((50_000,), -1.0)
        wait_for_all(transport, *tickets)
        return None
    return [receive(transport, 0, torch.zeros(50_000)).unique().tolist() for _ in range(5)]


@pytest.mark.feature("0.7", "X10")
def test_a_posted_tensor_stays_alive_until_it_is_sent(on_ranks):
    assert on_ranks(2, drop_tensors_after_posting)[1] == [[float(k)] for k in range(5)]


def wait_twice(transport):
    peer = 1 - transport.rank
    sent, got = transport.post_send(peer, torch.ones(1)), transport.post_receive(peer, torch.zeros(1))
    wait_for_all(transport, sent, got, sent, got)
    return "ok"


def test_a_second_wait_for_a_ticket_returns_at_once(on_ranks):
    assert on_ranks(2, wait_twice) == ["ok", "ok"]


def receive_into_gaps(transport):
    return failure_of(transport.post_receive, 1 - transport.rank, torch.zeros(4, 4)[:, :2])


def test_a_receive_into_a_tensor_with_gaps_is_refused(on_ranks):
    failures = on_ranks(2, receive_into_gaps)

    assert all("contiguous" in failure["text"] for failure in failures)


# --- collectives


def gather_values(transport):
    return Control(transport).all_gather_object(
        {"rank": transport.rank, "loss": math.inf, "name": "ä" * transport.rank, "no": None}
    )


def test_all_gather_object_gives_every_rank_the_values_in_rank_order(on_ranks):
    expected = [{"rank": rank, "loss": math.inf, "name": "ä" * rank, "no": None} for rank in range(3)]

    assert on_ranks(3, gather_values) == [expected] * 3


def gather_function(transport):
    return failure_of(Control(transport).all_gather_object, print)


def test_all_gather_object_refuses_what_is_not_plain(on_ranks):
    failures = on_ranks(2, gather_function)

    assert all("cannot send <built-in function print>" in failure["text"] for failure in failures)


def collective_between_posted_messages(transport):
    peer = 1 - transport.rank
    early = torch.zeros(1)
    ticket = transport.post_receive(peer, early)
    gathered = Control(transport).all_gather_object(transport.rank)
    send(transport, peer, torch.tensor([7.0]))
    transport.wait(ticket)
    return [gathered, early.item()]


def test_collectives_do_not_take_the_messages_of_receives_posted_ahead(on_ranks):
    assert on_ranks(2, collective_between_posted_messages) == [[[0, 1], 7.0]] * 2


def limits_of_waits(transport):
    def now():
        found.append(transport.deadline_s)

    found = []
    with suppress(KeyError), transport.waiting(2 * DEADLINE_S):
        now()
        with transport.waiting(DEADLINE_S):
            now()
        raise KeyError
    now()
    return found


def test_waits_may_last_longer_within_a_context_but_never_shorter(on_ranks):
    assert on_ranks(1, limits_of_waits) == [[2 * DEADLINE_S, 2 * DEADLINE_S, DEADLINE_S]]


# --- failures


def stay_away_until(gate):
    """Do nothing, as a rank that hangs, until a peer makes this file."""
    while not Path(gate).exists():
        time.sleep(0.01)


def wait_beyond_deadline(transport, gate, wait):
    """Rank 0 waits for rank 1, which stays away."""
    if transport.rank == 1:
        stay_away_until(gate)
        transport.recover()
        return None
    transport.deadline_s = 0.3
    failure = failure_of(wait, transport)
    transport.deadline_s = DEADLINE_S
    Path(gate).touch()
    transport.recover()
    return failure


def wait_for_a_message(transport):
    receive(transport, 1, torch.zeros(1))


def wait_in_a_collective(transport):
    Control(transport).all_gather_object(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wait", "number", "least_s"),
    [(wait_for_a_message, "0", 0.3), (wait_in_a_collective, r"\d", 0.2)],  # a collective waits several times
)
def test_a_wait_that_outlives_its_deadline_names_rank_peer_and_seconds(on_ranks, tmp_path, wait, number, least_s):
    failure = on_ranks(2, wait_beyond_deadline, str(tmp_path / "gate"), wait)[0]

    assert failure["kind"] is DeadlineExceeded
    assert (failure["rank"], failure["peer"]) == (1, 1)
    assert failure["waited_s"] >= least_s
    assert re.search(rf"rank 0: waited to receive message {number} from rank 1 for ", failure["text"])


def abort_while_handling_an_error(transport, gate):
    """Rank 2 aborts; rank 1, which waits for it, aborts too, but keeps the error until rank 0 has failed."""
    if transport.rank == 2:
        receive(transport, 1, torch.zeros(1))
        transport.abort()
        return None
    if transport.rank == 0:
        failure = failure_of(receive, transport, 1, torch.zeros(1))
        Path(gate).touch()
        return failure
    send(transport, 2, torch.ones(1))
    try:
        receive(transport, 2, torch.zeros(1))
    except PeerLost as error:
        transport.abort()
        stay_away_until(gate)
        return error.peer
    return None


def test_abort_wakes_the_ranks_that_wait_along_a_chain_while_errors_are_still_handled(on_ranks, tmp_path):
    failure, lost_peer, _ = on_ranks(3, abort_while_handling_an_error, str(tmp_path / "gate"))

    assert (failure["kind"], failure["peer"], lost_peer) == (PeerLost, 1, 2)


def use_after_abort(transport):
    peer = 1 - transport.rank
    early = transport.post_receive(peer, torch.zeros(1))
    Control(transport).all_gather_object("posted")
    transport.abort()
    answers = [failure_of(transport.wait, early), failure_of(receive, transport, peer, torch.zeros(1))]
    answers.append(failure_of(Control(transport).all_gather_object, 1))
    transport.recover()
    return answers


@pytest.mark.feature("H12")
def test_every_use_after_abort_fails_at_once(on_ranks):
    for failures in on_ranks(2, use_after_abort):
        assert [failure["kind"] for failure in failures] == [PeerLost] * 3


def recover_again_and_again(transport):
    peer = 1 - transport.rank
    answers = []
    for attempt in range(3):
        stale = transport.post_send(peer, torch.tensor([-1.0]))
        transport.post_send(peer, torch.tensor([-2.0]))
        Control(transport).all_gather_object("posted")
        transport.abort()
        transport.recover()
        answers.append(failure_of(transport.wait, stale)["kind"])
        fresh = transport.post_send(peer, torch.tensor([float(attempt)]))
        answers.append(receive(transport, peer, torch.zeros(1)).item())
        transport.wait(fresh)
    return answers


def test_recover_after_abort_forgets_old_messages_and_works_again(on_ranks):
    assert on_ranks(2, recover_again_and_again) == [[PeerLost, 0.0, PeerLost, 1.0, PeerLost, 2.0]] * 2


def recover_with_a_late_rank(transport, gate):
    """Rank 0 gives up twice while rank 1 is away; then both come."""
    if transport.rank == 1:
        receive(transport, 0, torch.zeros(1))
        transport.abort()
        stay_away_until(gate)
        transport.recover()
        return receive(transport, 0, torch.zeros(1)).item()
    send(transport, 1, torch.ones(1))
    transport.abort()
    transport.deadline_s = 0.1
    failures = [failure_of(transport.recover) for _ in range(2)]
    transport.deadline_s = DEADLINE_S
    Path(gate).touch()
    transport.recover()
    send(transport, 1, torch.tensor([9.0]))
    return [(failure["kind"], failure["peer"]) for failure in failures]


@pytest.mark.slow
def test_recover_without_a_rank_ends_at_the_deadline_and_works_once_that_rank_comes(on_ranks, tmp_path):
    answers = on_ranks(2, recover_with_a_late_rank, str(tmp_path / "gate"))

    assert answers == [[(DeadlineExceeded, 1)] * 2, 9.0]


def close_early(transport):
    if transport.rank == 1:
        receive(transport, 0, torch.zeros(1))
        transport.close()
        transport.close()
        return None
    send(transport, 1, torch.ones(1))
    return failure_of(receive, transport, 1, torch.zeros(1))


def test_a_peer_that_closed_is_lost_and_closing_twice_does_no_harm(on_ranks):
    failure = on_ranks(2, close_early)[0]

    assert (failure["kind"], failure["peer"]) == (PeerLost, 1)


# --- what only one of them can do


def be_interrupted(rank, is_direct, gate):
    """Ctrl-C comes to rank 0 while it waits for rank 1, which waits for rank 0 or, over gloo, does nothing."""
    transport = TorchTransport(deadline_s=DEADLINE_S, is_direct=is_direct)
    ticket = transport.post_receive(1 - rank, torch.zeros(1))
    try:
        if rank == 0:
            signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
        if rank == 0 or is_direct:
            transport.wait(ticket)
        stay_away_until(gate)
    except BaseException as error:
        transport.abort()
        Path(gate).touch()
        return type(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize(("is_direct", "of_peer"), [(False, None), (True, PeerLost)], ids=["gloo", "direct"])
def test_ctrl_c_ends_a_wait_at_once(is_direct, of_peer, tmp_path):
    kinds = run_ranks(2, be_interrupted, is_direct, str(tmp_path / "gate"), timeout_s=MAX_WAIT_S)

    assert kinds == [KeyboardInterrupt, of_peer]


def be_killed_with_a_child(rank, gate):
    """Rank 1 has forked a process, as a loader of data does, which lives until rank 0 has noticed."""
    transport = TorchTransport(deadline_s=DEADLINE_S)
    if rank == 1:
        receive(transport, 0, torch.zeros(1))
        if os.fork() == 0:
            signal.alarm(int(MAX_WAIT_S))  # it ends also where nobody notices
            stay_away_until(gate)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)
    send(transport, 1, torch.ones(1))
    first = failure_of(receive, transport, 1, torch.zeros(1))
    Path(gate).touch()
    later = failure_of(send, transport, 1, torch.zeros(1))
    transport.abort()
    transport.deadline_s = 0.2
    return [each["kind"] for each in (first, later, failure_of(transport.recover))]


@pytest.mark.slow
def test_a_killed_rank_is_lost_at_once_though_a_process_that_it_forked_lives_on_and_recover_does_not_hang(tmp_path):
    outcome = run_ranks_with_deaths(2, be_killed_with_a_child, str(tmp_path / "gate"), timeout_s=MAX_WAIT_S / 2)

    assert outcome.exit_codes == {1: -signal.SIGKILL}
    assert outcome.results[0] == [PeerLost, PeerLost, DeadlineExceeded]


def two_pipelines(rank):
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    transport = TorchTransport(groups[rank % 2], deadline_s=DEADLINE_S)
    again = TorchTransport(groups[rank % 2], deadline_s=DEADLINE_S)
    answers = [transport.rank, Control(transport).all_gather_object(rank)]
    for wires in (transport, again):
        if wires.rank == 0:
            send(wires, 1, torch.tensor([float(rank)]))
        else:
            answers.append(receive(wires, 0, torch.zeros(1)).item())
        wires.close()
    return answers


@pytest.mark.feature("C18", "X25")
@pytest.mark.slow
def test_peers_are_counted_within_the_group_so_two_pipelines_do_not_meet():
    answers = run_ranks(4, two_pipelines, timeout_s=MAX_WAIT_S)

    assert answers == [[0, [0, 2]], [0, [1, 3]], [1, [0, 2], 0.0, 0.0], [1, [1, 3], 1.0, 1.0]]


@pytest.mark.feature("H12")
def test_without_a_process_group_the_error_says_what_to_call():
    with pytest.raises(PipelineError, match="init_process_group"):
        TorchTransport()


def exchange_in_any_order(transport, log):
    """Everybody sends to everybody, and notes what it had when each of its waits ended."""
    others = [peer for peer in range(transport.num_ranks) if peer != transport.rank]
    for number in range(4):
        rooms = {peer: torch.full((1,), -1.0) for peer in others}
        receives = [transport.post_receive(peer, rooms[peer]) for peer in others]
        sends = [transport.post_send(peer, torch.tensor([10.0 * transport.rank + number])) for peer in others]
        for ticket in (*receives, *sends):
            transport.wait(ticket)
            log.append((transport.rank, number, [room.item() for room in rooms.values()]))
    transport.close()


def log_of(order_seed):
    transports = ordered(order_seed)(3, DEADLINE_S)
    logs = [[] for _ in transports]
    with ThreadPoolExecutor(3) as threads:
        for future in [threads.submit(exchange_in_any_order, *each) for each in zip(transports, logs, strict=True)]:
            future.result()
    return logs


def test_an_order_seed_alone_decides_in_which_order_local_messages_arrive():
    by_seed = [log_of(seed) for seed in range(6)]

    assert len({str(logs) for logs in by_seed}) > 3
    assert [log_of(seed) for seed in range(6)] == by_seed
    for logs in by_seed:
        assert [entry for rank, log in enumerate(logs) for entry in log if entry[1] == 3][-1][2] == [3.0, 13.0]


def test_a_failure_names_the_order_seed_and_a_rank_that_is_gone_holds_nobody_up():
    left, right = ordered(17)(2, DEADLINE_S)
    sent, received = left.post_send(1, torch.ones(1)), torch.zeros(1)
    right.wait(right.post_receive(0, received))  # rank 0 does not wait
    left.wait(sent)
    right.deadline_s = 0.3
    with pytest.raises(DeadlineExceeded) as caught:
        right.wait(right.post_receive(0, received))

    assert received.item() == 1.0
    assert caught.value.__notes__ == ["messages moved in the order of order_seed=17"]


def test_local_ends_that_disagree_on_shape_fail_on_both_sides():
    left, right = LocalTransport.create(2, 1.0)
    sent, got = left.post_send(1, torch.zeros(3)), right.post_receive(0, torch.zeros(4))

    with pytest.raises(PipelineError, match=r"sent \(3,\)"):
        left.wait(sent)
    with pytest.raises(PipelineError, match=r"expected \(4,\)"):
        right.wait(got)
