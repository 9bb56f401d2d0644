"""The unsplit model accumulates as plain code does."""

import torch
from torch import nn

import penstock as ps
from penstock.execute.batch.stream import Part
from penstock.verifying.observation import (
    BUFFER,
    EVALUATION,
    GRADIENT,
    LOSS,
    OUTPUT,
    PARAMETER,
    SHRINKING,
    START,
    TRAINING,
)
from penstock.verifying.whole_model import Objective, WholeModel

MODES = (EVALUATION, TRAINING)


def batch():
    generator = torch.Generator().manual_seed(0)
    features = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    return Part(features, target=torch.arange(6) % 3)


def test_gradients_are_those_of_microbatches_by_their_shares():
    model = nn.Linear(3, 3).double()
    part = batch()
    part.target[:2] = -100  # cross entropy leaves them out, so the first microbatch counts less

    observations = WholeModel(model, Objective(nn.functional.cross_entropy, None, 2)).run([part], MODES)

    assert [item.mode for item in observations] == [START, *MODES]
    values = observations[0].tensors[PARAMETER]
    weight = values["weight"].clone().requires_grad_()
    logits = nn.functional.linear(part.args[0], weight, values["bias"])
    nn.functional.cross_entropy(logits, part.target).backward()
    torch.testing.assert_close(observations[2].tensors[GRADIENT]["weight"], weight.grad)
    # A product of other numbers of rows may have other last bits.
    torch.testing.assert_close(observations[1].tensors[OUTPUT]["output"], logits.detach())
    assert set(observations[2].tensors[LOSS]) == {"microbatch 0", "microbatch 1", "batch"}
    assert torch.equal(model.weight, values["weight"] * SHRINKING)


def test_evaluation_leaves_modes_and_buffers_and_training_changes_them():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3)).double()
    model[1].eval()
    model.register_buffer("table", torch.ones(1), persistent=False)

    start, trained = WholeModel(model, Objective(nn.functional.mse_loss, None, 2)).run(
        [Part(batch().args[0], target=batch().args[0])], [TRAINING]
    )

    assert (model[0].training, model[1].training) == (True, False)
    buffers = trained.tensors[BUFFER]
    assert not torch.equal(buffers["0.running_mean"], start.tensors[BUFFER]["0.running_mean"])
    assert torch.equal(buffers["1.running_mean"], start.tensors[BUFFER]["1.running_mean"])
    assert "table" in buffers
    assert "table" not in start.tensors[BUFFER]


class Balanced(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.auxiliary = ps.AuxiliaryLoss("size", weight=0.5)

    def forward(self, features):
        output = super().forward(features)
        self.auxiliary.add(output.square().mean())
        return output


def test_auxiliary_losses_are_trained_with_their_weights():
    model = Balanced().double()
    features = batch().args[0]

    observations = WholeModel(model, Objective(nn.functional.mse_loss, None, 2)).run(
        [Part(features, target=features)], [TRAINING]
    )

    weight = observations[0].tensors[PARAMETER]["weight"].requires_grad_()
    output = nn.functional.linear(features, weight, observations[0].tensors[PARAMETER]["bias"])
    (nn.functional.mse_loss(output, features) + 0.5 * output.square().mean()).backward()
    torch.testing.assert_close(observations[1].tensors[GRADIENT]["weight"], weight.grad)


def test_named_losses_with_counts_of_their_own():
    def loss(output, target):
        return {"a": output[target < 2].square().mean(), "b": output[target == 2].square().mean()}

    def count(target):
        return {"a": int((target < 2).sum()), "b": int((target == 2).sum())}

    model = nn.Linear(3, 3).double()
    part = batch()
    observations = WholeModel(model, Objective(loss, count, 2)).run([part], [TRAINING])

    weight = observations[0].tensors[PARAMETER]["weight"].requires_grad_()
    output = nn.functional.linear(part.args[0], weight, observations[0].tensors[PARAMETER]["bias"])
    sum(loss(output, part.target).values()).backward()
    torch.testing.assert_close(observations[1].tensors[GRADIENT]["weight"], weight.grad)


def test_tied_parameters_have_one_name():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    model[1].weight = model[0].weight

    whole = WholeModel(model, Objective(nn.functional.mse_loss, None, 1))

    assert whole.first_names["1.weight"] == whole.first_names["0.weight"] == "0.weight"
