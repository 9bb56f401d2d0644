"""Messages of a group are launched as one, and none of it is left behind by an error."""

from unittest.mock import Mock

import pytest
import torch

from penstock.execute.transport.message_groups import GroupedLink, MessageGroups


def links_on(**calls):
    """Return the groups of a backend that notes its calls, the links to two peers, and the backend."""
    backend = Mock(**calls)
    groups = MessageGroups(backend)
    return groups, [GroupedLink(peer, groups, lambda: False) for peer in (0, 2)], backend


def calls_of(backend):
    """The names of the calls, with the peers of messages."""
    return [(name, *args[1:2]) for name, args, _ in backend.mock_calls]


BEGIN, END = ("_start_coalescing",), ("_end_coalescing",)


def test_the_messages_of_a_group_have_one_work_once_it_is_launched():
    groups, (left, right), backend = links_on()

    groups.begin()
    messages = [left.send(torch.ones(1)), left.receive(torch.ones(1)), right.receive(torch.ones(1))]
    before = [message.has_ended() for message in messages]
    groups.end()

    assert calls_of(backend) == [BEGIN, ("send", 0), ("recv", 0), ("recv", 2), END]
    assert before == [False, False, False]
    assert {message.work for message in messages} == {backend._end_coalescing.return_value}


def test_a_message_outside_of_a_group_is_one_by_itself():
    _, (left, right), backend = links_on()

    messages = [left.send(torch.ones(1)), right.receive(torch.ones(1))]

    assert calls_of(backend) == [BEGIN, ("send", 0), END, BEGIN, ("recv", 2), END]
    assert {message.work for message in messages} == {backend._end_coalescing.return_value}


@pytest.mark.parametrize("is_open", [True, False])
def test_an_error_leaves_no_group_open(is_open):
    """An open group of NCCL would keep all later messages of the thread waiting."""
    groups, (left, _), backend = links_on(send=Mock(side_effect=RuntimeError("NCCL error")))
    if is_open:
        groups.begin()

    with pytest.raises(RuntimeError, match="NCCL error"):
        left.send(torch.ones(1))
    groups.give_up()

    assert backend._group_end.call_count == 1
    assert not groups._messages
