"""What a pass of a layer takes and gives back is measured: numbers worked out by hand, some on a meter set by hand."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn

from penstock.execute.observing.layer_sizes import BACKWARD_WORKSPACE, FORWARD_WORKSPACE
from penstock.execute.observing.workspaces import StorageMeter, Workspaces, meter_for
from penstock.pipeline import Pipeline
from penstock.planning import predict_peaks
from penstock.schedules import build
from tests.support.local_pipelines import on_ranks, settle, values

pytestmark = pytest.mark.feature("H8")

FLOAT = 4
ROWS, WIDTH, WIDE = 64, 32, 512
HIDDEN, LOGITS = FLOAT * ROWS * WIDTH, FLOAT * ROWS * WIDE
SCALARS = 64
"""Bytes of a few numbers, such as losses."""


class Script:
    """A meter whose bytes a test sets."""

    def __init__(self):
        self.now = self.most = 100

    def watching(self):
        return nullcontext()

    def restart(self):
        self.most = self.now
        return self.now

    def num_bytes(self):
        return self.now

    def peak_bytes(self):
        return self.most

    def take(self, num_bytes):
        self.now += num_bytes
        self.most = max(self.most, self.now)


def attempt(act, *args):
    return act(*args)


@pytest.fixture
def noted():
    return {}


@pytest.fixture
def measured(noted):
    """Workspaces on a script, which note the latest bytes of each pass and layer."""

    def note(name):
        return lambda layer, num_bytes: noted.__setitem__((name, layer), num_bytes)

    meter = Script()
    return Workspaces(meter, note("forward"), note("backward")), meter


def test_in_a_forward_what_is_there_at_the_end_of_a_layer_is_no_workspace(measured, noted):
    workspaces, meter = measured
    with workspaces.forward(3, attempt):
        workspaces.enter(3, (), attempt)
        for change in (10, 20, -25):
            meter.take(change)
        workspaces.enter(4, (), attempt)
        for change in (7, -1):
            meter.take(change)

    assert noted == {("forward", 3): 25, ("forward", 4): 1}


def test_in_a_backward_the_gradients_of_inputs_and_weights_are_no_workspace(measured, noted):
    workspaces, meter = measured
    gradients = [0]
    hidden = torch.ones(3, requires_grad=True) * 2
    with workspaces.forward(3, attempt):
        workspaces.enter(4, (hidden,), attempt)

    with workspaces.backward(4, 50, lambda: gradients[0], attempt):
        meter.take(80)  # 12 of the gradient of `hidden`, 30 of a first gradient of a weight
        gradients[0] = 30
        hidden.sum().backward()
        meter.take(-30)
        meter.take(60)

    assert noted["backward", 4] == 80 - 30 - 12
    assert noted["backward", 3] == 60 - 30 - 50  # where nothing was taken, it is below 0


def test_a_storage_counts_from_when_a_kernel_returns_it_until_its_last_tensor_is_gone():
    meter = StorageMeter()
    before = torch.ones(100)
    with meter.watching():
        start = meter.restart()
        view = before[:50]
        before.add_(1)
        assert (start, meter.num_bytes()) == (0, 0)
        first = before * 2
        second = first + 1
        tail = second[10:]
        del first
        assert (meter.num_bytes(), meter.peak_bytes()) == (FLOAT * 100, 2 * FLOAT * 100)
    del second
    assert meter.num_bytes() == FLOAT * 100
    del tail, view
    assert meter.num_bytes() == 0
    assert meter.restart() == meter.peak_bytes() == 0
    assert isinstance(meter_for(torch.device("cpu")), StorageMeter)


def square(output, target):
    difference = output - target
    return (difference * difference).sum()


def report_of(schedule, num_ranks, *, width=WIDTH):
    inputs, target = values(1, 2 * ROWS, width), values(2, 2 * ROWS, WIDE)

    def case(wires):
        layers = [nn.Linear(width, width), nn.Tanh(), nn.Linear(width, WIDE, bias=False)]
        layers = [settle(layer, seed) for seed, layer in enumerate(layers)]
        order = build(schedule, ranks=num_ranks, microbatches=2)
        pipeline = Pipeline(layers, order, loss=square, transport=wires)
        for _ in range(2):
            report = pipeline.memory_report(inputs, target=target)
        program, layers_of_stage = pipeline.program, pipeline.layers_of_stage
        pipeline.close()
        return report, program, layers_of_stage

    return on_ranks(num_ranks, case)[0]


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_of_a_wide_head_the_loss_and_the_gradients_are_counted(num_ranks):
    """A forward gives back the logits and a product of the loss, of which it keeps the difference. A backward has two
    gradients of the difference at once, before the gradient of the head's input, which counts as a message, is there.
    """
    sizes = report_of("1f1b", num_ranks)[0].layer_bytes

    assert sizes[FORWARD_WORKSPACE][2] == pytest.approx(2 * LOGITS, abs=SCALARS)
    assert sizes[BACKWARD_WORKSPACE][2] == pytest.approx(2 * LOGITS - HIDDEN, abs=SCALARS)
    assert sizes[BACKWARD_WORKSPACE][1] <= 2 * HIDDEN
    assert max(sizes[FORWARD_WORKSPACE][:2]) <= HIDDEN


def test_w_counts_in_the_layer_of_its_largest_gradient():
    """Behind the first microbatch there are gradients, to which W adds a new one, as large as the weight."""
    width, gradient_bytes = 256, FLOAT * 256 * WIDE
    sizes = report_of("zb-h1", 1, width=width)[0].layer_bytes

    assert gradient_bytes > 2 * LOGITS
    assert gradient_bytes <= sizes[BACKWARD_WORKSPACE][2] < gradient_bytes + FLOAT * width * width + 3 * LOGITS
    assert sizes[BACKWARD_WORKSPACE][0] < gradient_bytes / 2


def test_the_predicted_peak_has_the_workspaces():
    report, program, layers = report_of("1f1b", 2)

    without = report.layer_bytes | {FORWARD_WORKSPACE: (0,), BACKWARD_WORKSPACE: (0,)}
    assert report.predicted_bytes == predict_peaks(program, layers, report.layer_bytes)
    more = report.predicted_bytes[1] - predict_peaks(program, layers, without)[1]
    assert more == max(report.layer_bytes[BACKWARD_WORKSPACE][layer] for layer in layers[1])


def test_a_step_that_is_not_reported_runs_no_kernel_under_it(monkeypatch):
    made = []
    monkeypatch.setattr(StorageMeter, "watching", lambda meter: made.append(meter) or nullcontext())
    report_of("1f1b", 1)
    assert made

    made.clear()
    inputs, target = values(1, 2 * ROWS, WIDTH), values(2, 2 * ROWS, WIDTH)

    def case(wires):
        pipeline = Pipeline(
            [nn.Linear(WIDTH, WIDTH)], build("1f1b", ranks=1, microbatches=2), loss=square, transport=wires
        )
        pipeline.step(inputs, target=target)
        pipeline.profile(inputs, target=target)
        pipeline.close()

    on_ranks(1, case)
    assert made == []


def test_a_report_changes_no_gradient():
    inputs, target = values(1, 2 * ROWS, WIDTH), values(2, 2 * ROWS, WIDE)

    def gradients(reports):
        def case(wires):
            layers = [settle(nn.Linear(WIDTH, WIDTH), 0), settle(nn.Linear(WIDTH, WIDE), 1)]
            pipeline = Pipeline(layers, build("zb-h1", ranks=2, microbatches=2), loss=square, transport=wires)
            run = pipeline.memory_report if reports else pipeline.step
            run(inputs, target=target)
            grads = [parameter.grad.clone() for parameter in pipeline.parameters()]
            pipeline.close()
            return grads

        return on_ranks(2, case)

    for plain, reported in zip(gradients(False), gradients(True), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(plain, reported, strict=True))


class LeavesGarbage(nn.Module):
    """Leaves a tensor in a reference cycle, and makes enough objects for Python to look for such tensors."""

    def forward(self, hidden):
        cycle = [hidden.detach().exp()]
        cycle.append(cycle)
        del cycle
        doubled = hidden * 2
        assert len([[] for _ in range(2000)]) == 2000
        return doubled


def test_garbage_of_a_layer_is_no_workspace():
    inputs, target = values(1, 2 * ROWS, WIDTH), values(2, 2 * ROWS, WIDE)

    def case(wires):
        layers = [nn.Linear(WIDTH, WIDTH), LeavesGarbage(), nn.Linear(WIDTH, WIDE, bias=False)]
        with Pipeline(layers, build("gpipe", ranks=1, microbatches=2), loss=square, transport=wires) as pipeline:
            return pipeline.memory_report(inputs, target=target)

    (report,) = on_ranks(1, case)

    assert report.layer_bytes[FORWARD_WORKSPACE][1] == HIDDEN  # its input, which nobody keeps
