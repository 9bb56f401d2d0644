"""What a layer, a loss or a batch may do, it may do in sharded pipelines, and the numbers are those of one process."""

import copy
from functools import partial

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import penstock as ps
from tests.exactness.features import LOSSES, MODELS, REFERENCES, batch, options
from tests.local_pipelines import (
    LENGTH,
    VOCABULARY,
    WIDTH,
    block,
    count_tokens,
    float_layers,
    settle,
    token_layers,
    token_loss,
    values,
)
from tests.mesh_pipelines import FLOAT, MICROBATCHES, Job, difference, on_mesh, pipeline_of, train, train_alone
from tests.sharded_pipelines import ALL, FULL, ONE, OPTIMIZER, TWO, compared, name_of
from tests.test_replicas import Balance, Branches, norm_layers, token_targets, tokens
from tests.test_skip_steps import LookingBack
from tests.test_skip_steps import layers as skipping_layers

# ---- the features of the exactness product


class Parts(Job):
    """A job whose replicas have the batches of a feature."""

    def __init__(self, feature, loss, data):
        self.feature = feature
        self.pairs = [batch(feature, loss, MICROBATCHES, 50 + replica) for replica in range(data)]
        known = options(feature, loss)
        seed = known.pop("seed", None)
        self.seed = {} if seed is None else {"seed": seed}
        more = {"compile": "aot_eager"} if feature == "compiled" else {}
        super().__init__(
            [0] * data, partial(MODELS[feature], 8), loss=LOSSES[loss][0], options=known | more, known=known
        )

    def of(self, replica):
        return self.pairs[replica]

    def microbatches(self):
        if not isinstance(self.pairs[0][0], ps.PreSplit):
            return super().microbatches()
        columns = zip(*self.pairs, strict=True)
        return tuple(ps.PreSplit([part for each in column for part in each.parts]) for column in columns)

    def plain(self):
        """The job of one process, where nobody asks layers for gradients that they have left for later."""
        alone = copy.copy(self)
        alone.make_layers = partial(REFERENCES.get(self.feature, MODELS[self.feature]), 8)
        return alone


IN_FEW = [name for name in MODELS if name not in ("plain", "compiled")]
DRAWN = [
    (
        feature,
        list(LOSSES)[number % 3],
        ("1f1b", "zbv", "interleaved-1f1b", "zb-h1")[number % 4],
        (ONE, TWO, OPTIMIZER)[number % 3],
    )
    for number, feature in enumerate(IN_FEW)
]


@pytest.mark.slow
@pytest.mark.parametrize(("feature", "loss", "schedule", "setting"), DRAWN, ids=name_of)
def test_a_feature_trains_as_in_one_process(feature, loss, schedule, setting):
    job = Parts(feature, loss, 2)

    assert compared(2, 2, job, schedule, steps=2, alone=job.plain(), **setting, **job.seed) == []


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv", "zb-h1", "dualpipe", "chimera"])
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("feature", MODELS)
def test_every_feature_trains_as_in_one_process(feature, loss, schedule):
    job = Parts(feature, loss, 3)
    found = {
        name_of(setting): compared(2, 3, job, schedule, steps=2, alone=job.plain(), **setting, **job.seed)
        for setting in (OPTIMIZER, TWO if schedule == "dualpipe" else ONE, FULL[5])
    }

    assert {name: wrong for name, wrong in found.items() if wrong} == {}


@pytest.mark.slow
def test_compiled_layers_train_as_in_one_process():
    job = Parts("compiled", "mean", 2)

    assert compared(2, 2, job, "zbv", steps=2, deadline_s=60, **ONE) == []


@pytest.mark.parametrize("setting", [ONE, ALL], ids=name_of)
@pytest.mark.parametrize("schedule", ["dualpipe", "chimera", "dualpipe-v"])
def test_two_routes_and_folded_ones_train_as_in_one_process(schedule, setting):
    setting = TWO if "dualpipe" in schedule and setting is ONE else setting  # it has pairs of two stages

    assert compared(2, 2, Job([8, 8]), schedule, **setting) == []


# ---- layers


class Wrapped(nn.Module):
    """A recurrent layer, whose weights torch keeps in a list of its own too."""

    def __init__(self, kind):
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, dtype=FLOAT)

    def forward(self, x):
        return self.inner(x)[0]


@pytest.mark.parametrize("setting", [ONE, OPTIMIZER], ids=name_of)
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_recurrent_layers_train(kind, setting):
    job = Job([8, 8], lambda: [settle(Wrapped(kind), seed) for seed in range(4)])
    job.inputs, job.targets = (lambda rows, seed=seed: values(seed, rows, 5, WIDTH, dtype=FLOAT) for seed in (1, 2))

    assert compared(2, 2, job, "interleaved-1f1b", steps=2, **setting) == []


@pytest.mark.parametrize(("schedule", "setting"), [("1f1b", ONE), ("zbv", ONE), ("zb-h1", OPTIMIZER)], ids=name_of)
def test_layers_in_torchs_checkpoint_wrapper_train(schedule, setting):
    job = Job([8, 8], lambda: [checkpoint_wrapper(each) for each in float_layers(FLOAT, 4)])
    plain = Job([8, 8], lambda: float_layers(FLOAT, 4))

    assert compared(2, 2, job, schedule, alone=plain, **setting) == []


