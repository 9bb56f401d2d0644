"""Frozen tensors that a layer makes again are in no checkpoint, and a model that makes others is refused."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.checkpoints.manifest import read_manifest
from penstock.errors import CheckpointError
from tests.support.local_pipelines import error_of, on_ranks
from tests.support.mesh_pipelines import on_mesh

WIDTH = 4


class Adapted(nn.Module):
    """A frozen weight, which the layer makes again, and one that is trained."""

    rebuilt_names = frozenset({"base"})

    def __init__(self, value, *, is_frozen=True):
        super().__init__()
        self.base = nn.Parameter(torch.full((WIDTH, WIDTH), value), requires_grad=not is_frozen)
        self.change = nn.Parameter(torch.zeros(WIDTH, WIDTH))

    def forward(self, x):
        return x @ (self.base + self.change)


def trained(folder, where, *, values=(0.1, 0.2), is_frozen=True, num_steps=1, load=False, **options):
    """Train two layers from a checkpoint or from the begin, and save them; return the losses."""
    layers = [Adapted(value, is_frozen=is_frozen) for value in values]
    with ps.Pipeline(layers, "1f1b", 2, nn.functional.mse_loss, **where, **options) as pipeline:
        optimizer = torch.optim.AdamW([each for each in pipeline.parameters() if each.requires_grad], lr=0.1)
        if load:
            ps.load_checkpoint(folder, pipeline, optimizer)
        losses = []
        for _ in range(num_steps):
            optimizer.zero_grad()
            losses.append(pipeline.step(torch.ones(8, WIDTH), target=torch.zeros(8, WIDTH)).loss.item())
            optimizer.step()
        if not load:
            ps.save_checkpoint(folder, pipeline, optimizer, step=num_steps)
        return losses + [
            pipeline.step(torch.ones(8, WIDTH), target=torch.zeros(8, WIDTH)).loss.item() for _ in range(not load)
        ]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.feature("X62")
def test_a_checkpoint_has_what_is_trained_alone_and_goes_on_from_it(tmp_path, ranks):
    (*_, wanted), *_ = on_ranks(2, lambda transport: trained(tmp_path, {"transport": transport}))

    manifest = read_manifest(tmp_path / "step-1")
    assert manifest.weights.keys() == {"0.change", "1.change"}
    assert manifest.rebuilt.keys() == {"0.base", "1.base"}

    def again(transport):
        return trained(tmp_path, {"transport": transport} if ranks > 1 else {"ranks": 1}, load=True)

    assert on_ranks(ranks, again)[0] == [pytest.approx(wanted)]


@pytest.mark.parametrize("shard", ["none", "full"])
def test_replicas_and_shards_have_the_same_sums(tmp_path, shard):
    on_ranks(2, lambda transport: trained(tmp_path / "two", {"transport": transport}))
    on_mesh(2, 2, lambda places: trained(tmp_path / "four", {"mesh": places}, shard=shard))

    assert read_manifest(tmp_path / "four" / "step-1").rebuilt == read_manifest(tmp_path / "two" / "step-1").rebuilt
    on_mesh(2, 2, lambda places: trained(tmp_path / "two", {"mesh": places}, shard=shard, load=True))


@pytest.mark.parametrize(
    ("saved", "loaded", "told"),
    [
        ({}, {"values": (0.1, 0.3)}, "'1.base' is frozen and not in it, and has other values"),
        ({}, {"is_frozen": False}, "'0.base' was frozen and is not in it, but the model trains it"),
        ({"is_frozen": False}, {}, "'0.base' is frozen in the model, but was not when it was saved"),
    ],
)
def test_a_model_that_was_built_of_others_is_refused_on_all_ranks(tmp_path, saved, loaded, told):
    on_ranks(2, lambda transport: trained(tmp_path, {"transport": transport}, **saved))

    for error in on_ranks(
        2, lambda transport: error_of(trained, tmp_path, {"transport": transport}, **loaded, load=True)
    ):
        assert type(error) is CheckpointError
        assert told in str(error)
