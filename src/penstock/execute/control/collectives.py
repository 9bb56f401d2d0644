"""`Control`: the collective of a pipeline's ranks, made of messages between their hosts.

Why not the backend's own: their deadline is fixed when a group is created, and a stuck one blocks the group's end. Here
every wait has the deadline of the moment.

It is an all-gather: each rank sends its values to every other one and receives theirs, all at once. A star through one
rank has fewer messages, but that rank handles just as many, one peer after another, and twice the way.

With replicas it has two hops: a rank gathers within its replica, and then that all from its peers of the other
replicas. So a rank sends P - 1 + D - 1 messages in D replicas of P ranks, not P x D - 1.

Every exchange opens with the labels of the public calls that its ranks are in (`transport.calls`), in lines:

    first hop     label of the rank               what it says
    second hop    labels of a replica's ranks     what each of them says, or the rank alone (`across`)

The ranks compare the labels when a hop is over, so where they differ nothing is left under way.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from struct import Struct
from typing import Any, Self

import torch
from torch import Tensor

from penstock.errors import ConfigError, PeerLost, PenstockError, PipelineError
from penstock.execute.transport.calls import (
    UNNAMED,
    PublicCalls,
    calls_of,
    label,
    label_of_departed,
    numbered,
    require_one_call,
)
from penstock.execute.transport.places import Places
from penstock.execute.transport.protocol import Tag, Ticket, Transport
from penstock.execute.transport.rank_names import rank_names
from penstock.running_time import running_s

HEAD_BYTES = 1024
"""The first message of an object: its length, and as much of it as has room. Most objects need no second one."""
LENGTH = Struct("<q")
_FAILURE = "penstock.failure"
"""A rank that fails sends a dict with this key in the place of its result."""


@dataclass(frozen=True, slots=True)
class Failure:
    """A failure of this rank, or of the first rank that failed."""

    rank: int
    """Number of the rank that failed."""
    name: str
    """Name of that rank in messages, such as `rank 3`."""
    kind: str
    """Name of the error's type."""
    text: str
    is_expected: bool
    """Whether the error is a PenstockError; any other may be a bug."""
    local_error: Exception | None
    """The error itself; None if it is another rank's."""

    @property
    def words(self) -> str:
        """The text, with the kind of an error that is not Penstock's."""
        return self.text if self.is_expected else f"{self.kind}: {self.text}"


FailsAs = Callable[[Failure], Exception]
"""Returns what a rank raises for a failure; called on every rank."""


def as_config_error(failure: Failure) -> Exception:
    """Keep the rank's own error; on other ranks return a ConfigError that names the rank."""
    return ConfigError(f"{failure.name}: {failure.words}") if failure.local_error is None else failure.local_error


