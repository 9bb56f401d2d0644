"""`OverLinks`: tickets, deadlines, observers and errors of a transport, in front of one link per peer and tag.

Guarantees: a ticket is waited for once, and a wait ends by its limit. Relies on: a link's errors are RuntimeErrors, and
none of its frames outlives them: a link or a work that is kept alive keeps its sockets open.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import Tensor

from penstock.errors import PeerLost, PipelineError
from penstock.execute.transport.calls import PublicCalls
from penstock.execute.transport.links import CLOSED, Link, LinkClosed, MessageLate, Pending, SizesDiffer
from penstock.execute.transport.protocol import Tag, Ticket, WaitObserver, deadline_exceeded, peer_lost
from penstock.execute.transport.rank_names import RankNames
from penstock.execute.undocumented_backends import is_timeout
from penstock.execute.values.tensors import written_out
from penstock.running_time import running_s


class OverLinks:
    """One rank's messages over its links; for transports to inherit."""

    forgotten_by = "abort(), recover() or close()"
    """The calls that forget messages, in the words of an error."""

    def __init__(self, rank: int, names: RankNames, deadline_s: float) -> None:
        self.rank, self.num_ranks, self.names = rank, len(names.numbers), names
        self.deadline_s = deadline_s
        self.calls = PublicCalls()
        self._links: dict[tuple[int, int], Link] = {}
        """Links by peer and tag."""
        self._observer: WaitObserver | None = None
        self._open: dict[int, Pending] = {}
        self._next_serial = 0
        self._first_serial = 0

    def post_send(self, peer: int, tensor: Tensor, tag: Tag = Tag.DATA) -> Ticket:
        contiguous = written_out(tensor)
        if not contiguous.is_contiguous():
            contiguous = contiguous.detach().contiguous()
        try:
            # No name for the link: an error keeps this frame, and a link kept alive keeps its sockets open.
            pending = self._links.get((peer, tag), CLOSED).send(contiguous)
        except RuntimeError as error:
            raise self._not_posted(Ticket(peer, True, self._next_serial), error) from error.with_traceback(None)
        return self._opened(Ticket(peer, True, self._next_serial, pending is None), pending)

    def post_receive(self, peer: int, tensor: Tensor, tag: Tag = Tag.DATA) -> Ticket:
        ticket = Ticket(peer, False, self._next_serial)
        if not tensor.is_contiguous():
            raise PipelineError(  # some backends would fill it wrongly
                f"rank {self.rank}: cannot receive from rank {peer} into a tensor of shape {tuple(tensor.shape)} with "
                f"strides {tensor.stride()}; pass a contiguous one",
                rank=self.rank,
                peer=peer,
            )
        try:
            pending = self._links.get((peer, tag), CLOSED).receive(tensor)
        except RuntimeError as error:
            raise self._not_posted(ticket, error) from error.with_traceback(None)
        return self._opened(ticket, pending)

    def begin_group(self) -> None:
        pass

    def end_group(self) -> None:
        pass

    def wait(self, ticket: Ticket, limit_s: float | None = None) -> None:
        """Wait for a message by its ticket: until it has arrived, or until a sent tensor may be used again.

        The wait lasts up to `limit_s` seconds, by default up to the deadline of the transport. A ticket that was waited
        for before returns at once. The observer, if any, is told when this rank stands still for a peer.

        Raises:
            PipelineError: the peer sent a tensor of another size, or this rank itself has failed.
            DeadlineExceeded: the message did not come within the limit.
            PeerLost: the connection to the peer is gone, or an abort or close of this rank has dropped the message.
        """
        deadline_s = self.deadline_s if limit_s is None else limit_s
        # Serial numbers rise, and an abort dropped every message before `_first_serial`. That the message is not among
        # the open ones tells less: a ticket that was waited for is not there either.
        if ticket.serial < self._first_serial:
            raise peer_lost(self.names, self.rank, ticket, 0.0, f"{self.forgotten_by} forgot this message")
        pending = self._open.pop(ticket.serial, None)
        if pending is None:
            return
        begin_s = running_s()
        try:
            if pending.is_over():
                return  # nothing was waited for, so there is nothing to note
            if self._observer is not None:
                self._observer.note_wait(self.names.numbers[ticket.peer])
            pending.wait(deadline_s)
        except SizesDiffer as error:
            rank_name, peer, number = self.names[self.rank], self.names[ticket.peer], self.names.numbers[self.rank]
            raise PipelineError(f"{rank_name}: message of {peer}: {error}", rank=number) from error
        except RuntimeError as error:
            # An error keeps alive the frames in its traceback, and so the `Work` of torch.distributed that a pending
            # message holds. Gloo closes its sockets, by which the peers notice, only once every `Work` is gone.
            del pending
            error.with_traceback(None)
            # Where the device of this rank has failed, that is the error, whatever the connection says.
            self._raise_own_error(error)
            waited_s = running_s() - begin_s
            if isinstance(error, MessageLate) or waited_s >= deadline_s or is_timeout(error):
                raise deadline_exceeded(self.names, self.rank, ticket, waited_s, self.deadline_s) from error
            raise peer_lost(self.names, self.rank, ticket, waited_s, str(error)) from error
        if self._observer is not None:
            self._observer.note_run()

    def watch(self, observer: WaitObserver) -> None:
        self._observer = observer

    def _opened(self, ticket: Ticket, pending: Pending | None) -> Ticket:
        if pending is not None:
            self._open[ticket.serial] = pending
        self._next_serial += 1
        return ticket

    def _not_posted(self, ticket: Ticket, error: RuntimeError) -> PeerLost:
        """Say that no link has taken a message; raise what this rank itself has failed with, if it has."""
        if not isinstance(error, LinkClosed):
            self._raise_own_error(error)
        return peer_lost(self.names, self.rank, ticket, 0.0, str(error))

    def _raise_own_error(self, error: RuntimeError) -> None:
        """Raise what this rank itself has failed with, and no peer; `error` is what a link has raised."""

    @contextmanager
    def waiting(self, limit_s: float) -> Iterator[None]:
        usual_deadline_s = self.deadline_s
        self.deadline_s = max(usual_deadline_s, limit_s)
        try:
            yield
        finally:
            self.deadline_s = usual_deadline_s
