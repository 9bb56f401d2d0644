"""A layer whose forward names `microbatch_place` is told which microbatch it works on, in every forward."""

from functools import partial

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import penstock as ps
from penstock.errors import PenstockError, PipelineError
from penstock.execute.batch.stream import Stream
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import (
    WIDTH,
    Around,
    Task,
    assert_gradients,
    block,
    error_of,
    gradients_of,
    named,
    on_pipelines,
    on_ranks,
    pipeline_of,
    square_loss,
    values,
)
from tests.support.mesh_pipelines import on_mesh

FLOAT64 = torch.float64


class Placed(Around):
    """Computes something else for every microbatch, and notes what it was told."""

    def __init__(self, seed):
        super().__init__(seed, FLOAT64)
        self.notes = []

    def forward(self, x, *, microbatch_place, scale=1.0):
        self.notes.append((torch.is_grad_enabled(), microbatch_place))
        return self.inner(x) * (1 + microbatch_place.index) * scale


class PlacedByDefault(Around):
    """Runs without a pipeline too."""

    def __init__(self, seed):
        super().__init__(seed, FLOAT64)

    def forward(self, x, microbatch_place=None):
        return self.inner(x) * microbatch_place.weight


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class AnyKeyword(Around):
    """Might use every keyword, but names none."""

    def __init__(self, seed):
        super().__init__(seed, FLOAT64)

    def forward(self, x, **kwargs):
        assert "microbatch_place" not in kwargs
        return self.inner(x) * sum(kwargs.values())


def layers_of():
    return [block(0, FLOAT64), Placed(1), AnyKeyword(2), PlacedByDefault(3), block(4, FLOAT64), Placed(5)]


def batch_of(rows, *shape):
    return values(1, rows, *shape, WIDTH, dtype=FLOAT64), values(2, rows, *shape, WIDTH, dtype=FLOAT64)


def by_hand(layers, inputs, target, sizes, scale=1.0, factor=None):
    """The gradients of plain torch, one microbatch after another, and the loss of the batch."""
    total = torch.zeros((), dtype=FLOAT64)
    pairs = zip(inputs.split(sizes), target.split(sizes), strict=True)
    for index, (hidden, wanted) in enumerate(pairs):
        weight = sizes[index] / sum(sizes) if factor is None else factor
        place = ps.MicrobatchPlace(index, len(sizes), 0, weight)
        for layer in layers:
            if isinstance(layer, Placed):
                hidden = layer(hidden, microbatch_place=place, scale=scale)
            elif isinstance(layer, PlacedByDefault):
                hidden = layer(hidden, place)
            else:
                hidden = layer(hidden, scale=scale) if isinstance(layer, AnyKeyword) else layer(hidden)
        loss = square_loss(hidden, wanted) * weight
        loss.backward()
        total += loss.detach()
    return total


def placed_of(pipeline):
    layers = [layer for stage in pipeline.stages for layer in stage.modules]
    return [layer for layer in layers if isinstance(layer, Placed)]


SCHEDULES = {
    "1f1b": ("1f1b", {}),
    "recomputed": ("1f1b", {"recompute": True}),
    "split backwards": ("zb-h1", {}),
    "two stages": ("interleaved-1f1b", {"stages_per_rank": 2}),
    "two routes": ("dualpipe", {}),
}


@pytest.mark.feature("G5")
@pytest.mark.parametrize("kind", SCHEDULES)
def test_every_forward_is_told_its_microbatch_and_its_share_of_ragged_rows(kind):
    name, options = SCHEDULES[kind]
    inputs, target = batch_of(11)
    task = Task(layers_of, (inputs,), target)

    def case(pipeline):
        result = pipeline.step(inputs, target=target, scale=1.7)
        notes = [list(layer.notes) for layer in placed_of(pipeline)]
        return result.loss, gradients_of(pipeline.named_parameters()), notes

    found = on_pipelines(2, task, case, name, 4, allow_ragged=True, **options)

    sizes, layers = [3, 3, 3, 2], layers_of()
    loss = by_hand(layers, inputs, target, sizes, 1.7)
    assert all(found_loss == loss for found_loss, _, _ in found)
    if name == "dualpipe":  # its ranks add up microbatches in another order
        expected = gradients_of(named(layers))
        for _, gradients, _ in found:
            for key, gradient in gradients.items():
                torch.testing.assert_close(gradient, expected[key], rtol=1e-12, atol=1e-12)
    else:
        assert_gradients([gradients for _, gradients, _ in found], layers)
    wanted = sorted((index, 4, 0, size / 11) for index, size in enumerate(sizes))
    for _, _, notes_of_layers in found:
        for notes in notes_of_layers:
            told = [(place.index, place.number, place.slice, place.weight) for _, place in notes]
            assert sorted(set(told)) == wanted if name != "dualpipe" else set(told) <= set(wanted)
            assert len(told) == len(set(told)) * (2 if options.get("recompute") else 1)


