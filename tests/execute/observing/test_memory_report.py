"""What a rank holds is counted by its tensors: as many activations as a check counts, and every byte once."""

from dataclasses import replace
from itertools import islice

import pytest
import torch
from torch import nn

from penstock.execute.observing.layer_sizes import WORKSPACES
from penstock.execute.observing.rank_memory import Moment, memory_text
from penstock.ir.live import peak_activations
from penstock.ir.units import format_bytes
from penstock.lowering import lower
from penstock.models import DecoderConfig, cross_entropy_loss, decoder_layers
from penstock.pipeline import Pipeline
from penstock.schedules import FAMILIES, build
from tests.acceptance.steps.test_gradients import SMALL, schedules_of, task_for
from tests.support.local_pipelines import (
    WIDTH,
    Task,
    error_of,
    float_layers,
    float_task,
    gradients_of,
    on_pipelines,
    on_ranks,
    settle,
    values,
    zero,
)

FLOAT = 4
BLOCK_PARAMETERS = FLOAT * (WIDTH * WIDTH + 3 * WIDTH)
"""A norm with scale and bias, a linear layer with bias."""


TRAINABLE = [name for name in FAMILIES if not build(name, ranks=2, microbatches=4).is_forward_only]


def reports_of(schedule, task, *, steps=2, keeps_gradients=False):
    """Return every rank's report of the last of some steps, with its gradients."""

    def case(pipeline):
        for _ in range(steps):
            if not keeps_gradients:
                zero(pipeline)
            report = pipeline.memory_report(*task.inputs, target=task.target)
        gradients = gradients_of(pipeline.named_parameters())
        pipeline.step(*task.inputs, target=task.target)  # steps go on after it
        return report, gradients

    return on_pipelines(schedule.num_ranks, task, case, schedule, None)


def report_of(name, num_ranks, task, *, microbatches=8, **options):
    """Return the report that every rank has."""
    return reports_of(build(name, ranks=num_ranks, microbatches=microbatches), task, **options)[0][0]


def task_of(make_layers):
    return replace(float_task(16), make_layers=make_layers)


def deep_task(num_layers):
    return task_of(lambda: float_layers(num_layers=num_layers))


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINABLE)
def test_every_family_keeps_as_many_activations_as_the_check_counts(name):
    shapes = [pair for pair in islice(schedules_of(FAMILIES[name], SMALL), 8) if not pair[1].is_forward_only]
    found = {}
    for shape, schedule in shapes[:3]:
        report, _ = reports_of(schedule, task_for(schedule), steps=1)[0]
        found[str(shape)] = ([rank.peak_activations for rank in report.ranks], peak_activations(schedule))

    assert found
    assert {shape: pair for shape, pair in found.items() if pair[0] != pair[1]} == {}


def test_layers_keep_as_many_bytes_where_their_stage_offloads():
    schedule, task = build("gpipe", ranks=2, microbatches=8), deep_task(4)

    plain, moved = (reports_of(plan, task)[0][0] for plan in (schedule, lower(schedule, offload=[0, 1])))

    kept, kept_by_plain = (
        {name: sizes for name, sizes in report.layer_bytes.items() if name not in WORKSPACES}
        for report in (moved, plain)
    )
    assert kept == kept_by_plain
    assert [rank.peak_activations for rank in moved.ranks] == [2, 2]
    assert [rank.peak_activations for rank in plain.ranks] == [8, 8]


@pytest.mark.parametrize("name", ["1f1b", "zb-h1"])
def test_a_report_changes_no_bit_and_is_the_same_on_every_rank(name):
    schedule, task = build(name, ranks=2, microbatches=8), deep_task(4)

    outcomes = reports_of(schedule, task)

    reports = [report for report, _ in outcomes]
    assert reports[0].ranks == reports[1].ranks
    reference, gradients = task.reference(8)
    for report, own in outcomes:
        assert torch.equal(report.result.loss, reference.loss)
        assert all(torch.equal(gradient, gradients[name]) for name, gradient in own.items())


