"""An evaluation takes a batch of any number of rows and gives the outputs and the loss of one process."""

from functools import partial

import pytest
import torch
from torch import nn

from penstock.errors import StepRefused
from penstock.models import AuxiliaryLoss
from penstock.pipeline import Pipeline
from tests.local_pipelines import WIDTH, block, error_of, float_layers, on_ranks, square_loss, values

M = 4
F64 = torch.float64
FAMILIES = ["sequential", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "chimera", "dualpipe", "hanayo"]


layers = partial(float_layers, F64, 8)


def batch(rows):
    return values(1, rows, WIDTH, dtype=F64), values(2, rows, WIDTH, dtype=F64)


def one_process(rows):
    inputs, target = batch(rows)
    with torch.no_grad():
        outputs = nn.Sequential(*layers()).eval()(inputs)
        return outputs, square_loss(outputs, target)


@pytest.mark.feature("0.4", "A10")
@pytest.mark.parametrize("family", FAMILIES)
def test_outputs_and_loss_are_those_of_one_process_for_any_number_of_rows(family):
    def case(wires):
        pipeline = Pipeline(layers(), family, M, square_loss, transport=wires)
        found = []
        for rows in (8, 1, 3, 7, 2, 4, 13, 1):
            inputs, target = batch(rows)
            found.append((rows, pipeline.evaluate(inputs, target=target, return_outputs=True)))
        pipeline.step(batch(8)[0], target=batch(8)[1])
        pipeline.close()
        return found

    per_rank = on_ranks(2, case)

    assert any(result.outputs is not None for results in per_rank for _, result in results)
    for results in per_rank:
        for rows, result in results:
            outputs, loss = one_process(rows)
            torch.testing.assert_close(result.loss, loss, rtol=1e-12, atol=1e-12)
            assert len(result.losses) == min(M, rows)
            if result.outputs is not None:
                assert result.outputs.shape == outputs.shape
                torch.testing.assert_close(result.outputs, outputs, rtol=1e-12, atol=1e-12)


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

    def case(wires):
        pipeline = Pipeline([*layers()[:3], Charging()], "1f1b", M, loss, transport=wires)
        inputs, target = batch(3)
        few = pipeline.evaluate(inputs, target=target)
        inputs, target = batch(6)
        return few, pipeline.evaluate(inputs, target=target)

    for results in on_ranks(2, case):
        for rows, result in zip((3, 6), results, strict=True):
            inputs, target = batch(rows)
            with torch.no_grad():
                before = nn.Sequential(*layers()[:3])(inputs)
                output = block(3, F64)(before)
            expected = [square_loss(output, target), output.mean(), before.square().mean()]
            found = [result.named_losses[name] for name in ("square", "mean", "size")]
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def test_ranks_without_data_learn_how_many_microbatches_there_are():
    def case(wires):
        pipeline = Pipeline(layers(), "1f1b", M, square_loss, transport=wires)
        inputs, target = batch(3)
        own = [(inputs,), (), ()][wires.rank]
        return pipeline.evaluate(*own, target=target if wires.rank == 2 else None).loss

    for loss in on_ranks(3, case):
        torch.testing.assert_close(loss, one_process(3)[1], rtol=1e-12, atol=1e-12)


def test_slices_are_cut_by_their_own_rule():
    def case(wires):
        pipeline = Pipeline(layers(), "seq1f1b", M, square_loss, transport=wires, slices=2)
        found = []
        for rows in (5, 2):
            inputs, target = (values(seed, rows, 6, WIDTH, dtype=F64) for seed in (1, 2))
            found.append(pipeline.evaluate(inputs, target=target, return_outputs=True))
        uneven = error_of(pipeline.evaluate, values(1, 3, 5, WIDTH, dtype=F64))
        return found, uneven

    for found, uneven in on_ranks(2, case):
        assert "5 positions, which 2 slices do not divide evenly" in str(uneven)
        for rows, result in zip((5, 2), found, strict=True):
            inputs, target = (values(seed, rows, 6, WIDTH, dtype=F64) for seed in (1, 2))
            with torch.no_grad():
                outputs = nn.Sequential(*layers())(inputs)
            torch.testing.assert_close(result.loss, square_loss(outputs, target), rtol=1e-12, atol=1e-12)
            if result.outputs is not None:
                torch.testing.assert_close(result.outputs, outputs, rtol=1e-12, atol=1e-12)


def test_a_training_step_keeps_its_rule_and_ranks_must_have_equal_rows():
    def case(wires):
        pipeline = Pipeline(layers(), "1f1b", M, square_loss, transport=wires)
        inputs, target = batch(7)
        trained = error_of(pipeline.step, inputs, target=target)
        none = error_of(pipeline.evaluate, inputs[:0], target=target[:0])
        rows = 3 + wires.rank
        return trained, none, error_of(pipeline.evaluate, inputs[:rows], target=target[:rows])

    for trained, none, unequal in on_ranks(2, case):
        assert "7 rows, which 4 microbatches do not divide evenly" in str(trained)
        assert "has 0 rows" in str(none)
        assert "different shapes or types" in str(unequal)
        assert {type(trained), type(none), type(unequal)} == {StepRefused}


@pytest.mark.parametrize("debug", ["messages", "values"])
def test_few_rows_pass_under_debugging(debug):
    def case(wires):
        pipeline = Pipeline(layers(), "chimera", M, square_loss, transport=wires, debug=debug)
        for rows in (8, 1, 5, 8):
            inputs, target = batch(rows)
            loss = pipeline.evaluate(inputs, target=target, record=True).loss
            torch.testing.assert_close(loss, one_process(rows)[1], rtol=1e-12, atol=1e-12)
            pipeline.step(*batch(8)[:1], target=batch(8)[1])
        return True

    assert on_ranks(2, case) == [True, True]
