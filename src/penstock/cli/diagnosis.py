"""A diagnosis as tables for people, and as JSON for programs."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict

import numpy as np

from penstock.cli.conclusion import busy_line, headline, next_step, options_of, who_of
from penstock.errors import listed
from penstock.ir.operations import Op
from penstock.ir.timeline import Timeline
from penstock.partition.split import names_by_reason, split_text
from penstock.searching.advice import Advice, advice_of
from penstock.searching.what_if import Change
from penstock.show.text import count_of, format_seconds, format_share, time_unit
from penstock.simulation.causes import NAME_OF_CAUSE, Cause
from penstock.simulation.costs.layer_costs import split_sizes
from penstock.simulation.costs.variation import largest_variation
from penstock.tables import NO_SCREEN, Column, Screen, table_text
from penstock.train.watching.diagnosis import Diagnosis, ReplicaWaits

SMALLEST_SHARE = 0.001
"""The share of the step, or of the idle time, below which a cause is not worth a line."""
SMALLEST_EARLY_SHARE = 0.05
"""The share of a stage's weights below which gradients computed in I are not worth a line: small ones always are."""
SMALL = "small"
"""The reason of weights that are too small to wait for W (`execute/split/planner.py`)."""
SMALL_SHARE = 0.15
"""The share of W in the backwards below which it is next to nothing."""
NOTES = {
    "split": "a stage's measured seconds are shared among its layers by what was profiled, or by their weights",
    "weights": "half of what an I and a W take is taken to be weight gradients",
    "microbatches": "computing and sending a microbatch is taken to be in proportion to its size",
}


MEMORY = {
    True: "by what was profiled of each layer",
    False: "as if all layers held as much; penstock profile measures it",
}
"""The origin of the bytes of activations, by whether they were measured."""


def to_text(diagnosis: Diagnosis, screen: Screen = NO_SCREEN, *, asked_split: Sequence[int] = ()) -> str:
    """Return a diagnosis as tables: figures, causes, idle times, changes, the effect of `asked_split`, what to do."""
    advice = advice_of(diagnosis.changes)
    asked_changes = [change for change in diagnosis.changes if asked_split and change.text == split_text(asked_split)]
    parts = [
        screen.wrapped("\n".join([_title(diagnosis), *_figures(diagnosis)])),
        _causes_table(diagnosis, screen),
        _idle_table(diagnosis, screen),
        *_early_weights_table(diagnosis, screen),
        *(screen.wrapped(line) for line in _idle_weight_gradients(diagnosis.recorded)),
        *_changes_tables(diagnosis, advice, screen),
        *(screen.wrapped(_asked_split(change)) for change in asked_changes),
        screen.wrapped(next_step(diagnosis, advice)),
    ]
    return "\n\n".join(parts)


def _asked_split(change: Change) -> str:
    step, memory = _percent(change.step_change), _percent(change.memory_change)
    return f"{change.text}, as asked: step {step}, memory {memory}"


def _title(diagnosis: Diagnosis) -> str:
    program, num_replicas = diagnosis.timeline.program, diagnosis.recorded.num_replicas
    replicas = f"{num_replicas} replicas of " if num_replicas > 1 else ""
    sizes = split_sizes(diagnosis.recorded.layers_of_stage)
    return (
        f"step {diagnosis.recorded.step}: {program.name}, {replicas}{count_of(program.num_ranks, 'rank')}, "
        f"{count_of(program.num_stages, 'stage')}, {count_of(program.num_microbatches, 'microbatch')}"
    ) + f", {split_text(sizes)}" * bool(sizes)


def _figures(diagnosis: Diagnosis) -> Iterator[str]:
    measured, predicted = diagnosis.timeline, diagnosis.predicted
    before_s = diagnosis.step_s - measured.makespan_s
    yield f"measured:   makespan {_figure(measured)}, and {format_seconds(before_s)} before its first computation"
    yield f"predicted:  makespan {_figure(predicted)} ({_percent(predicted.makespan_s / measured.makespan_s - 1)})"
    if diagnosis.plan is not None:
        yield from diagnosis.plan.lines()
    if measured.clock_uncertainty_s:
        yield f"times of different hosts are within {format_seconds(measured.clock_uncertainty_s)} of each other"
    if diagnosis.replicas is not None:
        yield _replicas(diagnosis.replicas, diagnosis.step_s)
    yield headline(diagnosis)
    yield from filter(None, [busy_line(diagnosis.spreads, measured.program.placement.rank_of_stage)])