class Control:
    """The collectives of one rank; it keeps nothing, so several may be made of one transport.

    All ranks call them in the same order. Each is limited by `limit_s` as a whole, by default the deadline of the
    transport, and raises PeerLost and DeadlineExceeded. Where the ranks are in different public calls, it raises
    StepRefused on all of them.
    """

    def __init__(self, transport: Transport, *, limit_s: float | None = None, places: Places | None = None) -> None:
        """`places` are those of a job with replicas, all of whose ranks take part then."""
        self.transport = transport
        self.calls = calls_of(transport)
        self._limit_s = limit_s
        self.places = places or Places.of(transport)
        self.names = self.places.names
        self.rank, self.num_ranks = self.places.index, len(self.names.numbers)
        """The ranks of all replicas are counted, one replica after another."""
        self.pipeline_number = 0
        """The number of the pipeline whose calls are named, by which its transport tells it from others; 0 for none."""

    @classmethod
    def of(cls, places: Places) -> Self:
        """Return the collectives of all ranks of a job."""
        return cls(places.pipeline, places=places)

    @property
    def within(self) -> "Control":
        """The collectives of the ranks of this rank's replica."""
        return self if self.places.data is None else Control(self.transport, limit_s=self._limit_s)

    @property
    def limit_s(self) -> float:
        """Seconds that a collective may last that begins now."""
        return self.transport.deadline_s if self._limit_s is None else self._limit_s

    def across(self, value: object) -> list[Any]:
        """Give every rank the plain values of the ranks that hold the same stages, one per replica."""
        data, text = self.places.data, self._encoded(value)
        if data is None:
            return [json.loads(text)]
        labels = [*self.calls.of_replica] or [b""] * self.transport.num_ranks
        labels[self.transport.rank] = self._label()
        return [json.loads(replica_text) for replica_text in self._gather_replicas(data, labels, text, self._end_s())]

    def all_gather_object(self, value: object) -> list[object]:
        """Give every rank the plain values of all ranks, in rank order.

        Plain: what JSON holds (str, int, float, bool, None, lists, dicts with str keys); nothing of a peer is ever
        executed. A tuple arrives as a list.
        """
        return [json.loads(text) for text in self._gather_texts(self._encoded(value))]

    def together(self, make: Callable[[], object], fails_as: FailsAs = as_config_error) -> list[Any]:
        """Call `make` on every rank, and return the results of all ranks in rank order, by one gather.

        Results are plain values, as JSON holds them. Where `make` fails on any rank, all ranks raise an error, so that
        none waits until its deadline for a rank that has failed.

        Raises:
            Exception: on every rank, if `make` fails on any: the error that `fails_as` returns for a failure. A rank
                that has failed passes its own failure to `fails_as`, any other rank that of the first rank that failed.
        """
        local_error: Exception | None = None
        try:
            text = self._encoded(make())
        except Exception as error:
            # A rank that fails sends its error in the place of a result: type, message, and whether Penstock raised it.
            local_error = error
            if isinstance(error, PipelineError):
                error.blame(self.names.numbers[self.rank])
            text = self._encoded({_FAILURE: [type(error).__name__, str(error), isinstance(error, PenstockError)]})
        results = [json.loads(result) for result in self._gather_texts(text)]
        failed_ranks = [rank for rank, result in enumerate(results) if isinstance(result, dict) and _FAILURE in result]
        if not failed_ranks:
            return results
        rank = failed_ranks[0] if local_error is None else self.rank
        kind, words, is_expected = results[rank][_FAILURE]
        failure = Failure(self.names.numbers[rank], self.names[rank], kind, words, is_expected, local_error)
        rank_error = fails_as(failure)
        if rank_error is local_error:
            raise rank_error
        raise rank_error from local_error

    def on_rank_0(self, make: Callable[[], object], fails_as: FailsAs = as_config_error) -> Any:
        """Call `make` on rank 0 alone and return its result on every rank. Raises: as `together`."""
        return self.together(lambda: make() if self.rank == 0 else None, fails_as)[0]

    def _label(self) -> bytes:
        """Return the label of the public call that this rank is in; in none, an exchange is a call of its own.

        Raises: PipelineError, where the call is made within a step by the user's code, or after `close`.
        """
        closed_pipeline, pipeline = self.calls.closed_pipeline, self.calls.pipeline or self.pipeline_number
        if closed_pipeline is not None and self.num_ranks > 1:
            # Before any message: the connections are gone, and a wait for a peer would put the blame on it.
            raise closed_error(self.places, is_other=closed_pipeline not in (0, pipeline))
        if self.calls.of_users_code:
            refuse_within_step(self)
        return self.calls.current or label(numbered(UNNAMED, self.pipeline_number))

    def _gather_texts(self, text: bytes) -> list[bytes]:
        end_s, data = self._end_s(), self.places.data
        with _naming_failed_step(self):
            lines = self._gather_over(self.transport, self._label() + b"\n" + text, end_s)
        labels = [line.partition(b"\n")[0] for line in lines]
        # JSON on one line: no text has a line break.
        texts = [line.partition(b"\n")[2] for line in lines]
        if self.calls.current:
            self.calls.of_replica = labels
        if data is None:
            require_one_call(labels, self.names)
            return texts
        # This hop follows also where the labels differ: the other replicas wait for it, and learn of it there.
        replica_texts = self._gather_replicas(data, labels, b"\n".join(texts), end_s)
        return b"\n".join(replica_texts).split(b"\n")

    def _gather_replicas(self, data: Transport, labels: Sequence[bytes], text: bytes, end_s: float) -> list[bytes]:
        """Return what the ranks that hold the same stages say, one per replica; the second hop."""
        num_ranks = len(labels)
        messages = self._gather_over(data, b"\n".join([*labels, text]), end_s)
        lines = [message.split(b"\n", num_ranks) for message in messages]
        for line in lines:
            if len(line) == 1:  # a rank that has left sends its own label alone
                line[:] = [line[0] if rank == self.transport.rank else b"" for rank in range(num_ranks)]
        require_one_call([label for line in lines for label in line[:num_ranks]], self.names)
        return [line[num_ranks] for line in lines]

    def _gather_over(self, transport: Transport, text: bytes, end_s: float) -> list[bytes]:
        """Send `text` to all ranks of a transport, and return the texts of all of them, in rank order.

        A text travels as a head of `HEAD_BYTES`, which begins with the length of the text, and a second message for
        the rest if the head has no room for it. `end_s` is the time, by `running_s`, at which the gather must be over.
        A rank that has closed its pipeline sends nothing: its text is a label that says where it left.

        Raises:
            PeerLost, DeadlineExceeded: a rank does not answer, and has not left in good order.
        """
        room_bytes = HEAD_BYTES - LENGTH.size
        peers = [rank for rank in range(transport.num_ranks) if rank != transport.rank]
        head_and_rest = LENGTH.pack(len(text)) + text[:room_bytes].ljust(room_bytes), text[room_bytes:]
        parts = [torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in head_and_rest if part]
        sends: list[Ticket] = []
        heads: dict[int, tuple[Ticket, Tensor]] = {}
        departed: dict[int, bytes] = {}
        texts, rests = [text] * transport.num_ranks, {}
        # Sends and receives are posted before anything is waited for, so no two ranks wait for each other. Of a lost
        # peer, `_departed_label` returns where it has left in good order, or raises the error.
        for peer in peers:
            try:
                sends += [transport.post_send(peer, part, Tag.CONTROL) for part in parts]
                heads[peer] = _receive(transport, peer, HEAD_BYTES)
            except PeerLost as error:
                departed[peer] = _departed_label(self.calls, transport, peer, error)
        # The head of each peer tells whether a rest follows, which is then received while other heads come in.
        for peer, (ticket, head) in heads.items():
            try:
                _wait(transport, ticket, end_s)
                message = head.numpy().tobytes()
                (num_bytes,) = LENGTH.unpack_from(message)
                texts[peer] = message[LENGTH.size : LENGTH.size + num_bytes]
                if num_bytes > room_bytes:
                    rests[peer] = _receive(transport, peer, num_bytes - room_bytes)
            except PeerLost as error:
                departed[peer] = _departed_label(self.calls, transport, peer, error)
        for peer, (ticket, rest) in rests.items():
            _wait(transport, ticket, end_s)
            texts[peer] += rest.numpy().tobytes()
        for ticket in sends:
            if ticket.peer not in departed:
                _wait(transport, ticket, end_s)
        return [departed.get(rank, text) for rank, text in enumerate(texts)]

    def _end_s(self) -> float:
        """`running_s()` at which a collective that begins now must be over."""
        return running_s() + self.limit_s

    def _encoded(self, value: object) -> bytes:
        # The standard library's JSON keeps NaN and infinities, which a loss may well be; orjson turns them into null.
        try:
            return json.dumps(value).encode()
        except (TypeError, ValueError) as error:
            raise PipelineError(
                f"{self.places.name}: cannot send {value!r:.200} to the other ranks: {error}. Send numbers, text, "
                "lists or dicts",
                rank=self.names.numbers[self.rank],
            ) from error


