"""The contract of transports: what asks for `on_ranks` runs on threads of one process and on gloo."""

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
from tests.support.local_pipelines import error_of
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


def run_on_threads(num_ranks, case, *args, connect=LocalTransport.create):
    with ThreadPoolExecutor(num_ranks) as threads:
        futures = [threads.submit(run_and_close, each, case, args) for each in connect(num_ranks, DEADLINE_S)]
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


def posted_ahead(transport, num_messages):
    peer = 1 - transport.rank
    filled = [torch.zeros(4) for _ in range(num_messages)]
    receives = [transport.post_receive(peer, tensor) for tensor in filled]
    sends = [transport.post_send(peer, torch.full((4,), 100.0 * transport.rank + k)) for k in range(num_messages)]
    wait_for_all(transport, *reversed(receives), *sends)
    wait_for_all(transport, sends[0], receives[0])  # a second wait for a ticket returns at once
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
@pytest.mark.parametrize("kind", SAMPLES)
def test_tensors_of_every_type_form_and_way_of_computing_arrive_unchanged(on_ranks, kind):
    is_plain = {not (each.is_conj() or each.is_neg() or each.requires_grad) for each in SAMPLES[kind]}
    assert is_plain == {kind == "plain"}

    assert on_ranks(2, exchange_samples, kind)[1] == [True] * len(SAMPLES[kind])


def drop_tensors_after_posting(transport):
    if transport.rank == 1:
        return [receive(transport, 0, torch.zeros(50_000)).unique().tolist() for _ in range(5)]
    tickets = [transport.post_send(1, torch.full((50_000,), float(k))) for k in range(5)]
    gc.collect()
    torch.full((50_000,), -1.0)
    return wait_for_all(transport, *tickets)


@pytest.mark.feature("0.7", "X10")
def test_a_posted_tensor_stays_alive_until_it_is_sent(on_ranks):
    assert on_ranks(2, drop_tensors_after_posting)[1] == [[float(k)] for k in range(5)]


def collective_between_posted_messages(transport):
    peer, early = 1 - transport.rank, torch.zeros(1)
    ticket = transport.post_receive(peer, early)
    value = {"rank": transport.rank, "loss": math.inf, "name": "ä" * transport.rank, "no": None}
    gathered = Control(transport).all_gather_object(value)
    send(transport, peer, torch.tensor([7.0]))
    transport.wait(ticket)
    return [gathered, early.item()]


def test_collectives_give_all_values_in_order_and_do_not_take_the_messages_of_receives_posted_ahead(on_ranks):
    expected = [{"rank": rank, "loss": math.inf, "name": "ä" * rank, "no": None} for rank in range(2)]

    assert on_ranks(2, collective_between_posted_messages) == [[expected, 7.0]] * 2


def send_wrongly(transport):
    into_gaps = error_of(transport.post_receive, 1 - transport.rank, torch.zeros(4, 4)[:, :2])
    return str(into_gaps), str(error_of(Control(transport).all_gather_object, print))


def test_a_receive_into_a_tensor_with_gaps_and_a_collective_of_what_is_not_plain_are_refused(on_ranks):
    for into_gaps, not_plain in on_ranks(2, send_wrongly):
        assert "contiguous" in into_gaps
        assert "cannot send <built-in function print>" in not_plain


def limits_of_waits(transport):
    found = []
    with suppress(KeyError), transport.waiting(2 * DEADLINE_S):
        found.append(transport.deadline_s)
        with transport.waiting(DEADLINE_S):
            found.append(transport.deadline_s)
        raise KeyError
    return [*found, transport.deadline_s]


def test_waits_may_last_longer_within_a_context_but_never_shorter(on_ranks):
    assert on_ranks(1, limits_of_waits) == [[2 * DEADLINE_S, 2 * DEADLINE_S, DEADLINE_S]]


def stay_away_until(gate):
    """Do nothing, as a rank that hangs, until a peer makes this file."""
    while not Path(gate).exists():
        time.sleep(0.01)


def wait_beyond_deadline(transport, gate, is_collective):
    """Rank 0 waits for rank 1, which stays away."""
    if transport.rank == 1:
        stay_away_until(gate)
        transport.recover()
        return None
    transport.deadline_s, ticket = 0.3, transport.post_receive(1, torch.zeros(1))
    call = partial(Control(transport).all_gather_object, 1) if is_collective else partial(transport.wait, ticket)
    failure = error_of(call)
    transport.deadline_s = DEADLINE_S
    Path(gate).touch()
    transport.recover()
    return failure