def _replicas(waits: ReplicaWaits, step_s: float) -> str:
    wait_at_end, wait_within = format_seconds(waits.behind_s), format_seconds(waits.within_s)
    return (
        f"replicas:   the step waits for them {wait_at_end} behind its last computation (rank {waits.behind_rank}), "
        f"{format_share(waits.behind_s / (step_s + waits.behind_s))} of it, and rank {waits.within_rank} {wait_within} "
        "between computations"
    )


def _figure(timeline: Timeline) -> str:
    return f"{format_seconds(timeline.makespan_s)}, bubble {format_share(timeline.bubble_fraction)}"


def _causes_table(diagnosis: Diagnosis, screen: Screen) -> str:
    """Return a table with one row per cause, the most expensive first."""
    idle_s = float(diagnosis.idle.by_rank.sum())
    rows = []
    for loss in diagnosis.losses:
        share = loss.duration_s / diagnosis.step_s
        idle_share = diagnosis.idle.total(loss.cause) / idle_s if idle_s else 0.0
        if max(share, idle_share) >= SMALLEST_SHARE:
            rows.append([_percent(0.0 - share), format_share(idle_share), NAME_OF_CAUSE[loss.cause], who_of(loss)])
    columns = [
        Column("step"),
        Column("of idle time", drop_order=1),
        Column("cause", is_text=True),
        Column("who", is_text=True),
    ]
    title = "the step without each cause, and the idle time that has it (one wait can hide another)"
    return _titled_table(title, columns, rows, screen)


def _idle_table(diagnosis: Diagnosis, screen: Screen) -> str:
    """Return a table of idle time by cause, with a row per rank and one for all; causes without time are left out."""
    table = diagnosis.idle.by_rank
    total = np.concatenate([table, table.sum(axis=0, keepdims=True)])
    causes = [cause for cause in Cause if table[:, cause].any()]
    unit_s, unit = time_unit(float(total.sum(axis=1).max()))
    rows = []
    for index, row in enumerate(total):
        name = "all" if index == len(table) else str(index)
        rows.append([name, *(f"{row[cause] / unit_s:.3f}" for cause in causes), f"{row.sum() / unit_s:.3f}"])
    # Where the screen is narrow, the smallest causes are left out first.
    largest_first = sorted(causes, key=lambda cause: -table[:, cause].sum())
    columns = [Column(NAME_OF_CAUSE[cause], drop_order=1 + largest_first.index(cause)) for cause in causes]
    title = f"idle time of each rank by its cause, in {unit}"
    return _titled_table(title, [Column("rank"), *columns, Column("idle")], rows, screen)


def _idle_weight_gradients(timeline: Timeline) -> Iterator[str]:
    """Yield what to do where W takes almost no time, since there is little to train: not since weights cannot wait."""
    reasons = {reason for early in timeline.early_weights.values() for reason in early.reasons.values()}
    duration_s = timeline.end_s - timeline.start_s
    weight_s, input_s = (
        float(duration_s[timeline.program.op == op].sum()) for op in (Op.BACKWARD_WEIGHT, Op.BACKWARD_INPUT)
    )
    if reasons <= {SMALL} and weight_s and weight_s < SMALL_SHARE * (weight_s + input_s):
        yield (
            f"W takes {format_share(weight_s / (weight_s + input_s))} of the backwards, as where almost all weights "
            "are frozen: splitting backwards gains nothing then; take a schedule that does not, such as "
            "--set pipeline.schedule=1f1b"
        )


def _early_weights_table(diagnosis: Diagnosis, screen: Screen) -> Iterator[str]:
    """Yield a table with a row per stage that computes a notable share of its weight gradients in I; none without."""
    rows = [
        # Files of earlier versions have names of weights but no reasons.
        [str(stage), format_share(1 - early.share), names_by_reason(early.reasons) or listed(early.names)]
        for stage, early in sorted(diagnosis.recorded.early_weights.items())
        if early.share >= SMALLEST_EARLY_SHARE
    ]
    if rows:
        columns = [
            Column("stage"),
            Column("wait for W"),
            Column("do not wait", is_text=True),
        ]
        yield _titled_table("weight gradients that the split backward of a stage leaves to W", columns, rows, screen)


