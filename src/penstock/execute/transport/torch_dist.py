"""A transport over torch.distributed: connections, abort and recovery of the links of a process to its peers.

Control messages always go between CPUs. The transport makes its own connections in the store of the given group and
never uses the group itself, so that it can drop and remake them after a failure. Gloo (torch 2.13) demands care: a
`Work` that is dropped may lose its message; a wait that runs out of time makes the connection unusable; the sockets
close, and so wake the peers, only when the backend and every `Work` of it are gone. Hence tickets hold no `Work`, and
errors leave none behind in their traceback.
"""

import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from itertools import product
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.errors import ConfigError, PeerLost, PipelineError, hint_of_limit
from penstock.execute.accelerator import is_queued, make_event
from penstock.execute.transport.backend_links import (
    DOWNWARD,
    UPWARD,
    BackendLink,
    GlooWaiter,
    QueuedMessage,
    abort_all,
    connect_devices,
)
from penstock.execute.transport.device_queue import DeviceQueue, held_up_of
from penstock.execute.transport.links import CLOSED, Link, LinkClosed, Pending
from penstock.execute.transport.meeting import ADDRESSES, IN_GROUPS, MEETING_PREFIX, require_one_kind
from penstock.execute.transport.message_groups import GroupedLink, MessageGroups, Turns
from penstock.execute.transport.over_links import OverLinks
from penstock.execute.transport.protocol import Tag, Ticket, WaitObserver
from penstock.execute.transport.rank_names import RankNames
from penstock.execute.transport.rendezvous import NO_SOCKETS, Listener, Rendezvous, connect_all
from penstock.execute.undocumented_backends import Backend, end_group, gloo, store_of
from penstock.running_time import running_s

CONNECTED, LINKED = "connected", "linked"
"""The rounds of texts in a rendezvous of the ranks behind that of their addresses; the last one only where there are
backends."""


