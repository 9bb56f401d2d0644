"""Messages follow NCCL's rules, and what breaks the rules is reported."""

import time
from threading import Timer

import pytest
import torch

from tests.emulated.checker import DIFFER, FREED, HANG, LEFT, UNORDERED
from tests.emulated.rank_threads import communicator
from tests.emulated.scenarios import POLICIES

pytestmark = pytest.mark.emulated
all_policies = pytest.mark.parametrize(("policy", "seed"), POLICIES)
LIMIT_S = 20.0


def _here(rank):
    return torch.device("emu", rank)


def _send_one(rank, num_ranks, mistake):
    messages, device = communicator(), _here(rank)
    if rank == 0:
        values = torch.zeros(4, device=device)
        values += 5
        work = messages.send([values], 1)
        if mistake == "changed":
            values.zero_()
        if mistake == "dropped":
            del work, values
            torch.zeros(1, device=device)
            return None
        work.wait()
        return None
    received = torch.empty(4, device=device)
    if mistake == "never received":
        return None
    work = messages.recv([received], 0)
    if mistake != "not waited for":
        work.wait()
    return (received * 2).cpu().tolist()


@all_policies
def test_a_message_arrives_behind_what_made_it(emulated, policy, seed):
    assert emulated.run(_send_one, "", num_ranks=2, policy=policy, seed=seed) == [None, [10.0] * 4]


@pytest.mark.parametrize(
    ("mistake", "kind", "operations"),
    [
        ("not waited for", UNORDERED, ("recv from 0", "mul.Tensor")),
        ("changed", UNORDERED, ("send to 1", "zero_.default")),
        ("dropped", FREED, ("send to 1", "free")),
        ("never received", LEFT, ("wait for messages of rank 0",)),
    ],
)
def test_a_tensor_is_its_messages_until_somebody_waits_or_it_is_left_alone(emulated, mistake, kind, operations):
    outcome = emulated.attempt(_send_one, mistake, num_ranks=2)

    report = outcome.reports[0]  # what is never waited for is also freed too early
    assert report.kind == kind
    assert tuple(name.split(" (")[0] for name in report.operations) == operations
    assert report.text.count("tests/emulated/test_nccl.py:") == (1 if kind == LEFT else 2)


def _poll(rank, num_ranks):
    messages, values = communicator(), torch.full((2,), float(rank), device=_here(rank))
    work = messages.send([values], 1) if rank == 0 else messages.recv([values], 0)
    answers = []
    while not answers or not answers[-1]:
        answers.append(work.is_completed())
    return answers[0], work.is_success(), values.cpu().tolist()


def test_polling_brings_a_message_forward_and_orders_the_host(emulated):
    found = emulated.run(_poll, num_ranks=2)

    assert [each[1:] for each in found] == [(True, [0.0, 0.0])] * 2
    assert not all(first for first, *_ in found)  # the second rank to look may come when all is over


def _abort_one_of_two(rank, num_ranks):
    first, second = communicator("first"), communicator("second")
    for each in (first, second):
        each.recv([torch.empty(2, device=_here(rank))], 1 - rank)
    first.abort()
    second.abort()


@pytest.mark.slow
def test_an_abort_waits_for_the_messages_of_other_communicators(emulated):
    outcome = emulated.attempt(_abort_one_of_two)

    texts = [report.text for report in outcome.reports if report.kind == HANG]
    assert "the abort of first of rank 0 waits for messages of second of rank 0" in texts


def _both_send_first(rank, num_ranks):
    messages = communicator()
    sent, received = torch.ones(2, device=_here(rank)), torch.empty(2, device=_here(rank))
    messages.send([sent], 1 - rank)
    messages.recv([received], 1 - rank).wait()
    return received.cpu()


@all_policies
def test_two_ranks_that_both_send_first_hang_and_both_heads_are_reported(emulated, policy, seed):
    outcome = emulated.attempt(_both_send_first, num_ranks=2, policy=policy, seed=seed, hang_s=60.0)

    assert outcome.kinds() == [HANG]
    text = outcome.reports[0].text
    for rank in range(2):
        assert (
            f"of emu:{rank}: send to {1 - rank} (messages of rank {rank}), launched at tests/emulated/test_nc" in text
        )
    assert "hang" in "".join(outcome.tracebacks.values())
    assert emulated.run(_send_one, "", num_ranks=2) == [None, [10.0] * 4]


def _both_poll(rank, num_ranks):
    messages = communicator()
    messages.send([torch.ones(2, device=_here(rank))], 1 - rank)
    work = messages.recv([torch.empty(2, device=_here(rank))], 1 - rank)
    while not work.is_completed():
        time.sleep(1e-5)


def test_hosts_that_look_at_a_message_that_can_never_come_hang_too(emulated):
    outcome = emulated.attempt(_both_poll, num_ranks=2)

    (report,) = [report for report in outcome.reports if report.kind == HANG]
    for rank in range(2):
        assert f"of emu:{rank}: send to {1 - rank} (messages of rank {rank})" in report.text


def _collect_differently(rank, num_ranks, difference):
    group, values = communicator("group"), torch.ones(4, device=_here(rank))
    if difference == "operation" and rank == 1:
        work = group.broadcast([values], 0)
    elif difference == "shape" and rank == 1:
        work = group.all_reduce([values[:2]])
    else:
        work = group.all_reduce([values])
    work.wait()
    torch.accelerator.synchronize()


@pytest.mark.parametrize("difference", ["operation", "shape"])
def test_collectives_that_differ_between_ranks_are_reported(emulated, difference):
    outcome = emulated.attempt(_collect_differently, difference, num_ranks=2)

    report = next(report for report in outcome.reports if report.kind == DIFFER)
    assert "rank 0 does" in report.text
    assert "rank 1 does" in report.text
    assert report.text.count("tests/emulated/test_nccl.py:") == 2


def _abort(rank, num_ranks):
    messages, values = communicator(), torch.ones(2, device=_here(rank))
    work = messages.recv([values], 1 - rank)
    messages.abort()
    for use in (work.wait, lambda: messages.send([values], 1 - rank)):
        with pytest.raises(RuntimeError, match=f"messages of rank {rank} was aborted"):
            use()
    torch.accelerator.synchronize()
    return (values * 2).cpu().shape


def test_abort_ends_all_waits_and_the_device_goes_on(emulated):
    assert emulated.run(_abort, num_ranks=2) == [(2,)] * 2
    assert emulated.run(_send_one, "", num_ranks=2) == [None, [10.0] * 4]


def _end_of_a_wait(rank, num_ranks, cause):
    messages = communicator(watchdog_s=0.05 if cause == "watchdog" else None)
    work = messages.recv([torch.empty(2, device=_here(rank))], 1)
    timer = Timer(0.05, messages.abort if cause == "abort" else int)
    timer.start()
    try:
        work.wait(0.05 if cause == "limit" else LIMIT_S)
    except RuntimeError as error:
        return str(error)
    finally:
        timer.join()
        messages.abort()


@pytest.mark.parametrize(
    ("cause", "text", "kinds"),
    [
        ("limit", "timed out after 0.05 s", []),
        ("abort", "messages of rank 0 was aborted", []),
        ("watchdog", "given up by the watchdog: recv from 1", [HANG]),
    ],
)
def test_a_wait_ends_by_its_limit_an_abort_in_another_thread_and_the_watchdog(emulated, cause, text, kinds):
    outcome = emulated.attempt(_end_of_a_wait, cause)

    assert text in outcome.results[0]
    assert outcome.kinds() == kinds