def token_job(data, **more):
    return Job([8] * data, lambda: token_layers(FLOAT), tokens, lambda rows: tokens(rows + 1)[1:], token_loss, **more)


@pytest.mark.parametrize("setting", [ONE, OPTIMIZER], ids=name_of)
def test_recomputation_and_slices_train(setting):
    assert compared(2, 2, token_job(2), "1f1b", steps=2, recompute=True, **setting) == []
    assert compared(2, 2, token_job(2), "zb-h1", steps=2, recompute=True, **setting) == []
    assert compared(2, 2, token_job(2), "seq1f1b", steps=2, slices=LENGTH, **setting) == []


@pytest.mark.parametrize("setting", [ONE, OPTIMIZER], ids=name_of)
def test_layers_that_carry_and_hand_on_values_train_in_slices(setting):
    job = Job([8, 8], partial(skipping_layers, LookingBack, 6))
    job.inputs, job.targets = (lambda rows, seed=seed: values(seed, rows, 4, WIDTH, dtype=FLOAT) for seed in (1, 2))

    assert compared(2, 2, job, "seq1f1b", steps=2, slices=2, **setting) == []


@pytest.mark.parametrize("setting", [ONE, OPTIMIZER], ids=name_of)
def test_activations_that_a_program_moves_to_the_host_train(setting):
    schedule = ps.build("zb-h1", ranks=2, microbatches=MICROBATCHES)
    program = ps.lower(schedule, offload=range(2), **setting)

    assert compared(2, 2, Job([8, 8]), program, **setting) == []


def test_losses_that_layers_add_are_weighted_by_the_rows_of_the_job():
    known = {"allow_ragged": True}
    job = Job([8, 5], lambda: [Balance(), *float_layers(FLOAT, 3)], options=known, known=known)

    assert compared(2, 2, job, "1f1b", **ONE) == []


def test_sparse_gradients_become_dense_ones_of_the_same_values():
    def layers(sparse):
        return [settle(nn.Embedding(VOCABULARY, WIDTH, sparse=sparse, dtype=FLOAT), 100), *token_layers(FLOAT)[1:]]

    job, dense = token_job(2), token_job(2)
    job.make_layers, dense.make_layers = partial(layers, True), partial(layers, False)

    assert compared(2, 2, job, "1f1b", alone=dense, **ONE) == []


@pytest.mark.parametrize("setting", [ONE, OPTIMIZER], ids=name_of)
def test_a_parameter_that_one_replica_used_has_a_gradient_and_an_unused_one_none(setting):
    rows = values(1, 16, WIDTH, dtype=FLOAT)
    rows[:, 0] = rows[:, 0].abs()
    rows[:8, 0] *= -1
    job = Job([8, 8], lambda: [Branches(), *float_layers(FLOAT, 3)], inputs=lambda _: rows)
    ranks, alone = on_mesh(2, 2, lambda at: train(at, job, "1f1b", **setting)), train_alone(job)

    assert difference(ranks, alone, num_replicas=2) == []
    assert ranks[2].gradients["0.products.0.weight"] is not None
    assert ranks[2].gradients["0.products.2.weight"] is None


@pytest.mark.parametrize("setting", [ONE, OPTIMIZER], ids=name_of)
def test_buffers_of_the_first_replica_reach_all(setting):
    job = Job([8, 8, 8], norm_layers)

    def case(places):
        with pipeline_of(places, job, "interleaved-1f1b", **setting) as own:
            inputs, target = job.of(own.replica)
            own.step(inputs, target=target)
            own.step(inputs, target=target)
            modules = nn.ModuleList(layer for stage in own.stages for layer in stage.layers.values())
            return {name: each.clone() for name, each in modules.named_buffers()}

    ranks = on_mesh(2, 3, case)

    for place in range(2):
        assert any(each.abs().sum() > 0 for each in ranks[place].values())
        for other in (ranks[2 + place], ranks[4 + place]):
            assert all(torch.equal(ranks[place][name], other[name]) for name in other)


# ---- losses and batches


@pytest.mark.parametrize("setting", [ONE, OPTIMIZER], ids=name_of)
def test_sums_counts_and_uneven_rows_weigh_as_in_one_process(setting):
    summed = {"reduction": "sum"}
    job = Job([8, 12, 4], loss=nn.MSELoss(reduction="sum"), options=summed, known=summed)
    assert compared(1, 3, job, "1f1b", **setting) == []

    ragged = {"allow_ragged": True}
    assert compared(2, 3, Job([9, 5, 14], options=ragged, known=ragged), "zbv", **setting) == []

    counted = {"count": count_tokens, "allow_ragged": True}
    job = Job([5, 9], lambda: token_layers(FLOAT), tokens, token_targets, token_loss, counted, counted)
    assert compared(2, 2, job, "1f1b", **setting) == []


def test_dropout_with_a_seed_draws_as_one_process_with_the_microbatches_of_all():
    job = Job([8, 8], lambda: [nn.Sequential(block(seed, FLOAT), nn.Dropout(0.5)) for seed in range(4)])

    assert compared(2, 2, job, "zbv", seed=7, **ONE) == []
