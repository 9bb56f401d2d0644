"""A reduction sums in the order of the replicas, sends no more than it must, and lets others be launched meanwhile."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from penstock.execute.replicas.reductions import Reductions
from penstock.execute.transport import LocalTransport
from tests.local_pipelines import error_of, on_ranks, values


class Counted:
    """Counts what a rank sends."""

    def __init__(self, transport):
        self._transport = transport
        self.sent_bytes, self.num_sends, self.num_waits = 0, 0, 0

    def __getattr__(self, name):
        return getattr(self._transport, name)

    def post_send(self, peer, tensor, *tag):
        self.sent_bytes += tensor.nbytes
        self.num_sends += 1
        return self._transport.post_send(peer, tensor, *tag)

    def wait(self, ticket, limit_s=None):
        self.num_waits += 1
        self._transport.wait(ticket, limit_s)


def buffer_of(reductions, own):
    buffer = reductions.room_for(own.numel(), own)
    buffer[: own.numel()] = own
    return buffer


@pytest.mark.parametrize("num_elements", [1, 2, 7, 24])
@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_every_replica_has_the_bits_of_the_sum_in_their_order(num_replicas, num_elements):
    own = [values(seed, num_elements) for seed in range(num_replicas)]

    def case(transport):
        reductions = Reductions(transport)
        buffer = buffer_of(reductions, own[transport.rank])
        reductions.complete(reductions.launch([buffer]))
        return buffer

    expected = own[0].clone()
    for each in own[1:]:
        expected += each
    for buffer in on_ranks(num_replicas, case):
        assert torch.equal(buffer[:num_elements], expected)
        assert not buffer[num_elements:].any()


@pytest.mark.parametrize("num_replicas", [2, 4])
def test_a_rank_sends_its_part_of_the_bytes_twice(num_replicas):
    def case(transport):
        counted = Counted(transport)
        reductions = Reductions(counted)
        buffer = buffer_of(reductions, values(transport.rank, 4001))
        reductions.complete(reductions.launch([buffer]))
        return counted

    for counted in on_ranks(num_replicas, case):
        assert counted.sent_bytes <= 1.02 * 2 * (num_replicas - 1) / num_replicas * 4001 * 4
        assert counted.num_sends == 2 * (num_replicas - 1)


def test_several_are_under_way_and_nothing_is_waited_for_when_one_is_launched():
    own = [[values(10 * rank + index, 5) for index in range(3)] for rank in range(2)]

    def case(transport):
        counted = Counted(transport)
        reductions = Reductions(counted)
        buffers = [buffer_of(reductions, each) for each in own[transport.rank]]
        launched = [reductions.launch([buffer]) for buffer in buffers]
        assert (counted.num_waits, counted.num_sends) == (0, 3)
        reductions.complete(launched.pop(0))
        assert counted.num_sends == 6  # the sums of all are under way before any is waited for
        for each in reversed(launched):
            reductions.complete(each)
        return buffers

    for buffers in on_ranks(2, case):
        for index, buffer in enumerate(buffers):
            assert torch.equal(buffer[:5], own[0][index] + own[1][index])


def test_buffers_of_several_types_are_one_reduction():
    def case(transport):
        reductions = Reductions(transport)
        single, double = torch.full((4,), 1.5), torch.full((6,), 2.5, dtype=torch.float64)
        reductions.complete(reductions.launch([single, double]))
        return single, double

    for single, double in on_ranks(2, case):
        assert single.tolist() == [3.0] * 4
        assert double.tolist() == [5.0] * 6


def test_what_was_launched_before_a_failure_is_forgotten():
    first, other = LocalTransport.create(2, 0.1)
    reductions, theirs = Reductions(first), Reductions(other)
    left = reductions.launch([torch.ones(2)])
    assert "deadline" in str(error_of(reductions.complete, left))

    reductions.forget()
    other.deadline_s = first.deadline_s = 5.0
    other.abort()
    on_ranks_of([first, other], lambda transport: transport.recover())
    buffers = [torch.full((2,), 2.0), torch.full((2,), 3.0)]

    def case(pair):
        own, buffer = pair
        own.complete(own.launch([buffer]))

    on_ranks_of(list(zip((reductions, theirs), buffers, strict=True)), case)

    assert [buffer.tolist() for buffer in buffers] == [[5.0, 5.0]] * 2


def on_ranks_of(ranks, case):
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(case, ranks))


def test_buffers_are_kept_for_the_next_step_up_to_a_limit(monkeypatch):
    reductions = Reductions(LocalTransport.create(2)[0])
    buffer = reductions.room_for(5, torch.ones(()))
    buffer.fill_(7)
    reductions.keep(buffer)

    assert reductions.room_for(5, torch.ones((), dtype=torch.float64)) is not buffer
    again = reductions.room_for(5, torch.ones(()))
    assert again is buffer
    assert again[5:].tolist() == [0.0]

    monkeypatch.setattr("penstock.execute.replicas.reductions.KEPT_BYTES", 4 * 6)
    reductions.keep(again)
    reductions.keep(torch.zeros(6))
    assert reductions.room_for(5, torch.ones(())) is again
    assert reductions.room_for(5, torch.ones(())) is not again
