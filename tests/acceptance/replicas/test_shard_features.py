"""What a layer may do, it may do in sharded pipelines, and the numbers are those of one process."""

import copy
from functools import partial
from itertools import product

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import penstock as ps
from tests.acceptance.steps.test_skip_steps import LookingBack
from tests.acceptance.steps.test_skip_steps import layers as skipping_layers
from tests.exactness.features import LOSSES, MODELS, REFERENCES, batch, options
from tests.support.local_pipelines import WIDTH, float_layers, settle
from tests.support.mesh_pipelines import FLOAT, MICROBATCHES, Job, on_pipelines, two_steps
from tests.support.sharded_pipelines import (
    FULL,
    NONE,
    ONE,
    OPTIMIZER,
    SCHEDULES,
    TWO,
    compared,
    norm_layers,
    sequence_job,
    ways,
)

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


DRAWN = [
    (2, feature, list(LOSSES)[number % 3], SCHEDULES[number % 4], (ONE, TWO, OPTIMIZER)[number % 3])
    for number, feature in enumerate(name for name in MODELS if name not in ("plain", "compiled"))
]
EVERY = [
    (3, feature, loss, schedule, setting)
    for feature, loss in product(MODELS, LOSSES)
    for schedule in ("1f1b", "interleaved-1f1b", "zbv", "zb-h1", "dualpipe", "chimera")
    for setting in (OPTIMIZER, TWO if schedule == "dualpipe" else ONE, FULL[5])
]


@pytest.mark.timeout(600)
@ways("data feature loss schedule setting", slow=DRAWN, full=EVERY)
def test_a_feature_trains_as_in_one_process(data, feature, loss, schedule, setting):
    job = Parts(feature, loss, data)

    assert compared(2, data, job, schedule, steps=2, alone=job.plain(), **setting, **job.seed) == []


@pytest.mark.slow
def test_compiled_layers_train_as_in_one_process():
    job = Parts("compiled", "mean", 2)

    assert compared(2, 2, job, "zbv", steps=2, deadline_s=60, **ONE) == []


# ---- layers


class Wrapped(nn.Module):
    """A recurrent layer, whose weights torch keeps in a list of its own too."""

    def __init__(self, kind):
        super().__init__()
        self.inner = kind(WIDTH, WIDTH, num_layers=2, batch_first=True, dtype=FLOAT)

    def forward(self, x):
        return self.inner(x)[0]


@ways("kind setting", (nn.LSTM, ONE), slow=[(nn.GRU, OPTIMIZER)])
def test_recurrent_layers_train(kind, setting):
    job = sequence_job(lambda: [settle(Wrapped(kind), seed) for seed in range(4)], 5)

    assert compared(2, 2, job, "interleaved-1f1b", steps=2, **setting) == []


@ways("schedule setting", ("1f1b", ONE), slow=[("zbv", ONE), ("zb-h1", OPTIMIZER)])
def test_layers_in_torchs_checkpoint_wrapper_train(schedule, setting):
    job = Job([8, 8], lambda: [checkpoint_wrapper(each) for each in float_layers(FLOAT, 4)])
    plain = Job([8, 8], lambda: float_layers(FLOAT, 4))

    assert compared(2, 2, job, schedule, alone=plain, **setting) == []


@ways("setting", (ONE,), slow=[(OPTIMIZER,)])
def test_layers_that_carry_and_hand_on_values_train_in_slices(setting):
    job = sequence_job(partial(skipping_layers, LookingBack, 6), 4)

    assert compared(2, 2, job, "seq1f1b", steps=2, slices=2, **setting) == []


@ways("setting", (ONE,), slow=[(OPTIMIZER,)])
def test_activations_that_a_program_moves_to_the_host_train(setting):
    schedule = ps.build("zb-h1", ranks=2, microbatches=MICROBATCHES)
    program = ps.lower(schedule, offload=range(2), **setting)

    assert compared(2, 2, Job([8, 8]), program, **setting) == []


@ways("setting", (NONE,), (ONE,), slow=[(OPTIMIZER,)])
def test_buffers_of_the_first_replica_reach_all(setting):
    def buffers(own, inputs, target):
        two_steps(own, inputs, target)
        modules = nn.ModuleList(layer for stage in own.stages for layer in stage.layers.values())
        return {name: each.clone() for name, each in modules.named_buffers()}

    ranks = on_pipelines(Job([8, 8, 8], norm_layers), "interleaved-1f1b", buffers, **setting)

    for place in range(2):
        assert any(each.abs().sum() > 0 for each in ranks[place].values())
        for other in (ranks[2 + place], ranks[4 + place]):
            assert all(torch.equal(ranks[place][name], other[name]) for name in other)
