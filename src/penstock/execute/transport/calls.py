"""Which public call of a pipeline a rank is in, and on which line of the user's code.

The commonest mistake of distributed code is a call under a condition, as in `if pipeline.rank == 0: save(...)`. The
messages of one call then meet those of another. So every exchange of `Control` opens with a label, and the ranks
compare labels before they read the rest:

    label of a rank in a call    save_checkpoint TAB train.py:11
    of a second pipeline         step of pipeline 2 on the transport TAB train.py:11
    of one that refuses it       step TAB train.py:11 TAB ["the loader has failed", false]
    of one that has left         TAB closed the pipeline (train.py:20)
    of one that is not known     nothing

Guarantees: all ranks that take part in an exchange find the same disagreement. Relies on: the first exchange of a call
reaches all ranks, and one thread makes the calls of a rank.
"""

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from inspect import signature
from itertools import chain
from typing import NamedTuple, ParamSpec, TypeVar

from penstock.errors import EndOfData, PeerLeft, PenstockError, PipelineError, StepRefused, listed, users_frame
from penstock.execute.transport.rank_names import RankNames

P = ParamSpec("P")
T = TypeVar("T")
CLOSE = "close"
"""The call that ends a pipeline; where an error ends it, the type of the error stands in its place."""
UNNAMED = "pipeline.control"
"""Stands for the call of a rank that exchanges values outside of every public call."""
_MOST_LETTERS = 100
"""Letters of a file's name that a message shows: its last ones."""
_SEPARATOR = "\t"
_OF_PIPELINE = " of pipeline "
_HIDDEN_CLASSES = ("Pipeline.", "ModelPart.")
"""Classes whose methods are named alone, as users write them behind their pipeline."""


class _Label(NamedTuple):
    """The fields of a label."""

    name: str = ""
    place: str = ""
    refusal: str = ""
    """JSON of why the rank refuses the call, and whether that is the end of its data; empty where it does not."""

    @classmethod
    def of(cls, text: bytes) -> "_Label":
        return cls(*text.decode().split(_SEPARATOR, 2))


@dataclass(slots=True, eq=False)
class PublicCalls:
    """The public call that one rank is in, and what it knows of the calls of others."""

    current: bytes = b""
    """The label of the outermost call; empty between two calls."""
    is_in_step: bool = False
    """Whether the call runs a step, within which the user's code runs: data, layers, the loss, hooks and observers."""
    of_users_code: bytes = b""
    """The label of a call that the user's code makes within the step; empty outside of one."""
    of_replica: Sequence[bytes] = ()
    """The labels of the ranks of this replica, as the last exchange of the current call had them."""
    num_pipelines: int = 0
    """The number of the pipeline that was made last on the transport, from 1."""
    pipeline: int = 0
    """The number of the pipeline that the call is one of; 0 between two calls."""
    has_failed_step: bool = False
    """Whether the last step has failed, so that ranks give up their messages until the next one begins."""
    closed_pipeline: int | None = None
    """The number of the pipeline that this rank has closed, and the transport with it, so that no exchange can be made
    any more; None while it is open."""
    departure_of: Callable[[int], str] = lambda number: ""
    """Says what the rank of a number has done to leave in good order; empty where it has not, or cannot be seen."""

    @contextmanager
    def entering(self, name: str, refusal: PenstockError | None = None, *, pipeline: int = 0) -> Iterator[None]:
        """Name the exchanges of the block after a call, unless they are part of another one.

        `refusal` says why this rank cannot make the call that the others make. `pipeline` is the number of the one that
        the call is of.
        """
        if self.current and (self.of_users_code or not self.is_in_step):
            yield
            return
        is_outermost, text = not self.current, label(numbered(name, pipeline), refusal)
        if is_outermost:
            self.current, self.pipeline = text, pipeline
        else:
            self.of_users_code = text
        try:
            yield
        finally:
            self.of_users_code = b""
            if is_outermost:
                self.current, self.pipeline, self.of_replica = b"", 0, ()

    def within_step(self, rank_name: str) -> PipelineError:
        """Return the error of a call within a step, which the other ranks, in the step as well, would never join."""
        inner, outer = _Label.of(self.of_users_code), _Label.of(self.current)
        return PipelineError(
            f"{rank_name}: {inner.name} ({inner.place}) is called within {outer.name} ({outer.place}), by its data, a "
            "layer, the loss, a hook or an observer. The other ranks are in that step and cannot take part; call "
            f"{inner.name} on every rank between two steps"
        )

    @property
    def way_of_closing(self) -> str:
        """The line of the user's code that closes the pipeline, and the error that it does so after, if any."""
        call = _Label.of(self.current)
        name = _without_number(call.name)
        return call.place if name in ("", CLOSE) else f"{call.place}, after {name}"


def calls_of(transport: object) -> PublicCalls:
    """Return the calls that a transport carries; those of one that has none are new."""
    calls = getattr(transport, "calls", None)
    return calls if isinstance(calls, PublicCalls) else PublicCalls()


def numbered(name: str, pipeline: int) -> str:
    """Return the name of a call of the pipeline with this number on its transport; the first one needs no number."""
    return f"{name}{_OF_PIPELINE}{pipeline} on the transport" if pipeline > 1 else name


def _without_number(name: str) -> str:
    return name.partition(_OF_PIPELINE)[0]


