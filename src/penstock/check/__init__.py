"""The proofs: before anything runs, a schedule or program is shown to be complete, feasible and within its memory.

    order        every action once, on its rank, behind what it needs there
    cycle        all ranks can run to their end
    channels     sends and receives are the same messages in the same order
    transports   no deadlock, however messages travel
    memory       limits hold, no slot is overwritten while alive
    collectives  one total order on all members

Every finding of one call ends in one `ScheduleError`. A proof that rests on another is left out where that one fails.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from penstock.check.channels import Messages, count_messages, match_messages
from penstock.check.collectives import check_collectives
from penstock.check.cycle import check_feasible
from penstock.check.memory import (
    Limits,
    check_activations,
    check_bytes,
    check_slots,
    count_messages_alive,
)
from penstock.check.order import Actions, check_complete, check_names, check_pairs, check_positions
from penstock.check.report import Findings, Subject
from penstock.check.transports import (
    ALL_TRANSPORTS,
    RENDEZVOUS,
    SINGLE_QUEUE,
    Buffered,
    SingleQueue,
    TransportModel,
    check_transport,
)
from penstock.ir.deps import predecessors
from penstock.ir.live import peak_activations
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Facts:
    """What a check has found out about a table that passed."""

    num_actions: int
    num_messages: int
    """Results that cross from rank to rank."""
    peak_activations: list[int]
    """Per rank, the most activations of one stage and microbatch (or slice) alive at once."""
    peak_bytes: list[int] | None
    """Per rank, the most bytes of activations and weight contexts; None where their sizes were not given."""
    peak_received: list[int] | None
    """Per rank, the most messages posted for or arrived and not consumed; None for a schedule, which has none."""
    peak_unsent: list[int] | None
    """Per rank, the most results made and not sent; None for a schedule."""
    transports: tuple[TransportModel, ...]
    """The transport models that were proved; none for a schedule."""


def check(
    table: Schedule | Program,
    *,
    memory_limit: int | Sequence[int] | None = None,
    activation_bytes: int | Sequence[int] | None = None,
    weight_context_bytes: int | Sequence[int] | None = None,
    memory_limit_bytes: int | Sequence[int] | None = None,
    transport: TransportModel | None = None,
) -> Facts:
    """Prove that a schedule or program can run; return what was learnt on the way.

    `memory_limit` counts activations and `memory_limit_bytes` bytes, for all ranks or one per rank; the sizes are in
    bytes, for all stages or one per stage. A program is proved under `transport`, by default under every model.

    Raises:
        ScheduleError: with every violation and a picture of the first ones.
        ConfigError: if limits and sizes do not fit the table.
    """
    limits = Limits(memory_limit, activation_bytes, weight_context_bytes, memory_limit_bytes)
    models = ALL_TRANSPORTS if transport is None else (transport,)
    subject = Subject.of(table)
    findings = Findings(subject)
    if not check_pairs(subject, findings):
        findings.raise_if_any()
    names_exist = check_names(subject, findings)
    actions = Actions.of(subject)
    is_complete = check_complete(actions, findings)
    if not names_exist:
        findings.raise_if_any()  # tables by stage and microbatch have no place for such rows

    before = predecessors(actions.schedule)
    is_ordered = check_positions(actions, before, findings)
    peak = check_activations(subject, limits, findings)
    peak_bytes = check_bytes(subject, limits, findings)
    messages = None
    if isinstance(table, Program) and is_complete and is_ordered:
        messages = _prove_program(subject, actions, before, models, findings)
    elif is_ordered:
        check_feasible(actions, before, findings)
    findings.raise_if_any()
    pool = None if messages is None else count_messages_alive(subject, messages)
    return Facts(
        num_actions=actions.schedule.num_actions,
        num_messages=count_messages(actions, before),
        peak_activations=peak,
        peak_bytes=peak_bytes,
        peak_received=None if pool is None else pool.received,
        peak_unsent=None if pool is None else pool.unsent,
        transports=models if isinstance(table, Program) else (),
    )


def _prove_program(
    subject: Subject,
    actions: Actions,
    before: NDArray[np.int32],
    models: Sequence[TransportModel],
    findings: Findings,
) -> Messages | None:
    """Prove what only programs have; a deadlock that is in the orders themselves is told as such, not per model."""
    messages = match_messages(subject, actions, before, findings)
    joins = check_collectives(subject, findings)
    if messages is None or joins is None:
        check_feasible(actions, before, findings)
        return None
    check_slots(subject, actions, messages, findings)
    stuck = Findings(subject)
    passed = [check_transport(subject, messages, joins, model, stuck) for model in models]
    if not all(passed) and check_feasible(actions, before, findings):
        findings.violations += stuck.violations
    return messages


__all__ = [
    "ALL_TRANSPORTS",
    "RENDEZVOUS",
    "SINGLE_QUEUE",
    "Buffered",
    "Facts",
    "SingleQueue",
    "TransportModel",
    "check",
    "peak_activations",
]
