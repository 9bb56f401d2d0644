"""An evaluation takes a batch of any number of rows and gives the outputs and the loss of one process."""

from functools import partial

import pytest
import torch
from torch import nn

from penstock.errors import StepRefused
from penstock.models import AuxiliaryLoss
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import WIDTH, block, error_of, float_layers, on_ranks, square_loss, values

F64 = torch.float64
FAMILIES = ["sequential", "1f1b", "zbv", "chimera"]
SLOW_FAMILIES = ["gpipe", "interleaved-1f1b", "zb-h1", "dualpipe", "hanayo"]


layers = partial(float_layers, F64, 8)


def batch(*shape):
    return values(1, *shape, WIDTH, dtype=F64), values(2, *shape, WIDTH, dtype=F64)


def evaluate(pipeline, *shape, **options):
    inputs, target = batch(*shape)
    return pipeline.evaluate(inputs, target=target, return_outputs=True, **options)


def step(pipeline, *shape):
    inputs, target = batch(*shape)
    return pipeline.step(inputs, target=target)


def on_pipelines(num_ranks, case, schedule="1f1b", make_layers=layers, loss=square_loss, **options):
    """Return what `case(pipeline)` returned on every rank."""
    return on_ranks(
        num_ranks, lambda wires: case(Pipeline(make_layers(), schedule, 4, loss, transport=wires, **options))
    )


def assert_as_one_process(result, *shape):
    inputs, target = batch(*shape)
    with torch.no_grad():
        outputs = nn.Sequential(*layers()).eval()(inputs)
    torch.testing.assert_close(result.loss, square_loss(outputs, target), rtol=1e-12, atol=1e-12)
    if result.outputs is not None:
        torch.testing.assert_close(result.outputs, outputs, rtol=1e-12, atol=1e-12)


@pytest.mark.feature("0.4", "A10")
@pytest.mark.parametrize(
    "family", [*FAMILIES, *(pytest.param(family, marks=pytest.mark.slow) for family in SLOW_FAMILIES)]
)
def test_outputs_and_loss_are_those_of_one_process_for_any_number_of_rows(family):
    def case(pipeline):
        found = [(rows, evaluate(pipeline, rows)) for rows in (8, 1, 7, 4, 13, 1)]
        step(pipeline, 8)
        return found

    per_rank = on_pipelines(2, case, family)

    assert any(result.outputs is not None for results in per_rank for _, result in results)
    for results in per_rank:
        for rows, result in results:
            assert_as_one_process(result, rows)
            assert len(result.losses) == min(4, rows)


class Charging(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.charge = block(3, F64), AuxiliaryLoss("size", 0.5)

    def forward(self, x):
        self.charge.add(x.square().mean())
        return self.block(x)


def test_counts_named_losses_and_layers_losses_are_weighted_by_rows():
    def loss(output, target):
        return {"square": square_loss(output, target), "mean": output.mean()}

    def case(pipeline):
        return [(rows, evaluate(pipeline, rows)) for rows in (3, 6)]

    for results in on_pipelines(2, case, make_layers=lambda: [*layers()[:3], Charging()], loss=loss):
        for rows, result in results:
            inputs, target = batch(rows)
            with torch.no_grad():
                before = nn.Sequential(*layers()[:3])(inputs)
                output = block(3, F64)(before)
            expected = [square_loss(output, target), output.mean(), before.square().mean()]
            found = [result.named_losses[name] for name in ("square", "mean", "size")]
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_ranks_without_data_learn_how_many_microbatches_there_are():
    def case(pipeline):
        inputs, target = batch(3)
        own = [inputs] if pipeline.rank == 0 else []
        return pipeline.evaluate(*own, target=target if pipeline.rank == 2 else None)

    for result in on_pipelines(3, case):
        assert_as_one_process(result, 3)


def test_slices_are_cut_by_their_own_rule():
    def case(pipeline):
        found = [(rows, evaluate(pipeline, rows, 6)) for rows in (5, 2)]
        return found, error_of(pipeline.evaluate, batch(3, 5)[0])

    for found, uneven in on_pipelines(2, case, "seq1f1b", slices=2):
        assert "5 positions, which 2 slices do not divide evenly" in str(uneven)
        for rows, result in found:
            assert_as_one_process(result, rows, 6)


def test_a_training_step_keeps_its_rule_and_ranks_must_have_equal_rows():
    def case(pipeline):
        calls = (step, 7), (evaluate, 0), (evaluate, 3 + pipeline.rank)
        return [error_of(call, pipeline, rows) for call, rows in calls]

    for trained, none, unequal in on_pipelines(2, case):
        assert "7 rows, which 4 microbatches do not divide evenly" in str(trained)
        assert "has 0 rows" in str(none)
        assert "different shapes or types" in str(unequal)
        assert {type(trained), type(none), type(unequal)} == {StepRefused}


@pytest.mark.parametrize("debug", ["messages", pytest.param("values", marks=pytest.mark.slow)])
def test_few_rows_pass_under_debugging(debug):
    def case(pipeline):
        for rows in (8, 1, 5, 8):
            assert_as_one_process(evaluate(pipeline, rows, record=True), rows)
            step(pipeline, 8)
        return True

    assert on_pipelines(2, case, "chimera", debug=debug) == [True, True]