class TorchTransport(OverLinks):
    """The rank of a process in a group of torch.distributed; peers are counted within that group.

    All ranks of the group make their transports in the same order. A CPU device means gloo, a CUDA device NCCL; where
    all messages go between CPUs of one host (`sockets.py`), there is no gloo.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        deadline_s: float = 60.0,
        device: torch.device | str = "cpu",
        is_direct: bool = True,
        on_close: Callable[[], None] | None = None,
        names: RankNames | None = None,
        has_sums: bool = False,
        coalesces: bool = False,
        one_stream: bool = False,
    ) -> None:
        """Connect to all ranks of a process group, by default the one of all processes; each of them calls this.

        The transport makes sockets and backends of its own, and uses the group for its store alone, by which the ranks
        find each other. So it can drop and remake the connections after a failure. `deadline_s` is the longest wait for
        a peer; `device` is where the tensors of messages are. Unless `is_direct`, messages between CPUs of one host go
        by gloo, and not by sockets. `on_close` is called once, by the first `close`. `names` are the names of ranks in
        errors. `has_sums` says that `post_exchange`, a collective on accelerators, will be called. With `coalesces`,
        one communicator carries the messages between accelerators, in groups (`begin_group`). With `one_stream`, the
        current stream waits at once for each group and each exchange, so nothing of it runs beside computations.

        Raises:
            PipelineError: there is no process group.
            PeerLost, DeadlineExceeded: a rank does not come, or cannot be reached.
            ConfigError: the ranks compute on different kinds of devices, or only some of them coalesce.
        """
        process_group = group or dist.group.WORLD
        if process_group is None:
            raise PipelineError(
                "torch.distributed has no process group; call init_process_group first, or use one process"
            )
        super().__init__(process_group.rank(), names or RankNames.plain(process_group.size()), deadline_s)
        # Choose the way of each kind of message. What has neither way below, or no socket to its peer, goes by gloo.
        self._on_close = on_close
        self._device = torch.device(device)
        self._queued_tags = [Tag.DATA] if is_queued(self._device) else []
        """Tags (kinds) of messages that go from accelerator to accelerator, in the order of the device's queue."""
        self._direct_tags = [tag for tag in Tag if is_direct and tag not in self._queued_tags]
        """Tags of messages between CPUs, which go over sockets of this host where they can, past gloo."""
        # Connections: `_connect` below makes them; an abort drops them until the next recovery.
        self._sockets = NO_SOCKETS
        self._backends: list[Backend] = []
        self.launches_groups = coalesces and bool(self._queued_tags)
        """Whether messages go between accelerators in groups, and so only as the proof `coalesced` has found to end."""
        self._groups: MessageGroups | None = None
        """Groups of messages between accelerators; None where messages are launched one by one."""
        self._sums: Backend | None = None
        """Backend for sums over all ranks' accelerators, which run beside the messages."""
        self._gloo_waiter = GlooWaiter()
        # On an accelerator the host does not wait for a message: the device does, in the order of its queue.
        self.device_queue: DeviceQueue | None = None
        """Follows the receives that the device waits for, to notice one that does not come."""
        if self._queued_tags:
            self.device_queue = DeviceQueue(self, self._open, partial(make_event, self._device))
        self.turns = Turns(self.device_queue if self.launches_groups else None) if one_stream else None
        """Lets messages between accelerators and computations take turns; None where they run beside each other."""
        self.sums_on_devices = has_sums and self.device_queue is not None
        """Whether `post_exchange` can be called."""
        self.is_device_held_up: Callable[[], bool] = held_up_of(self)
        """Returns whether the device waits for a message, so that nothing queued behind the message has begun."""
        # A forked process, such as a data loader's, would keep the sockets open, and peers would miss this rank's end.
        _close_sockets_in_forks(self)
        # Meet the other ranks in the store of the group. `_connect` returns the store of this meeting, which belongs to
        # this transport alone, so that its recoveries do not meet those of another transport of the same group.
        meeting = Rendezvous(PrefixStore(MEETING_PREFIX, store_of(process_group)), self.rank, self.names)
        recovery_store = PrefixStore("recoveries", self._connect(meeting))
        # A recovery is in vain once a rank has left for good, as by closing the pipeline.
        calls, numbers = self.calls, self.names.numbers
        self._recoveries = Rendezvous(
            recovery_store, self.rank, self.names, is_vain=lambda: any(map(calls.departure_of, numbers))
        )

    def post_exchange(self, result: Tensor, begin: Callable[[Backend], dist.Work]) -> Ticket:
        """Begin a collective of all ranks on their accelerators, such as a sum, without blocking. Raises: PeerLost.

        Its result, `result`, lives until its ticket is waited for. Which rank is late cannot be seen: the
        ticket names the next one, which waits for the one behind it if it waits.
        """
        ticket = Ticket((self.rank + 1) % self.num_ranks, True, self._next_serial)
        sums = self._sums
        try:
            if sums is None:
                raise LinkClosed("this rank has aborted or closed its connections")
            work = begin(sums)
        except RuntimeError as error:
            if sums is not None:
                end_group(sums)
            raise self._not_posted(ticket, error) from error.with_traceback(None)
        return self._opened(ticket, QueuedMessage(work, result, self.is_device_held_up))

    def begin_group(self) -> None:
        if self._groups is not None:
            self._groups.begin()

    def end_group(self) -> None:
        if self._groups is None:
            return
        try:
            self._groups.end()
            if self.turns is not None:
                self.turns.end_group()
        except RuntimeError as error:
            ticket = Ticket((self.rank + 1) % self.num_ranks, True, self._next_serial)
            raise self._not_posted(ticket, error) from error.with_traceback(None)

    def watch(self, observer: WaitObserver) -> None:
        super().watch(observer)
        if self.device_queue is not None:
            self.device_queue.watch(observer)

    def abort(self) -> None:
        self._sockets.close()
        backends, messages = self._forget()
        abort_all(backends, self.deadline_s)
        # Only now is no kernel in their tensors: had they died before, another thread could have been given the memory.
        del messages

    def recover(self) -> None:
        self.abort()
        self._connect(self._recoveries)

    def close(self) -> None:
        self._sockets.close()
        backends, messages = self._forget()
        for backend in backends:
            backend.shutdown()
        del messages
        self._gloo_waiter.close()
        on_close, self._on_close = self._on_close, None
        if on_close is not None:
            on_close()

    def _forget(self) -> tuple[list[Backend], list[Pending]]:
        """Drop all connections and messages, and return them; the sockets close once the caller drops them too."""
        backends = self._backends
        if self._groups is not None:
            self._groups.give_up()
        self._groups = None
        if self.turns is not None:
            self.turns.forget()
        self._backends, self._sums, self._sockets = [], None, NO_SOCKETS
        self._links.clear()
        messages = list(self._open.values())
        self._open.clear()
        if self.device_queue is not None:
            self.device_queue.forget()  # its tensors need not be held: their own stream waits for their messages
        self._first_serial = self._next_serial
        return backends, messages

    def _connect(self, rendezvous: Rendezvous) -> Store:
        """Connect to all ranks of the group, which call this together; return the store of this meeting.

        Each rank publishes its address in the store. Ranks of one host then connect by sockets; gloo connects the
        others, and the backend of an accelerator connects the devices.

        Raises:
            ConfigError: on every rank alike, the ranks compute on different kinds of devices, or some alone coalesce.
            PeerLost, DeadlineExceeded: a rank does not come, or cannot be reached.
        """
        begin_s, store = running_s(), rendezvous.enter()

        def exchange(name: str, text: str) -> list[str]:
            return rendezvous.exchange(name, text, self.deadline_s)

        try:
            with ExitStack() as stack:
                listener = Listener(stack, is_wanted=bool(self._direct_tags))
                kind = f"{self._device.type}{IN_GROUPS if self.launches_groups else ''}"
                texts = exchange(ADDRESSES, f"{kind} {listener.address_text()}")
                kinds, addresses = zip(*(text.split(" ", 1) for text in texts), strict=True)
                require_one_kind(kinds)
                self._sockets = connect_all(
                    self.rank, self._direct_tags, listener, addresses, exchange, self.deadline_s
                )
                self._connect_backends(store)
                if self._backends:
                    # Gloo has one end of a pair ready before the other, and a rank that closed at once would break it.
                    exchange(LINKED, "")
        except ConfigError:  # all ranks raise it alike, so none of them waits for this one
            self.abort()
            raise
        except (RuntimeError, OSError) as error:
            # Peers that wait in a later round of the meeting are told that this rank does not come.
            self.abort()
            rendezvous.give_up(CONNECTED, LINKED)
            cure = ". See whether all of them still run; if they do not, start all ranks again"
            raise PeerLost(
                f"{self.names[self.rank]}: could not connect to the other ranks of the group: "
                f"{error or 'no answer in time'}{hint_of_limit(str(error)) or cure}",
                waited_s=running_s() - begin_s,
            ) from error.with_traceback(None)  # its frames hold links
        except BaseException:  # Ctrl-C too: the others are not to wait for a rank that has left
            self.abort()
            rendezvous.give_up(ADDRESSES, CONNECTED, LINKED)
            raise
        return store

    def _connect_backends(self, store: Store) -> None:
        """Connect what sockets do not carry, and choose the link of each peer and tag."""
        group = store, self.rank, self.num_ranks
        peers = [peer for peer in range(self.num_ranks) if peer != self.rank]
        if not self._sockets.is_complete:  # so it is on all ranks, or on none
            backend = gloo(*group, self.deadline_s)
            self._backends = [backend]
            for peer, tag in product(peers, Tag):
                self._links[peer, tag] = BackendLink(peer, tag, backend, backend, self._gloo_waiter.message)
        if self._queued_tags:
            names = ["messages"] if self.launches_groups else [UPWARD, DOWNWARD]
            names += ["sums"] if self.sums_on_devices else []
            backends = dict(zip(names, connect_devices(*group, self._device, self.deadline_s, names), strict=True))
            self._backends += backends.values()
            self._sums = backends.get("sums")
            if self.launches_groups:
                self._groups = MessageGroups(backends["messages"])
            for peer in peers:
                self._links[peer, Tag.DATA] = self._device_link(peer, backends)
        for peer, tag in product(peers, self._direct_tags):
            self._links[peer, tag] = self._sockets.link(peer, tag, self._links.get((peer, tag), CLOSED))

    def _device_link(self, peer: int, backends: Mapping[str, Backend]) -> Link:
        if self._groups is not None:
            return GroupedLink(peer, self._groups, self.is_device_held_up)
        directions = (UPWARD, DOWNWARD) if self.rank < peer else (DOWNWARD, UPWARD)
        outgoing, incoming = (backends[name] for name in directions)

        def queued(work: dist.Work, tensor: Tensor) -> QueuedMessage:
            return QueuedMessage(work, tensor, self.is_device_held_up)  # a replica's may be set later

        return BackendLink(peer, Tag.DATA, outgoing, incoming, queued)

    def _opened(self, ticket: Ticket, pending: Pending | None) -> Ticket:
        if self.turns is not None and isinstance(pending, QueuedMessage):
            self.turns.take(ticket, pending)
        return super()._opened(ticket, pending)

    def _raise_own_error(self, error: RuntimeError) -> None:
        if self.device_queue is not None:
            self.device_queue.require_device()


def _close_sockets_in_forks(transport: TorchTransport) -> None:
    """Let forked processes close their copies of a transport's sockets; the system offers no way to take this back."""
    transport_ref = ref(transport)

    def close() -> None:
        live_transport = transport_ref()
        if live_transport is not None:
            live_transport._sockets.close_copies()

    if hasattr(os, "register_at_fork"):
        os.register_at_fork(after_in_child=close)
