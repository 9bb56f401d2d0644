"""Why no layout fits: what the one that needs least holds, on which rank, and how many devices would do."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import chain

import numpy as np

from penstock.errors import ConfigError, count_of
from penstock.ir.units import format_bytes
from penstock.searching.layouts.bounds import least_bytes
from penstock.searching.layouts.families import best_of_families, best_of_savers, least_plans
from penstock.searching.layouts.planned import PlannedLayout
from penstock.searching.layouts.problem import Floats, LayoutProblem, LayoutQuestion

MOST_LOOKED_AT = 4
"""The layouts of least bytes, by their bounds, of which the one that holds least is told."""
MOST_TIMES = 64
"""The most times as many devices that are tried."""


def nothing_fits(question: LayoutQuestion, problems: Sequence[LayoutProblem]) -> ConfigError:
    """Return the error for a model none of whose layouts fits; it tells what would."""
    error = _large_layer(min(problems, key=lambda problem: _layer_bytes(problem).max()))
    if error is not None:
        return error
    plans = chain.from_iterable(map(least_plans, _least_by_bound(problems)))
    least = min(plans, key=lambda plan: plan.peak_bytes)
    devices = count_of(question.cluster.gpus, "device")
    limit, rank = format_bytes(problems[0].limit_bytes), least.fullest_rank
    return ConfigError(
        f"no layout was found that fits {devices} of {limit} for tensors; {least.layout}, which needs least of those "
        f"tried, holds {format_bytes(least.peak_bytes)} on rank {rank}: {_held(problems, least)}. {_way_out(question)}",
        key="gpus",
    )


def _least_by_bound(problems: Sequence[LayoutProblem]) -> list[LayoutProblem]:
    return sorted(problems, key=least_bytes)[:MOST_LOOKED_AT]


def _layer_bytes(problem: LayoutProblem) -> Floats:
    """Return [num_layers] what a device holds of a layer at least while its backward runs, however many there are."""
    gradients = problem.of_layers("gradient_bytes")
    return problem.of_layers("parameter_bytes") + np.maximum(gradients, problem.of_layers("activation_bytes"))


def _large_layer(problem: LayoutProblem) -> ConfigError | None:
    """Return the error for a model with a layer that no device of any number can hold, if it has one.

    The problem is that of the layout whose largest layer is the smallest.
    """
    sizes = _layer_bytes(problem)
    layer = int(sizes.argmax())
    if sizes[layer] <= problem.limit_bytes:
        return None
    static = problem.of_layers("parameter_bytes")[layer] + problem.of_layers("gradient_bytes")[layer]
    return ConfigError(
        f"layer {layer} of {problem.num_layers} takes {format_bytes(int(sizes[layer]))} by itself, of them "
        f"{format_bytes(int(static))} of weights and gradients, and a device has "
        f"{format_bytes(problem.limit_bytes)} for tensors; Penstock splits no layer. Take devices with more memory, "
        "shorter sequences or smaller layers",
        key="device",
    )


def _held(problems: Sequence[LayoutProblem], plan: PlannedLayout) -> str:
    """Say what the fullest rank of a plan holds, the largest part first."""
    problem = next(problem for problem in problems if problem.layout == plan.layout)
    rank, placement = plan.fullest_rank, plan.schedule.placement
    bounds = [sum(plan.split[:stage]) for stage in range(len(plan.split) + 1)]
    layers = [layer for stage in placement.stages_of_rank[rank] for layer in range(bounds[stage], bounds[stage + 1])]
    parts = {
        "parameters": problem.of_layers("parameter_bytes")[layers].sum() / problem.shards,
        "gradients": problem.of_layers("gradient_bytes")[layers].sum() / problem.shards,
        "optimizer state": problem.of_layers("optimizer_bytes")[layers].sum() / problem.shards,
    }
    whole = plan.plan.timeline.peak_bytes[rank]
    parts["activations, messages and what is gathered" if problem.shards > 1 else "activations and messages"] = whole
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return ", ".join(f"{name} {format_bytes(int(size))}" for name, size in ordered)


def _way_out(question: LayoutQuestion) -> str:
    """Say how many devices would do, in nodes of the same size, or that more alone do not help."""
    cluster, times = question.cluster, 2
    while times <= MOST_TIMES:
        more = replace(cluster, gpus=cluster.gpus * times, nodes=cluster.nodes * times)
        try:
            problems = replace(question, cluster=more).problems()
        except ConfigError:  # the batch does not divide over so many
            break
        candidates = [problem for problem in _least_by_bound(problems) if least_bytes(problem) <= problem.limit_bytes]
        if any(best_of_families(problem) or best_of_savers(problem) for problem in candidates):
            return f"{more.gpus} devices would do; or take devices with more memory, or shorter sequences"
        times *= 2
    return "Take devices with more memory, shorter sequences, or a smaller model"
