"""A reduction sums in the order of the replicas, sends no more than it must, and lets others be launched meanwhile."""

from weakref import ref

import pytest
import torch

from penstock.execute.replicas.exchanges import SMALL_BYTES, ReplicaExchanges
from penstock.execute.transport import LocalTransport
from tests.support.local_pipelines import error_of, on_ranks, on_threads, values


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


def buffer_of(exchanges, own):
    buffer = exchanges.buffer_for(own.numel(), own)
    buffer[: own.numel()] = own
    return buffer


@pytest.mark.parametrize("num_elements", [1, 2, 7, 24])
@pytest.mark.parametrize("num_replicas", [2, 3, 4])
def test_every_replica_has_the_bits_of_the_sum_in_their_order_and_sends_its_part_twice(num_replicas, num_elements):
    own = [values(seed, num_elements) for seed in range(num_replicas)]

    def case(transport):
        counted = Counted(transport)
        exchanges = ReplicaExchanges(counted)
        buffer = buffer_of(exchanges, own[transport.rank])
        exchanges.complete(exchanges.sum([buffer], lambda sums: None))
        return buffer, counted

    expected = own[0].clone()
    for each in own[1:]:
        expected += each
    for buffer, counted in on_ranks(num_replicas, case):
        assert torch.equal(buffer[:num_elements], expected)
        assert not buffer[num_elements:].any()
        assert counted.num_sends == 2 * (num_replicas - 1)  # of a part of the bytes each
        assert counted.sent_bytes == counted.num_sends * buffer.nbytes / num_replicas


def test_several_are_under_way_and_nothing_is_waited_for_when_one_is_launched():
    own = [[values(10 * rank + index, 5) for index in range(3)] for rank in range(2)]

    def case(transport):
        counted = Counted(transport)
        exchanges = ReplicaExchanges(counted)
        buffers = [buffer_of(exchanges, each) for each in own[transport.rank]]
        launched = [exchanges.sum([buffer], lambda sums: None) for buffer in buffers]
        assert (counted.num_waits, counted.num_sends) == (0, 3)
        exchanges.complete(launched.pop(0))
        assert counted.num_sends == 6  # the sums of all are under way before any is waited for
        for each in reversed(launched):
            exchanges.complete(each)
        return buffers

    for buffers in on_ranks(2, case):
        for index, buffer in enumerate(buffers):
            assert torch.equal(buffer[:5], own[0][index] + own[1][index])


def test_what_was_launched_before_a_failure_is_forgotten():
    first, other = LocalTransport.create(2, 0.1)
    exchanges, theirs = ReplicaExchanges(first), ReplicaExchanges(other)
    left = exchanges.sum([torch.ones(2)], lambda sums: None)
    assert "deadline" in str(error_of(exchanges.complete, left))

    exchanges.forget()
    other.deadline_s = first.deadline_s = 5.0
    other.abort()
    on_threads([first, other], LocalTransport.recover)
    buffers = [torch.full((2,), 2.0), torch.full((2,), 3.0)]

    def case(pair):
        own, buffer = pair
        own.complete(own.sum([buffer], lambda sums: None))

    on_threads(list(zip((exchanges, theirs), buffers, strict=True)), case)

    assert [buffer.tolist() for buffer in buffers] == [[5.0, 5.0]] * 2


@pytest.mark.parametrize(("num_elements", "is_kept"), [(SMALL_BYTES // 8, True), (SMALL_BYTES // 8 + 1, False)])
def test_an_exchange_that_is_over_holds_no_buffer_and_a_large_one_is_not_kept(num_elements, is_kept):
    """Whoever launched it may hold it; the buffer of a gather between two has twice as many elements of 4 bytes."""

    def case(transport):
        exchanges, buffers = ReplicaExchanges(transport), []
        gather = exchanges.gather([torch.ones(num_elements)], lambda wholes: buffers.append(ref(wholes[0])))
        exchanges.complete(gather)
        kept = buffers[0]() is not None
        exchanges._spare_buffers.clear()
        scatter = exchanges.scatter(
            [exchanges.buffer_for(2 * num_elements, torch.ones(()))], lambda parts: buffers.append(ref(parts[0]._base))
        )
        exchanges.complete(scatter)
        return kept, buffers[1]() is not None, gather, scatter

    for kept_gather, kept_sum, *_ in on_ranks(2, case):
        assert (kept_gather, kept_sum) == (is_kept, is_kept)


def test_buffers_are_kept_for_the_next_step_up_to_a_limit(monkeypatch):
    exchanges = ReplicaExchanges(LocalTransport.create(2)[0])
    buffer = exchanges.buffer_for(5, torch.ones(()))
    buffer.fill_(7)
    exchanges.keep(buffer)

    assert exchanges.buffer_for(5, torch.ones((), dtype=torch.float64)) is not buffer
    again = exchanges.buffer_for(5, torch.ones(()))
    assert again is buffer
    assert again[5:].tolist() == [0.0]

    monkeypatch.setattr("penstock.execute.replicas.exchanges.KEPT_BYTES", 4 * 6)
    exchanges.keep(again)
    exchanges.keep(torch.zeros(6))
    assert exchanges.buffer_for(5, torch.ones(())) is again
    assert exchanges.buffer_for(5, torch.ones(())) is not again