def closed_error(places: Places, *, is_other: bool = False) -> PipelineError:
    """Return the error of a call on a rank that has closed the pipeline, or another one on its transport."""
    problem = "the pipeline is closed; make a new one"
    if is_other:
        problem = (
            "another pipeline on the transport was closed, and the transport with it; close pipelines that share one "
            "together, or give each a transport"
        )
    return PipelineError(f"{places.name}: {problem}", rank=places.names.numbers[places.index])


def refuse_within_step(control: Control) -> None:
    """Refuse a call that the user's code makes within a step, unless no other rank would take part.

    Raises: PipelineError.
    """
    if control.num_ranks > 1:
        error = control.calls.within_step(control.places.name)
        error.blame(control.names.numbers[control.rank])
        raise error


def _departed_label(calls: PublicCalls, transport: Transport, peer: int, error: PeerLost) -> bytes:
    """Return the label of a peer that has left in good order. Raises: `error`, where it has not."""
    departure = calls.departure_of(rank_names(transport).numbers[peer])
    if not departure:
        raise error
    return label_of_departed(departure)


def _receive(transport: Transport, peer: int, num_bytes: int) -> tuple[Ticket, Tensor]:
    values = torch.empty(num_bytes, dtype=torch.uint8, device="cpu")
    return transport.post_receive(peer, values, Tag.CONTROL), values


def _wait(transport: Transport, ticket: Ticket, end_s: float) -> None:
    transport.wait(ticket, max(end_s - running_s(), 0.0))


@contextmanager
def _naming_failed_step(control: Control) -> Iterator[None]:
    """Say of a lost rank that the last step has failed: ranks that are alive have given up their connections, too."""
    try:
        yield
    except PeerLost as error:
        calls = control.calls
        if type(error) is not PeerLost or not calls.has_failed_step or calls.is_in_step:
            raise
        raise PeerLost(
            f"{control.names[control.rank]}: the last step has failed, and ranks meet again when the next step or "
            f"evaluation begins; make this call after one. Until then: {error}",
            rank=error.rank,
            peer=error.peer,
        ) from error