@pytest.mark.feature("H8")
def test_the_bytes_of_a_stage_are_those_of_its_layers():
    """A block saves its input, mean and deviation of the norm, the norm's output and its own output."""
    report = report_of("gpipe", 3, deep_task(3), keeps_gradients=True)

    rows = 2  # of a microbatch
    saved = FLOAT * rows * (3 * WIDTH + 2)
    first = report.ranks[0].stages[0]
    assert (first.parameter_bytes, first.gradient_bytes) == (BLOCK_PARAMETERS, BLOCK_PARAMETERS)
    assert (first.num_activations, first.context_bytes) == (8, 0)
    # Inputs of the batch are views of one storage, and the last block's output is the tanh's.
    assert first.activation_bytes == 8 * (saved - FLOAT * rows * WIDTH) + FLOAT * 16 * WIDTH
    # A received input is saved by the norm and waits for its gradient, and counts once.
    assert report.ranks[1].stages[0].activation_bytes == 8 * saved


@pytest.mark.feature("H8")
def test_the_points_of_a_step_stand_in_order_and_add_up():
    report = report_of("1f1b", 2, deep_task(2))

    for rank in report.ranks:
        assert [point.name for point in rank.points] == list(Moment)
        begin, _, peak, end = (point.counted_bytes for point in rank.points)
        assert begin == BLOCK_PARAMETERS
        assert end == 2 * BLOCK_PARAMETERS
        assert peak == rank.counted_bytes == max(point.counted_bytes for point in rank.points)
        assert all(point.allocated_bytes is None for point in rank.points)
    # With the gradients of a step before, all that comes after the last forward is given back: it is the peak, too.
    begin, after_warm_up, peak, end = report_of("gpipe", 1, deep_task(2), keeps_gradients=True).ranks[0].points
    assert begin.counted_bytes == end.counted_bytes < after_warm_up.counted_bytes == peak.counted_bytes
    message = FLOAT * 2 * WIDTH
    assert all(rank.received_bytes % message == 0 for rank in report.ranks)
    assert report.ranks[0].received_bytes > 0


def last_of_split_backwards(make_layer):
    """The last of two stages, each of a wide layer; and what one microbatch that waits for W holds there."""
    rows, width = 64, 256
    inputs, target = (values(seed, 8 * rows, width) for seed in (1, 2))
    task = Task(lambda: [settle(make_layer(width), seed) for seed in (0, 1)], (inputs,), target)
    return report_of("zb-h1", 2, task, keeps_gradients=True).ranks[1].stages[0], 2 * FLOAT * rows * width


def test_after_the_first_part_of_a_backward_only_what_weights_need_is_held():
    """Of a linear layer that waits for its weights: its activations, and the gradient of its output."""
    last, one = last_of_split_backwards(lambda width: nn.Linear(width, width))

    assert (last.num_activations, last.activation_bytes, last.context_bytes) == (2, 0, 2 * one)


class Shift(nn.Module):
    """Adds a parameter, for which autograd saves nothing."""

    def __init__(self):
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x + self.shift


def test_buffers_count_once_with_the_parameters_and_inputs_that_wait_count_though_no_layer_saved_them():
    table = torch.zeros(100)

    def with_table():
        layer = Shift()
        layer.register_buffer("table", table)
        return layer

    report = report_of("gpipe", 1, task_of(lambda: [with_table(), with_table(), Shift()]))

    middle = (
        report_of("gpipe", 3, task_of(lambda: [Shift(), Shift(), Shift()]), keeps_gradients=True).ranks[1].stages[0]
    )
    assert (middle.num_activations, middle.activation_bytes) == (8, 8 * FLOAT * 2 * WIDTH)
    assert report.ranks[0].stages[0].parameter_bytes == FLOAT * (3 * WIDTH + 100)
    assert report.layer_bytes["parameter_bytes"] == (FLOAT * (WIDTH + 100), FLOAT * WIDTH, FLOAT * WIDTH)


def test_an_optimizer_is_counted_where_it_is_given_but_nothing_that_it_keeps_on_another_device():
    task = deep_task(2)
    pipeline = Pipeline(task.make_layers(), "gpipe", 8, task.loss)
    parameters = list(pipeline.parameters())
    optimizer, elsewhere = torch.optim.AdamW(parameters), torch.optim.SGD(parameters)
    elsewhere.state[parameters[0]] = {"here": torch.zeros(3), "elsewhere": torch.zeros(5, device="meta")}

    found = []
    for given in (None, elsewhere, optimizer, optimizer):
        report = pipeline.memory_report(*task.inputs, target=task.target, optimizer=given)
        found.append((report.ranks[0].optimizer_bytes, sum(report.layer_bytes["optimizer_bytes"])))
        optimizer.step()

    without = Pipeline(task.make_layers(), "gpipe", 8)
    assert "a training step needs a loss" in str(error_of(without.memory_report, *task.inputs))
    # The first report with it came after two steps; per parameter two moments, and a count of steps.
    moments = 2 * (2 * BLOCK_PARAMETERS) + FLOAT * len(parameters)
    assert [rank for rank, _ in found] == [None, FLOAT * 3, moments, moments]
    assert found[1] == (FLOAT * 3, FLOAT * 3)


