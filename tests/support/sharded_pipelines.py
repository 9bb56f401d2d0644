"""Sharded pipelines whose ranks are threads, and the settings under which they must train as one process does."""

import pytest
import torch
from torch import nn

from tests.support.local_pipelines import (
    IGNORED,
    LENGTH,
    VOCABULARY,
    WIDTH,
    block,
    float_layers,
    settle,
    token_layers,
    token_loss,
    values,
)
from tests.support.mesh_pipelines import FLOAT, Job, difference, on_mesh, put_together, train, train_alone

SCHEDULES = ("1f1b", "interleaved-1f1b", "zbv", "zb-h1")
NONE, OPTIMIZER = {"shard": "none"}, {"shard": "optimizer"}
FULL = [
    {"shard": "full", "residency": residency, "look_ahead": look_ahead}
    for residency in (1, 2, None)
    for look_ahead in (0, 1, 2)
]
SETTINGS = [NONE, OPTIMIZER, *FULL]
SHARDED = SETTINGS[1:]
ONE, TWO, ALL = FULL[0], FULL[4], FULL[7]
"""Residency 1, 2, None with look_ahead 0, 1, 1."""
IN_PLACE = "in place"
"""Replicas that sum all gradients in place; those of tests are small, and else all are packed."""


def settings(*which):
    """Run a test under each of these; the fixture `setting` gives it the options of the pipeline."""
    return pytest.mark.parametrize("setting", which, indirect=True, ids=name_of)


def ways(names, *quick, slow=(), full=()):
    """Run a test with each tuple of values of these parameters; slow ones in `make test-all` and full ones apart."""
    tiers = ((quick, ()), (slow, pytest.mark.slow), (full, pytest.mark.full))
    cases = [pytest.param(*case, marks=marks) for tier, marks in tiers for case in tier]
    indirect = ["setting"] if "setting" in names else False
    return pytest.mark.parametrize(names.split(), cases, ids=name_of, indirect=indirect)


def name_of(setting):
    return " ".join(str(value) for value in setting.values()) if isinstance(setting, dict) else None


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, foreach=True)


def compared(pipeline, data, job, schedule, *, steps=3, seed=None, alone=None, tolerance=1e-12, **options):
    """Say how some steps of AdamW on a mesh differ from those of one process, the gradients of the last one too."""
    if seed is not None:
        options |= {"seed": seed}

    def optimizer(parameters):
        """AdamW that lets the gradients of the last step stay."""
        made, zero_grads = adamw(parameters), iter(range(1, steps))
        zero_grad = made.zero_grad
        made.zero_grad = lambda: next(zero_grads, None) and zero_grad()
        return made

    ranks = on_mesh(pipeline, data, lambda at: train(at, job, schedule, steps, optimizer, **options))
    expected = listed(ranks, train_alone(alone or job, steps, optimizer, seed))
    return difference(ranks, expected, num_replicas=data, tolerance=tolerance)


def listed(ranks, alone):
    """What one process came to, a tied parameter under each of the names that ranks have for it."""
    names = {name for own in ranks for name in own.weights}
    for values_of in (alone.weights, alone.gradients):
        for name in list(values_of):
            values_of |= {other: values_of[name] for other in names - values_of.keys() if tied_to(other) == name}
            if name not in names:
                del values_of[name]
    return alone


def tied_to(name):
    """Tests tie the last layer's weight to the first one's, which comes first in one process."""
    return "0." + name.partition(".")[2]


def whole_gradients(pipeline, data, job, schedule, **options):
    """The gradients of one step from none, of all ranks of the first replica, as whole tensors."""
    ranks = put_together(on_mesh(pipeline, data, lambda at: train(at, job, schedule, 1, None, **options)), data)
    return {name: value for own in ranks[:pipeline] for name, value in own.gradients.items()}


def wide_layers(num_layers=4):
    """Products so large that weight gradients are left for W."""
    return [settle(nn.Sequential(nn.Linear(256, 256, dtype=FLOAT), nn.Tanh()), seed) for seed in range(num_layers)]


def wide_values(seed):
    return lambda rows: values(seed, rows, 256, dtype=FLOAT)


def wide_job(data, rows=256, num_layers=4):
    return Job([rows] * data, lambda: wide_layers(num_layers), wide_values(1), wide_values(2))


def tokens(rows):
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(3))


def token_targets(rows):
    """Targets some of which do not count, most of them in the first rows."""
    target = tokens(rows + 1)[1:]
    target[::2, 1:] = IGNORED
    target[: rows // 3] = IGNORED
    return target


def token_job(rows=(8, 8), targets=lambda rows: tokens(rows + 1)[1:], **known):
    return Job(list(rows), lambda: token_layers(FLOAT), tokens, targets, token_loss, known, known)


def sequence_job(make_layers, length):
    """A job of two replicas whose rows are sequences."""
    batches = (lambda rows, seed=seed: values(seed, rows, length, WIDTH, dtype=FLOAT) for seed in (1, 2))
    return Job([8, 8], make_layers, *batches)


def tied_layers():
    """The weight of the first layer is that of the last one."""
    layers = float_layers(FLOAT, 8)
    layers[7][1].weight = layers[0][1].weight
    return layers


def norm_layers():
    return [nn.Sequential(block(seed, FLOAT), nn.BatchNorm1d(WIDTH, dtype=FLOAT)) for seed in range(4)]
