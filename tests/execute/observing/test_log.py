"""The log tells the plan at INFO and every message at DEBUG, and costs nothing where nobody reads it."""

import logging
import re
from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.execute.observing.log import log_plan
from penstock.execute.values.tensors import local_part
from penstock.schedules import build
from tests.support.local_pipelines import WIDTH, float_layers, float_task, on_pipelines, step_task, token_task
from tests.support.mesh_pipelines import Job
from tests.support.mesh_pipelines import on_pipelines as on_mesh_pipelines


def lines(caplog, level):
    return [record.getMessage() for record in caplog.records if record.name == "penstock" and record.levelno == level]


OF_1F1B, OF_GPIPE = (build(name, ranks=4, microbatches=8) for name in ("1f1b", "gpipe"))


@pytest.mark.feature("A17")
@pytest.mark.parametrize(
    ("schedule", "rank", "stages", "counts"),
    [
        (OF_1F1B, 0, "4 stages, of which it holds 0", (4, 8, 4)),
        (OF_1F1B, 3, "4 stages, of which it holds 3", (1, 14, 1)),
        (OF_GPIPE, 0, "4 stages, of which it holds 0", (8, 0, 8)),
        (build("gpipe", ranks=2, microbatches=8, forward_only=True), 0, "2 stages, of which it holds 0", (8, 0, 0)),
        (build("interleaved-1f1b", ranks=2, microbatches=8), 1, "4 stages, of which it holds 1, 3", (3, 26, 3)),
    ],
    ids=["first rank", "last rank", "gpipe", "without backwards", "two stages"],
)
def test_the_plan_is_told_at_info_and_its_phases_at_debug(caplog, schedule, rank, stages, counts):
    caplog.set_level(logging.DEBUG, "penstock")

    log_plan(schedule, rank)

    plan = f"rank {rank} of {schedule.num_ranks}: {schedule.name}, 8 microbatches, 1 slice, {stages}"
    assert lines(caplog, logging.INFO) == [plan]
    assert lines(caplog, logging.DEBUG) == [
        "rank {}: {} actions in warm-up, {} steady, {} in cool-down".format(rank, *counts)
    ]


@pytest.mark.feature("A17")
def test_every_message_is_told_at_debug(caplog):
    task = float_task(4)

    with caplog.at_level(logging.DEBUG, "penstock"):
        on_pipelines(2, task, lambda pipeline: step_task(pipeline, task), num_microbatches=2)

    told = [line for line in lines(caplog, logging.DEBUG) if line.startswith("rank 1, step 0: ")]
    assert [line.removeprefix("rank 1, step 0: ") for line in told] == [
        "1RECV_F0 posted, from rank 0",
        "1RECV_F1 posted, from rank 0",
        "1RECV_F0 arrived, from rank 0",
        "1SEND_B0 posted, to rank 0",
        "1RECV_F1 arrived, from rank 0",
        "1SEND_B1 posted, to rank 0",
    ]


@pytest.mark.feature("H9")
def test_norms_are_told_per_parameter_and_once_over_all_ranks(caplog):
    task = token_task(8)

    def case(pipeline):
        step_task(pipeline, task)
        return {name: (parameter, parameter.grad) for name, parameter in pipeline.named_parameters()}

    with caplog.at_level(logging.DEBUG, "penstock"):
        held = on_pipelines(2, task, case, debug="values", tied=[("0.weight", "4.weight")])

    once = {**held[1], **held[0]}
    del once["4.weight"]  # the copy of 0.weight
    assert norms_in(lines(caplog, logging.INFO), "step 0: ") == pytest.approx(norms(once.values()), rel=1e-5)
    told = norms_in(lines(caplog, logging.DEBUG), "rank 1, step 0: 4.weight: ")
    assert told == pytest.approx(norms([held[1]["4.weight"]]), rel=1e-5)