def _changes_tables(diagnosis: Diagnosis, advice: Advice, screen: Screen) -> Iterator[str]:
    """Yield a table of each group of changes that would make the step shorter, and notes on what is assumed.

    A change has its name, and what it does to the time of a step and to memory, as shares; `advice` has sorted the
    changes into groups.
    """
    groups = [
        ("what would help, each simulated", advice.worth),
        ("what would help, but takes much more memory, each simulated", advice.costly),
        ("what would help with a second copy of the weights, each simulated", advice.second_copy),
    ]
    columns = [
        Column("step", style="green"),
        Column("memory"),
        Column("change", is_text=True),
    ]
    all_changes = [change for _, changes in groups for change in changes]
    has_keys = any(change.settings for change in all_changes)  # a timeline without a run file has none
    columns += [Column("how", is_text=True, drop_order=1)] if has_keys else []
    for title, changes in groups:
        rows = [
            [_percent(change.step_change), _percent(change.memory_change), change.text]
            + [options_of(change)] * has_keys
            for change in changes
        ]
        if rows:
            yield _titled_table(title, columns, rows, screen)
    notes = [f"  {NOTES[sort]}" for sort in dict.fromkeys(change.sort for change in all_changes) if sort in NOTES]
    if all_changes and not diagnosis.knows_shares:
        notes.append(
            "  backwards in two parts are taken to be halves that cost nothing more; penstock profile measures it"
        )
    if all_changes:
        notes.append(f"  memory is that of the activations on the fullest rank, {MEMORY[diagnosis.knows_bytes]}")
    if notes:
        yield "\n".join(["what is assumed of them", *map(screen.wrapped, notes)])


def _percent(share: float) -> str:
    return f"{100 * share:+.1f} %"


def to_json(diagnosis: Diagnosis) -> str:
    """Return a diagnosis as one JSON object, with times in seconds, and changes as shares of the step."""
    step_s, variation = diagnosis.step_s, largest_variation(diagnosis.spreads)
    document = {
        "step": diagnosis.recorded.step,
        "schedule": diagnosis.timeline.program.name,
        "split": list(split_sizes(diagnosis.recorded.layers_of_stage)),
        "step_s": step_s,
        "measured": _timeline(diagnosis.timeline),
        "predicted": _timeline(diagnosis.predicted),
        "clock_uncertainty_s": diagnosis.timeline.clock_uncertainty_s,
        "plan": diagnosis.plan and diagnosis.plan.to_dict(),
        "replicas": diagnosis.recorded.num_replicas,
        "waits_for_replicas": diagnosis.replicas and asdict(diagnosis.replicas),
        "finding": headline(diagnosis),
        "spread": variation and variation.share,
        "advice": next_step(diagnosis, advice_of(diagnosis.changes)),
        "idle_s": [
            {"rank": rank, "idle": float(row.sum())} | {NAME_OF_CAUSE[cause]: float(row[cause]) for cause in Cause}
            for rank, row in enumerate(diagnosis.idle.by_rank)
        ],
        "losses": [
            {
                "cause": NAME_OF_CAUSE[loss.cause],
                "duration_s": loss.duration_s,
                "step_change": -loss.duration_s / step_s,
                "culprit": loss.culprit,
            }
            for loss in diagnosis.losses
        ],
        "early_weights": [
            {"stage": stage, "share": early.share, "names": list(early.names), "reasons": dict(early.reasons)}
            for stage, early in sorted(diagnosis.recorded.early_weights.items())
        ],
        "changes": [
            {
                "sort": change.sort,
                "change": change.text,
                "step_change": change.step_change,
                "memory_change": change.memory_change,
                "settings": change.settings,
                "copies_weights": change.copies_weights,
            }
            for change in diagnosis.changes
        ],
    }
    return json.dumps(document, indent=2)


def _timeline(timeline: Timeline) -> dict[str, float]:
    return {name: getattr(timeline, name) for name in ("makespan_s", "span_s", "bubble_fraction", "bubble_rate")}


def _titled_table(title: str, columns: Sequence[Column], rows: Sequence[Sequence[str]], screen: Screen) -> str:
    return f"{screen.wrapped(title)}\n{table_text(columns, rows, screen)}"