@pytest.mark.feature("G5")
def test_evaluations_of_few_rows_and_streams_have_numbers_of_their_own():
    inputs, target = batch_of(8)

    def case(pipeline):
        pipeline.evaluate(inputs[:3], target=target[:3], scale=1.0)
        pairs = list(zip(inputs.split(2), target.split(2), strict=True))
        stream = Stream([ps.Part(part, target=wanted, scale=1.0) for part, wanted in pairs])
        pipeline.step(stream)
        return [list(layer.notes) for layer in placed_of(pipeline)]

    task = Task(layers_of, (inputs,), target)
    for notes_of_layers in on_pipelines(2, task, case, "1f1b", 4):
        for notes in notes_of_layers:
            evaluated = [place for has_gradients, place in notes if not has_gradients]
            trained = [place for has_gradients, place in notes if has_gradients]
            assert evaluated == [ps.MicrobatchPlace(index, 3, 0, 1 / 3) for index in range(3)]
            assert trained == [ps.MicrobatchPlace(index, 4, 0, 1 / 4) for index in range(4)]


@pytest.mark.feature("G5")
def test_slices_share_out_the_weight_of_their_microbatch_by_their_positions():
    inputs, target = batch_of(5, 7)  # 3 rows and 2; slices of 4 positions and 3

    def case(pipeline):
        pipeline.step(inputs, target=target, scale=1.0)
        return [list(layer.notes) for layer in placed_of(pipeline)]

    def layers():
        return [Placed(seed) for seed in range(3)]

    task = Task(layers, (inputs,), target)
    schedule = ps.build("seq1f1b", ranks=2, microbatches=2, slices=2)
    for notes_of_layers in on_pipelines(2, task, case, schedule, None, allow_ragged=True):
        for notes in notes_of_layers:
            told = sorted((place.index, place.slice, place.weight) for _, place in notes)
            expected = [
                (0, 0, 3 / 5 * (4 / 7)),
                (0, 1, 3 / 5 * (3 / 7)),
                (1, 0, 2 / 5 * (4 / 7)),
                (1, 1, 2 / 5 * (3 / 7)),
            ]
            assert told == expected


@pytest.mark.feature("G5")
def test_replicas_weigh_by_the_rows_of_all_and_sums_by_one():
    inputs, target = batch_of(8)

    def weights(places, **options):
        rows = slice(0, 2) if places.replica == 0 else slice(2, 8)
        with Pipeline([Placed(seed) for seed in range(2)], "1f1b", 2, square_loss, mesh=places, **options) as pipeline:
            pipeline.step(inputs[rows], target=target[rows])
            return [place.weight for layer in placed_of(pipeline) for _, place in layer.notes]

    assert on_mesh(1, 2, weights) == [[1 / 8] * 4, [3 / 8] * 4]
    assert on_mesh(1, 2, partial(weights, reduction="sum")) == [[1.0] * 4] * 2