def label(name: str, refusal: PenstockError | None = None) -> bytes:
    """Return the label of a call that the innermost frame of the user makes now, or refuses."""
    frame, _ = users_frame()
    file = " ".join(os.path.basename(frame.f_code.co_filename).split())  # the name may hold separators
    place = f"{file[-_MOST_LETTERS:]}:{frame.f_lineno}"  # code that a program compiles has a name of any length
    reason = ""
    if refusal is not None:
        # JSON has neither line breaks nor tabs, which labels are told apart by.
        text = str(refusal) or type(refusal).__name__
        reason = f"{_SEPARATOR}{json.dumps([text, isinstance(refusal, EndOfData)])}"
    return f"{name}{_SEPARATOR}{place}{reason}".encode(errors="replace")


def label_of_departed(departure: str) -> bytes:
    """Return the label of a rank that has left."""
    return f"{_SEPARATOR}{departure}".encode(errors="replace")


def collective(call: Callable[P, T]) -> Callable[P, T]:
    """Mark a public call that every rank makes: all its exchanges carry its name.

    It is a method of an object with the attribute `control`, or a function with an argument `pipeline`.
    """
    parameters = list(signature(call).parameters)
    index = parameters.index("pipeline") if "pipeline" in parameters else 0
    name = call.__qualname__
    for prefix in _HIDDEN_CLASSES:
        name = name.removeprefix(prefix)

    @wraps(call)
    def named_call(*args: P.args, **kwargs: P.kwargs) -> T:
        holder = args[index] if len(args) > index else kwargs.get("pipeline")
        control = getattr(holder, "control", None)
        if control is None:  # a wrong argument, which the call itself refuses
            return call(*args, **kwargs)
        with control.calls.entering(name, pipeline=control.pipeline_number):
            return call(*args, **kwargs)

    named_call.is_collective = True  # type: ignore[attr-defined]
    return named_call


def require_one_call(labels: Sequence[bytes], names: RankNames) -> None:
    """Make sure that all ranks of an exchange are in the same public call of the pipeline, such as `step`.

    `labels[rank]` is the label of a rank: the name of its call, the line of the user's code, and why the rank refuses
    the call, if it does. A rank that has closed the pipeline has no name, but the line at which it left. The label of a
    rank that nothing is known of is empty, and is passed over. Lines may differ; names may not.

    Raises:
        StepRefused: naming the call of each rank, or why one of them refuses to make a call; the same on every rank
            that has the same labels.
        PeerLeft: naming the ranks that have left, and the calls of the others.
    """
    if labels.count(labels[0]) == len(labels):
        return
    # Sort the ranks by what their labels say.
    ranks_by_departure: dict[str, list[int]] = {}
    ranks_by_call: dict[tuple[str, str], list[int]] = {}
    num_ranks_by_name: Counter[str] = Counter()
    refusal_by_rank: dict[int, str] = {}
    for rank, label_of_rank in enumerate(labels):
        name, place, refusal = _Label.of(label_of_rank)
        if name:
            ranks_by_call.setdefault((name, place), []).append(rank)
            num_ranks_by_name[name] += 1
            refusal_by_rank |= {rank: refusal} if refusal else {}
        elif place:
            ranks_by_departure.setdefault(place, []).append(rank)
    if len(num_ranks_by_name) == 1 and not ranks_by_departure:
        return
    # Most scripts are right on most ranks, and in their steps. So the call that the fewest ranks make is the one to
    # mend, and `step` is the last to be blamed.
    odd_name = min(num_ranks_by_name, key=lambda name: (num_ranks_by_name[name], _without_number(name) == "step"))
    fix = f"every rank must call {odd_name}"
    # A rank has left: the error names it, and only the calls of the other ranks, since not every replica knows which
    # of its ranks is in which call.
    if ranks_by_departure:
        clauses = [f"{_subject(ranks, names, 'has', 'have')} {act}" for act, ranks in ranks_by_departure.items()]
        other_calls = " and ".join(f"{name} ({place})" for name, place in sorted(ranks_by_call))
        clauses.append(f"the others are in {other_calls}")
        departed = names.numbers[min(chain(*ranks_by_departure.values()))]
        raise PeerLeft(f"{', '.join(clauses)}; {fix}", rank=departed, peer=departed)
    # A rank refuses its step, while others are in another call: its reason says more than the difference.
    if refusal_by_rank:
        raise refused({rank: json.loads(refusal) for rank, refusal in refusal_by_rank.items()}, names)
    # The ranks are in different calls: the error lists them all, and blames the first rank of the odd call.
    clauses = [f"{_subject(ranks, names)} in {name} ({place})" for (name, place), ranks in ranks_by_call.items()]
    first = next(iter(ranks_by_call))
    clauses[0] = f"{_subject(ranks_by_call[first], names, 'is', 'are')} in {first[0]} ({first[1]})"
    culprit = next(ranks[0] for (name, _), ranks in ranks_by_call.items() if name == odd_name)
    raise StepRefused(f"{', '.join(clauses)}; {fix}", rank=names.numbers[culprit])


def refused(reasons: Mapping[int, tuple[str, bool]], names: RankNames) -> StepRefused:
    """Return the refusal that counts, by ranks' reasons and whether each is the end of its data, which comes first."""
    rank = next((rank for rank, (_, is_end) in reasons.items() if is_end), min(reasons))
    text, is_end = reasons[rank]
    if is_end:
        return EndOfData(text, rank=names.numbers[rank])
    return StepRefused(f"{names[rank]} refuses the step: {text}", rank=names.numbers[rank])


def _subject(ranks: Sequence[int], names: RankNames, of_one: str = "", of_several: str = "") -> str:
    """Return the ranks as a clause begins with them, and its verb for one rank or several."""
    if len(ranks) == 1:
        return f"{names[ranks[0]]} {of_one}".rstrip()
    return f"ranks {listed([str(names.numbers[rank]) for rank in ranks])} {of_several}".rstrip()
