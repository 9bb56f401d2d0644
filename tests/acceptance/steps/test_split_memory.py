"""What is held between I and W, and the peak of steps with split backwards, are what the memory model says."""

import pytest
import torch
from torch import nn

from bench.allocations import allocations_of
from bench.waiting_layers import LAYERS, ROWS, WIDTH
from penstock.execute.observing.ranges import range_name
from penstock.ir.action import Action, Kind
from penstock.ir.live import left_bytes
from penstock.ir.operations import Op
from penstock.ir.schedule import Schedule
from penstock.models import DecoderConfig, cross_entropy_loss, decoder_layers
from penstock.pipeline import Pipeline
from penstock.placement import Placement
from penstock.schedules import build
from penstock.simulation import LayerCosts
from tests.support.local_pipelines import square_loss, values
from tests.support.ranks import run_ranks

NUM_MICROBATCHES = 3
SCALARS = 1024
"""Bytes of losses and the like, which no one predicts."""
PARTS = (Kind.FORWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)


def in_phases():
    """All forwards, then all I, then all W."""
    order = [Action(kind, 0, microbatch) for kind in PARTS for microbatch in range(NUM_MICROBATCHES)]
    return Schedule.from_actions("in phases", Placement.line(1), [order], num_microbatches=NUM_MICROBATCHES)


def held_between_parts(make_layer):
    """Return bytes measured and predicted before the first I, and between the last I and the first W."""
    inputs, target = (values(seed, NUM_MICROBATCHES * ROWS, WIDTH) for seed in (1, 2))
    narrow = nn.Sequential(nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH))  # too small to wait
    pipeline = Pipeline([narrow, make_layer()], in_phases(), loss=square_loss, ranges=True)
    for _ in range(4):  # the first ones find out what waits, and leave gradients to add to
        report = pipeline.memory_report(inputs, target=target)
    program = pipeline.program
    last_rows = [program.op.tolist().index(op) - 1 for op in (Op.BACKWARD_INPUT, Op.BACKWARD_WEIGHT)]
    costs = LayerCosts(**report.layer_bytes).of_stages(pipeline.layers_of_stage)
    predicted = left_bytes(program, costs.stage_bytes(program.placement, NUM_MICROBATCHES))[last_rows]

    found = allocations_of(lambda: pipeline.step(inputs, target=target))

    pipeline.close()
    return [found.bytes_after(range_name(program.instruction(row))) for row in last_rows], predicted.tolist()


@pytest.mark.feature("D4")
@pytest.mark.slow
@pytest.mark.parametrize("way", LAYERS)
def test_what_is_held_before_i_and_between_i_and_w_is_what_the_model_says(way):
    measured, predicted = held_between_parts(LAYERS[way])

    torch.compiler.reset()
    assert (measured[1] > NUM_MICROBATCHES * ROWS * WIDTH) == (way not in ("small", "opaque"))
    assert predicted == pytest.approx(measured, rel=0.05, abs=SCALARS)


def peaks_of(rank, names, config):
    """Return this rank's peak in a step of each schedule, measured while any row runs and predicted."""
    tokens = torch.randint(config.vocabulary, (8, config.length + 1), generator=torch.Generator().manual_seed(0))
    batch, target = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
    found = {}
    for name in names:
        schedule = build(name, ranks=2, microbatches=4)
        pipeline = Pipeline(decoder_layers(config), schedule, loss=cross_entropy_loss, ranges=True)
        for _ in range(3):  # gradients are there from the first step on
            report = pipeline.memory_report(batch, target=target)
        static = sum(stage.parameter_bytes + stage.gradient_bytes for stage in report.ranks[rank].stages)
        program = pipeline.program
        rows = [range_name(program.instruction(row)) for row in range(*program.offsets[rank : rank + 2])]
        made = allocations_of(lambda pipeline=pipeline: pipeline.step(batch, target=target))
        pipeline.close()
        most = max(made.peak_bytes_in(row) for row in rows if row in made.ranges)
        found[name] = static + most, report.predicted_bytes[rank]
    return found


@pytest.mark.feature("H8")
@pytest.mark.slow
def test_the_peak_of_a_step_with_split_backwards_is_what_the_model_says():
    config = DecoderConfig(vocabulary=64, width=128, layers=4, heads=2, key_value_heads=2, hidden=256, length=64)

    found = run_ranks(2, peaks_of, ["zb-h1", "zbv"], config)

    for measured, predicted in [pair for own in found for pair in own.values()]:
        assert predicted == pytest.approx(measured, rel=0.05)