@pytest.mark.feature("G5")
def test_layers_behind_wrappers_are_told_and_a_wrapper_that_names_nothing_is_not():
    inputs, target = batch_of(8)

    def wrapped():
        layers = layers_of()
        layers[1] = checkpoint_wrapper(layers[1])
        layers[3] = Wrapper(Wrapper(layers[3]))
        return layers

    def case(wires):
        pipeline = pipeline_of(wires, Task(wrapped, (inputs,), target))
        result = pipeline.step(inputs, target=target, scale=1.7)
        gradients = {
            name.replace("inner.inner.inner", "inner"): gradient
            for name, gradient in gradients_of(pipeline.named_parameters()).items()
        }
        return result.loss, gradients

    found = on_ranks(2, case)
    layers = layers_of()
    loss = by_hand(layers, inputs, target, [2] * 4, 1.7)
    assert all(found_loss == loss for found_loss, _ in found)
    assert_gradients([gradients for _, gradients in found], layers)


class PlacedModel(nn.Module):
    """A model of one's own that passes on what it is told."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(PlacedByDefault(seed) for seed in range(4))

    def forward(self, x, scale, microbatch_place):
        for layer in self.blocks:
            x = layer(x, microbatch_place) * scale
        return x * (1 + microbatch_place.index)


@pytest.mark.feature("G5")
def test_a_cut_model_is_told_by_the_argument_of_its_own_forward():
    inputs, target = batch_of(7)

    def case(wires):
        layers = ps.cut(PlacedModel(), ["blocks.*"])
        with Pipeline(layers, "1f1b", 3, square_loss, transport=wires, allow_ragged=True) as pipeline:
            result = pipeline.step(inputs, target=target, scale=1.3)
            pipeline.evaluate(inputs[:2], scale=1.3)
            gradients = gradients_of(pipeline.named_parameters())
            refused = error_of(pipeline.step, inputs, 1.3, 7, target=target)
            return result.loss, gradients, refused

    found = on_ranks(2, case)

    model, loss = PlacedModel(), torch.zeros((), dtype=FLOAT64)
    for index, (hidden, wanted) in enumerate(zip(inputs.split([3, 2, 2]), target.split([3, 2, 2]), strict=True)):
        weight = len(hidden) / 7
        output = model(hidden, 1.3, ps.MicrobatchPlace(index, 3, 0, weight))
        part = square_loss(output, wanted) * weight
        part.backward()
        loss += part.detach()
    expected = gradients_of(model.named_parameters())
    for found_loss, gradients, refused in found:
        assert found_loss == loss
        assert all(torch.equal(gradient, expected[name]) for name, gradient in gradients.items())
        assert isinstance(refused, PenstockError)
        assert "'microbatch_place' is no argument of a batch" in str(refused)


@pytest.mark.feature("G5")
def test_a_keyword_of_that_name_is_refused_on_all_ranks_and_the_next_step_is_right():
    inputs, target = batch_of(8)

    def case(pipeline):
        error = error_of(pipeline.step, inputs, target=target, scale=1.0, microbatch_place=3)
        return error, pipeline.step(inputs, target=target, scale=1.0).loss

    found = on_pipelines(2, Task(layers_of, (inputs,), target), case)
    loss = by_hand(layers_of(), inputs, target, [2] * 4)
    for error, found_loss in found:
        assert isinstance(error, PipelineError)
        assert "the batch has a keyword 'microbatch_place'" in str(error)
        assert found_loss == loss


@pytest.mark.feature("G5")
def test_a_compiled_layer_is_compiled_for_the_first_microbatch_and_for_all_others():
    inputs, target = values(1, 16, WIDTH), values(2, 16, WIDTH)

    class Plain(Around):
        def forward(self, x, *, microbatch_place):
            return self.inner(x) * (1 + microbatch_place.index) * microbatch_place.weight

    torch._dynamo.reset()
    counter = CompileCounter()
    layer = torch.compile(Plain(0), backend=counter)
    with Pipeline([layer], "1f1b", 8, square_loss, ranks=1, allow_ragged=True) as pipeline:
        pipeline.step(inputs[:16], target=target[:16])
        num_frames = counter.frame_count
        pipeline.step(inputs[:16], target=target[:16])

    assert num_frames == counter.frame_count == 2


@pytest.mark.feature("G5")
def test_layers_that_ask_are_measured_by_themselves():
    inputs, target = batch_of(2)

    times = ps.measure_layers([Placed(0), PlacedByDefault(1)], (inputs,), loss=square_loss, target=target)

    assert len(times.forward_s) == 2
