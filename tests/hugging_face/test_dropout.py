"""Dropout of models of several chains draws the same on any number of ranks, in any schedule."""

import copy

import pytest
import torch

import penstock as ps
from tests.hugging_face import tiny_further
from tests.support.local_pipelines import on_ranks

pytest.importorskip("transformers")

NUM_STEPS, RATE, LARGEST = 2, 0.05, 1e-12
DROPPED = {
    "t5": {"dropout_rate": 0.1},
    "bart": {"dropout": 0.1, "attention_dropout": 0.1, "activation_dropout": 0.1},
}
WAYS = (
    *((ranks, "1f1b", {}) for ranks in (2, 4)),
    *((ranks, "interleaved-1f1b", {}) for ranks in (1, 2, 4)),
    *((ranks, "1f1b", {"recompute": True}) for ranks in (1, 2)),
)
QUICK = {"t5": (2, "interleaved-1f1b", {})}
CELLS = [
    pytest.param(name, *way, marks=() if QUICK.get(name) == way else pytest.mark.slow)
    for name in DROPPED
    for way in WAYS
]


def trained(model, name, ranks, schedule, options):
    """Return the losses and gradients of all steps, by name, over all ranks."""
    batch, labels = tiny_further.batch_of(name)

    def train(transport):
        where = {"ranks": 1} if ranks == 1 else {"transport": transport}
        layers = ps.from_transformers(copy.deepcopy(model))
        pipeline = ps.Pipeline(layers, schedule, tiny_further.NUM_MICROBATCHES, seed=3, **where, **options)
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=RATE)
        found = {}
        for step in range(NUM_STEPS):
            optimizer.zero_grad()
            found[step, "loss"] = pipeline.step(**batch, target=labels).loss.detach()
            found |= {(step, key): each.grad.clone() for key, each in pipeline.named_parameters()}
            optimizer.step()
        return found

    found = {}
    for values in on_ranks(ranks, train):
        for key, value in values.items():
            assert torch.allclose(found.setdefault(key, value), value, rtol=LARGEST, atol=0)
    return found


@pytest.mark.filterwarnings("ignore:2 microbatches")
@pytest.mark.parametrize(("name", "ranks", "schedule", "options"), CELLS)
def test_losses_and_gradients_with_dropout_are_those_of_one_rank(name, ranks, schedule, options):
    model = tiny_further.model_of(name, **DROPPED[name]).double().train()
    wanted = trained(model, name, 1, "1f1b", {})

    found = trained(model, name, ranks, schedule, options)

    plain = trained(tiny_further.model_of(name).double().train(), name, 1, "1f1b", {})
    assert abs(plain[0, "loss"] - wanted[0, "loss"]) > 1e-3, "nothing was dropped"
    largest = max(value.abs().max() for value in wanted.values())
    for key, value in found.items():
        owner = key if key in wanted else (key[0], model.all_tied_weights_keys[key[1]])
        assert (value - wanted[owner]).abs().max() <= LARGEST * largest, key