@pytest.mark.feature("H9")
@pytest.mark.parametrize(
    ("schedule", "options"),
    [("1f1b", {"tied": [("0.weight", "4.weight")]}), ("dualpipe", {}), ("zb-h1", {"main_gradients": True})],
)
def test_norms_of_all_ranks_have_the_names_of_the_unsplit_model_and_those_of_a_rank_its_own(schedule, options):
    task = token_task(8)
    attribute = "main_grad" if "main_gradients" in options else "grad"

    def case(pipeline):
        step_task(pipeline, task)
        held = {name: (each.detach(), getattr(each, attribute)) for name, each in pipeline.named_parameters()}
        return held, [
            pipeline.norms(gradients=gradients, local=local) for local in (False, True) for gradients in (0, 1)
        ]

    found = on_pipelines(2, task, case, schedule, **options)

    whole = {**found[1][0], **found[0][0]}
    if "tied" in options:
        del whole["4.weight"]  # the copy of 0.weight
    for held, (all_values, all_gradients, values, gradients) in found:
        for column, norms_of_column, tensors in (
            (0, all_values, whole), (1, all_gradients, whole), (0, values, held), (1, gradients, held)
        ):  # fmt: skip
            expected = {name: float(pair[column].double().norm()) for name, pair in tensors.items()}
            assert norms_of_column == pytest.approx(expected, rel=1e-12)


@pytest.mark.feature("H9")
@pytest.mark.parametrize("shard", ["none", "full"])
def test_norms_over_replicas_are_of_whole_parameters_and_local_ones_of_parts(shard):
    def case(pipeline, inputs, target):
        pipeline.step(inputs, target=target)
        sums = {n: float(local_part(each.grad).double().square().sum()) for n, each in pipeline.named_parameters()}
        return pipeline.norms(gradients=True), pipeline.norms(gradients=True, local=True), sums

    found = on_mesh_pipelines(Job([8, 8]), "1f1b", case, shard=shard)
    plain = on_mesh_pipelines(Job([8, 8]), "1f1b", case)

    assert found[0][0] == pytest.approx(plain[0][0], rel=1e-12)
    for all_norms, local_norms, sums in found:
        assert all_norms == found[0][0]
        assert local_norms == pytest.approx({name: value**0.5 for name, value in sums.items()}, rel=1e-12)
    is_part = any(found[0][1][name] < found[0][0][name] * 0.99 for name in found[0][1])
    assert is_part == (shard == "full")


@pytest.mark.parametrize("dtype", [torch.int8, torch.bool, torch.int64, torch.float8_e4m3fn])
def test_frozen_weights_that_are_quantized_have_norms_too(dtype):
    weights = torch.tensor([3.0, 0.0, 4.0]).to(dtype)

    def make_layers():
        layers = float_layers()
        layers[4].register_parameter("quantized", nn.Parameter(weights, requires_grad=False))
        return layers

    found = on_pipelines(2, replace(float_task(8), make_layers=make_layers), lambda pipeline: pipeline.norms())

    for norms_by_name in found:
        assert norms_by_name["4.quantized"] == float(weights.double().norm())


def test_lazy_parameters_have_norms_from_their_first_input_on():
    task = replace(float_task(8), make_layers=lambda: [*float_layers(num_layers=4), nn.LazyLinear(WIDTH)])

    def case(pipeline):
        before = pipeline.norms()
        step_task(pipeline, task)
        return before.keys(), pipeline.norms().keys()

    for before, after in on_pipelines(2, task, case):
        assert after - before == {"4.weight", "4.bias"}


def norms(pairs):
    """Return the norm of all parameters, and of all gradients."""
    columns = zip(*pairs, strict=True)
    return [sum(float(tensor.detach().square().sum()) for tensor in column) ** 0.5 for column in columns]


def norms_in(told, opening):
    [line] = [line for line in told if line.startswith(opening)]
    return [float(number) for number in re.findall(r"norm ([0-9.e-]+)", line)]