@pytest.mark.feature("H8")
def test_a_report_prints_the_tables_of_a_profile_and_is_one_line_in_a_shell():
    report = report_of("1f1b", 2, deep_task(4), microbatches=4)

    lines = str(report).splitlines()

    assert str(report) == memory_text(report.ranks, report.predicted_bytes)
    assert lines[0] == "memory, when a rank holds most"
    assert lines[1].split()[:4] == ["rank", "stage", "live", "activations"]
    assert [line.split()[:3] for line in lines[3:5]] == [["0", "0", "2"], ["1", "1", "1"]]
    assert lines[6].endswith("end  predicted peak")
    most = format_bytes(max(rank.counted_bytes for rank in report.ranks))
    assert repr(report) == f"<MemoryReport of 2 ranks, most {most} on rank 0>"


def points_have_the_allocators_figures(device):
    task = deep_task(2)
    pipeline = Pipeline(task.make_layers(), "gpipe", 8, task.loss, device=device)

    report = pipeline.memory_report(*[each.to(device) for each in task.inputs], target=task.target.to(device))

    begin, _, peak, _ = report.ranks[0].points
    assert 0 < begin.allocated_bytes <= peak.allocated_bytes <= peak.reserved_bytes
    assert peak.allocated_bytes >= peak.counted_bytes


@pytest.mark.feature("H8")
def test_on_a_device_the_points_have_the_allocators_figures(on_device):
    on_device(points_have_the_allocators_figures)


@pytest.mark.feature("H8")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "offload"),
    [
        *[(name, []) for name in ("1f1b", "zb-h1", "zbv", "interleaved-1f1b", "chimera")],
        *[(name, range(2)) for name in ("gpipe", "zb-h2")],
        *[(name, range(4)) for name in ("zbv", "interleaved-1f1b")],
    ],
)
def test_the_predicted_peak_is_what_was_counted(name, offload):
    """Of a decoder, whose batch and tables of angles weigh little beside what blocks keep."""
    config = DecoderConfig(vocabulary=64, width=128, layers=4, heads=2, key_value_heads=2, hidden=256, length=64)
    batch = torch.randint(64, (8, 65), generator=torch.Generator().manual_seed(0))

    def case(wires):
        schedule = build(name, ranks=2, microbatches=8)
        program = lower(schedule, offload=offload) if offload else schedule
        pipeline = Pipeline(decoder_layers(config), program, loss=cross_entropy_loss, transport=wires)
        for _ in range(2):  # gradients are there from the first step on
            report = pipeline.memory_report(batch[:, :-1].contiguous(), target=batch[:, 1:].contiguous())
        pipeline.close()
        return report

    reports = on_ranks(2, case)

    assert reports[0].predicted_bytes == reports[1].predicted_bytes
    workspace_bytes = max(max(reports[0].layer_bytes[name]) for name in WORKSPACES)
    for predicted, rank in zip(reports[0].predicted_bytes, reports[0].ranks, strict=True):
        # The prediction has workspaces too, which nobody sees between instructions.
        assert 0.95 * rank.counted_bytes <= predicted <= 1.05 * rank.counted_bytes + workspace_bytes


@pytest.mark.slow
def test_compiled_layers_are_measured_as_others_are():
    """Hooks that count bytes are not taken into the compiled code, which cannot run them."""
    tokens = torch.arange(64) % 20

    def report_of(**options):
        torch.manual_seed(0)
        layers = [nn.Embedding(20, 16), nn.Linear(16, 16), nn.Linear(16, 20)]
        pipeline = Pipeline(layers, "1f1b", 4, nn.functional.cross_entropy, ranks=1, **options)
        for _ in range(2):
            report = pipeline.memory_report(tokens, target=tokens)
        pipeline.close()
        return report

    plain, compiled = report_of(), report_of(compile="aot_eager")

    assert compiled.layer_bytes["message_bytes"] == plain.layer_bytes["message_bytes"]
    assert compiled.layer_bytes["parameter_bytes"] == plain.layer_bytes["parameter_bytes"]
    assert compiled.ranks[0].counted_bytes == pytest.approx(plain.ranks[0].counted_bytes, rel=0.1)
