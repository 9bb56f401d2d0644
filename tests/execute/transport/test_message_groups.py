"""Messages of a group are launched as one, and none of it is left behind by an error."""

import pytest
import torch

from penstock.execute.transport.message_groups import GroupedLink, MessageGroups


class Backend:
    """Notes what is asked of it; `ends` are the groups that were ended after an error."""

    def __init__(self, *, is_broken=False):
        self.calls, self.is_broken, self.ends = [], is_broken, 0

    def _start_coalescing(self):
        self.calls.append("begin")

    def _end_coalescing(self):
        self.calls.append("end")
        return "work"

    def send(self, tensors, peer, tag):
        if self.is_broken:
            raise RuntimeError("NCCL error")
        self.calls.append(f"send to {peer}")

    def recv(self, tensors, peer, tag):
        self.calls.append(f"receive from {peer}")

    def _group_end(self):
        self.ends += 1


def links_on(backend):
    groups = MessageGroups(backend)
    return groups, GroupedLink(0, groups, lambda: False), GroupedLink(2, groups, lambda: False)


def test_the_messages_of_a_group_have_one_work_once_it_is_launched():
    backend = Backend()
    groups, left, right = links_on(backend)

    groups.begin()
    messages = [left.send(torch.ones(1)), left.receive(torch.ones(1)), right.receive(torch.ones(1))]
    before = [message.has_ended() for message in messages]
    groups.end()

    assert backend.calls == ["begin", "send to 0", "receive from 0", "receive from 2", "end"]
    assert before == [False, False, False]
    assert {message.work for message in messages} == {"work"}


def test_a_message_outside_of_a_group_is_one_by_itself():
    backend = Backend()
    _, left, right = links_on(backend)

    messages = [left.send(torch.ones(1)), right.receive(torch.ones(1))]

    assert backend.calls == ["begin", "send to 0", "end", "begin", "receive from 2", "end"]
    assert [message.work for message in messages] == ["work", "work"]


@pytest.mark.parametrize("is_open", [True, False])
def test_an_error_leaves_no_group_open(is_open):
    """An open group of NCCL would keep all later messages of the thread waiting."""
    backend = Backend(is_broken=True)
    groups, left, _ = links_on(backend)
    if is_open:
        groups.begin()

    with pytest.raises(RuntimeError, match="NCCL error"):
        left.send(torch.ones(1))
    groups.give_up()

    assert backend.ends == 1
    assert not groups._messages
