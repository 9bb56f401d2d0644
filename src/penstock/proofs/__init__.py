"""The proofs: before anything runs, a schedule or program is shown to be complete, feasible and within its memory.

    order        every action once, on its rank, after what it needs there; the order that fused layers need
    cycle        all ranks can run to their end
    channels     sends and receives are the same messages in the same order
    transports   no deadlock, however messages travel
    lifetimes    what is read is alive, what is made is not there yet, nothing is left
    memory       limits hold, no slot is overwritten while alive, few stages are whole at once where they are gathered
    collectives  one total order on all members

Every finding of one call ends in one `ScheduleError`. A proof that rests on another is left out where that one fails.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.errors import ConfigError, described
from penstock.ir.collectives import IS_BARRIER
from penstock.ir.deps import index_rows, predecessors
from penstock.ir.linear_extension import Starts
from penstock.ir.live import peak_activations
from penstock.ir.operations import IS_COPY
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.transports import COALESCED, TransportModel, find_transports
from penstock.proofs.channels import Messages, check_order, count_messages, find_exchanges, find_messages, join_messages
from penstock.proofs.collectives import check_collectives, check_crossings, leaves_reductions_out
from penstock.proofs.cycle import check_feasible
from penstock.proofs.lifetimes import check_lifetimes
from penstock.proofs.linear_extension import proved_by_order
from penstock.proofs.memory import (
    NO_DEMAND,
    CostsOfStages,
    Demand,
    Limit,
    check_limit,
    check_residency,
    check_slots,
    count_messages_alive,
)
from penstock.proofs.order import check_complete, check_names, check_pairs, check_positions, check_weight_order
from penstock.proofs.report import Subject
from penstock.proofs.transports import check_transport


@dataclass(frozen=True, slots=True)
class Facts:
    """All that a check has found out about a table that passed."""

    num_actions: int
    num_messages: int
    """Results that cross from rank to rank."""
    peak_activations: list[int]
    """Per rank, the most activations of one stage and microbatch (or slice) alive at once."""
    peak_bytes: list[int] | None
    """Per rank, the most bytes of activations, tensors saved for wgrad, messages, and what is gathered; None without
    costs."""
    static_bytes: list[int] | None
    """Per rank, the bytes of parameters, gradients and optimizer state, which a limit counts as well."""
    not_counted: tuple[str, ...]
    """The costs in bytes that are not given, or 0 throughout, and count as 0."""
    peak_received: list[int] | None
    """Per rank, the most messages posted for or arrived and not consumed; None for a schedule, which has none."""
    peak_unsent: list[int] | None
    """Per rank, the most results made and not sent; None for a schedule."""
    transports: tuple[str, ...]
    """The names of the transport models that were proved; none for a schedule."""
    omits_reductions: bool
    """Whether it is a training program that leaves the reductions of its gradients to whoever runs it."""
    peak_whole: list[int] | None = None
    """Per rank, the most stages that are whole at once, those being gathered included; None where none is gathered."""


@dataclass(frozen=True, slots=True, eq=False)
class Proof:
    """The proof that a table can run, with what a further proof of the same actions may rest on."""

    facts: Facts
    schedule: Schedule
    """The actions of the table."""
    start: Starts
    """[num_actions] when each action starts in an untimed walk."""


def check(
    table: Schedule | Program,
    transport: str = "posted",
    costs: CostsOfStages | None = None,
    memory_limit: Any = None,
    *,
    weight_order: bool = False,
    residency: int | None = None,
) -> Facts:
    """Prove that a schedule or program can run and computes everything once; return what was learnt on the way.

    A program is a schedule with its messages and collectives. It is proved under a model of how messages travel,
    `transport`: `posted`, `rendezvous`, `pair_fifo`, `coalesced`, or `all` of them (docs/design.md says what each
    means). `memory_limit` is what a rank may hold, for all ranks or one per rank: bytes, as `"20GiB"` or a number, for
    which `costs` say how large activations are; `"6 microbatches"`, of which each leaves an activation for every stage
    and slice that a rank runs of it; or `"12 activations"`. Bytes that costs do not give count as 0, and those of
    messages are counted in programs alone. `weight_order` also proves that every stage runs its `W` in the order of its
    `I`, as fused layers with delayed weight gradients need. `residency` is the most stages of a rank whose weights may
    be gathered (whole) at once, in programs with sharded weights.

    Raises:
        ScheduleError: with every violation and a picture of the first ones.
        ConfigError: for an unknown transport, or if limits and sizes do not fit the table.
    """
    demand = Demand.of(memory_limit, costs, residency)
    proof = prove(table, demand, transport=transport)
    if weight_order:
        prove_weight_order(table, range(table.num_stages))
    return proof.facts


def prove_weight_order(table: Schedule | Program, stages: Collection[int]) -> None:
    """Prove that the weight gradients of these stages come in the order of their input gradients (`weight_order`).

    The table is known to be whole.

    Raises:
        ScheduleError: with the first violation of each stage, and a picture.
    """
    subject = Subject(table)
    check_weight_order(subject, stages)
    subject.raise_if_any()


def prove(
    table: Schedule | Program,
    demand: Demand = NO_DEMAND,
    *,
    transport: str = "posted",
    earlier_proof: Proof | None = None,
) -> Proof:
    """Prove what `check` proves, and keep the proof for tables made from this one.

    `demand` holds the limits and the sizes of activations. Where `earlier_proof` is of a table with the same actions,
    these are not proved again: only its messages and collectives are.

    Raises:
        ScheduleError: with every violation and a picture of the first ones.
        ConfigError: if limits and sizes do not fit the table.
    """
    if not isinstance(table, (Schedule, Program)):
        raise ConfigError(f"{described(table)}; expected a Schedule or a Program", key="table")
    models = find_transports(transport)
    subject = Subject(table)
    # Later proofs need that overlapped pairs are pairs, and that every stage and microbatch exists.
    if not check_pairs(subject):
        subject.raise_if_any()
    names_exist = check_names(subject)
    if names_exist and earlier_proof is not None and earlier_proof.schedule == subject.schedule:
        # Both tables may have millions of rows, so only the earlier one is kept.
        subject.schedule = earlier_proof.schedule
        order = _Order(True, earlier_proof.start, earlier_proof.facts.num_messages)
        peak_counts = earlier_proof.facts.peak_activations
        if len(subject.table.rows_of(IS_COPY)):  # what waits on the host is in no count of the schedule
            peak_counts = peak_activations(table)
    else:
        order = _prove_order(subject, names_exist)
        peak_counts = peak_activations(table)
    # Violations of memory, residency and messages are collected, and raised all at once.
    sizes = demand.sizes(table)
    num_bytes = check_limit(subject, peak_counts, sizes, demand.limit)
    is_program = isinstance(table, Program)
    peak_whole = check_residency(subject, demand.residency) if is_program else None
    messages = _prove_program(subject, order.start, models) if is_program and order.is_whole else None
    subject.raise_if_any()
    assert order.start is not None
    peak_received, peak_unsent = (None, None) if messages is None else count_messages_alive(subject, messages)
    uncounted_fields = () if is_program else ("message_bytes",)
    facts = Facts(
        num_actions=subject.schedule.num_actions,
        num_messages=order.num_messages,
        peak_activations=peak_counts,
        peak_bytes=num_bytes,
        static_bytes=None if sizes is None else sizes.static_of_ranks(table.placement).tolist(),
        not_counted=() if sizes is None else tuple(dict.fromkeys(sizes.not_given + uncounted_fields)),
        peak_received=peak_received,
        peak_unsent=peak_unsent,
        transports=tuple(map(str, models)) if is_program else (),
        omits_reductions=isinstance(table, Program) and leaves_reductions_out(table),
        peak_whole=peak_whole,
    )
    return Proof(facts, subject.schedule, order.start)


@dataclass(frozen=True, slots=True, eq=False)
class _Order:
    """The results of the proofs of the actions alone."""

    is_whole: bool
    """Whether every action is there once, and after what it needs on its rank."""
    start: Starts | None
    """[num_actions] when each action starts in an untimed walk; None if they cannot all run."""
    num_messages: int


def _prove_order(subject: Subject, names_exist: bool) -> _Order:
    """Prove that the actions are complete and in an order that can run."""
    is_complete = check_complete(subject)
    if not names_exist:
        subject.raise_if_any()  # tables by stage and microbatch have no place for such rows
    predecessor_rows = predecessors(subject.schedule)
    is_ordered = check_positions(subject, predecessor_rows)
    start = check_feasible(subject, predecessor_rows) if is_ordered else None
    return _Order(is_complete and is_ordered, start, count_messages(subject, predecessor_rows))


def _prove_program(subject: Subject, start: Starts | None, models: Sequence[TransportModel]) -> list[Messages] | None:
    """Prove what only programs have; return their messages, None where something is wrong.

    A deadlock in the orders themselves is reported once, not per model.
    """
    num_violations = len(subject.violations)
    rows = index_rows(subject.table)
    messages = find_messages(subject, rows)
    is_matched = len(subject.violations) == num_violations
    barriers = check_collectives(subject)
    proved_models = None
    if is_matched and start is not None:
        proved_models = proved_by_order(subject, messages, start, is_grouped=COALESCED in models)
    if not proved_models:
        messages = [check_order(subject, messages, find_exchanges(barriers or ()))]
    if len(subject.program.rows_of(IS_BARRIER)):  # to join the messages of a large program takes time
        joined_messages = join_messages(messages)
        check_crossings(subject, joined_messages.send, joined_messages.receive)
    if barriers is None or len(subject.violations) > num_violations:
        return None
    check_slots(subject, rows, messages)
    check_lifetimes(subject)
    for model in [] if proved_models is None else [model for model in models if model not in proved_models]:
        check_transport(subject, join_messages(messages), barriers, model)
    return messages


__all__ = [
    "NO_DEMAND",
    "CostsOfStages",
    "Demand",
    "Facts",
    "Limit",
    "Proof",
    "check",
    "peak_activations",
    "prove",
    "prove_weight_order",
]