@pytest.mark.slow
@pytest.mark.parametrize(
    ("is_collective", "number", "least_s"),
    [(False, "0", 0.3), (True, r"\d", 0.2)],  # a collective waits several times
)
def test_a_wait_that_outlives_its_deadline_names_rank_peer_and_seconds(
    on_ranks, tmp_path, is_collective, number, least_s
):
    failure = on_ranks(2, wait_beyond_deadline, str(tmp_path / "gate"), is_collective)[0]

    assert (type(failure), failure.rank, failure.peer) == (DeadlineExceeded, 1, 1)
    assert failure.waited_s >= least_s
    assert re.search(rf"rank 0: waited to receive message {number} from rank 1 for ", str(failure))


def abort_while_handling_an_error(transport, gate):
    """Rank 2 aborts; rank 1, which waits for it, aborts too, but keeps the error until rank 0 has failed."""
    if transport.rank == 2:
        receive(transport, 1, torch.zeros(1))
        return transport.abort()
    if transport.rank == 0:
        failure = error_of(receive, transport, 1, torch.zeros(1))
        Path(gate).touch()
        return type(failure), failure.peer
    send(transport, 2, torch.ones(1))
    try:
        return receive(transport, 2, torch.zeros(1))
    except PeerLost as error:
        transport.abort()
        stay_away_until(gate)
        return type(error), error.peer


def test_abort_wakes_the_ranks_that_wait_along_a_chain_while_errors_are_still_handled(on_ranks, tmp_path):
    failures = on_ranks(3, abort_while_handling_an_error, str(tmp_path / "gate"))

    assert failures == [(PeerLost, 1), (PeerLost, 2), None]


def use_after_abort(transport):
    peer = 1 - transport.rank
    early = transport.post_receive(peer, torch.zeros(1))
    Control(transport).all_gather_object("posted")
    transport.abort()
    answers = [error_of(transport.wait, early), error_of(receive, transport, peer, torch.zeros(1))]
    answers.append(error_of(Control(transport).all_gather_object, 1))
    transport.recover()
    return list(map(type, answers))


@pytest.mark.feature("H12")
def test_every_use_after_abort_fails_at_once(on_ranks):
    assert on_ranks(2, use_after_abort) == [[PeerLost] * 3] * 2


def recover_again_and_again(transport):
    peer = 1 - transport.rank
    answers = []
    for attempt in range(3):
        stale = transport.post_send(peer, torch.tensor([-1.0]))
        transport.post_send(peer, torch.tensor([-2.0]))
        Control(transport).all_gather_object("posted")
        transport.abort()
        transport.recover()
        answers.append(type(error_of(transport.wait, stale)))
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
    failures = [error_of(transport.recover) for _ in range(2)]
    transport.deadline_s = DEADLINE_S
    Path(gate).touch()
    transport.recover()
    send(transport, 1, torch.tensor([9.0]))
    return [(type(failure), failure.peer) for failure in failures]


@pytest.mark.slow
def test_recover_without_a_rank_ends_at_the_deadline_and_works_once_that_rank_comes(on_ranks, tmp_path):
    answers = on_ranks(2, recover_with_a_late_rank, str(tmp_path / "gate"))

    assert answers == [[(DeadlineExceeded, 1)] * 2, 9.0]


def close_early(transport):
    if transport.rank == 0:
        send(transport, 1, torch.ones(1))
        return error_of(receive, transport, 1, torch.zeros(1))
    receive(transport, 0, torch.zeros(1))
    transport.close()
    return transport.close()


def test_a_peer_that_closed_is_lost_and_closing_twice_does_no_harm(on_ranks):
    failure = on_ranks(2, close_early)[0]

    assert (type(failure), failure.peer) == (PeerLost, 1)


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
    first = error_of(receive, transport, 1, torch.zeros(1))
    Path(gate).touch()
    later = error_of(send, transport, 1, torch.zeros(1))
    transport.abort()
    transport.deadline_s = 0.2
    return [type(each) for each in (first, later, error_of(transport.recover))]


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


def exchange_in_any_order(transport):
    """Send from everybody to everybody; return what this rank had when each of its waits ended."""
    others, log = [peer for peer in range(transport.num_ranks) if peer != transport.rank], []
    for number in range(4):
        rooms = {peer: torch.full((1,), -1.0) for peer in others}
        receives = [transport.post_receive(peer, rooms[peer]) for peer in others]
        sends = [transport.post_send(peer, torch.tensor([10.0 * transport.rank + number])) for peer in others]
        for ticket in (*receives, *sends):
            transport.wait(ticket)
            log.append((number, [room.item() for room in rooms.values()]))
    return log


def test_an_order_seed_alone_decides_in_which_order_local_messages_arrive():
    first, second = (
        [run_on_threads(3, exchange_in_any_order, connect=ordered(seed)) for seed in range(6)] for _ in range(2)
    )

    assert len({str(logs) for logs in first}) > 3
    assert second == first
    assert all(logs[-1][-1] == (3, [3.0, 13.0]) for logs in first)


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
