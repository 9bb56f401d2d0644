"""Sharded pipelines whose ranks are threads, and the settings under which they must train as one process does."""

import torch
from torch import nn

from tests.local_pipelines import error_of, settle, values
from tests.mesh_pipelines import FLOAT, Job, difference, on_mesh, put_together, train, train_alone

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


def name_of(setting):
    return " ".join(str(value) for value in setting.values()) if isinstance(setting, dict) else None


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, foreach=True)


def compared(pipeline, data, job, schedule, *, steps=3, seed=None, alone=None, tolerance=1e-12, **options):
    """Say how some steps of AdamW on a mesh differ from those of one process, and then the gradients of one step."""
    seeded = {} if seed is None else {"seed": seed}

    def difference_of(optimizer, count):
        ranks = on_mesh(pipeline, data, lambda at: train(at, job, schedule, count, optimizer, **options, **seeded))
        expected = listed(ranks, train_alone(alone or job, count, optimizer, seed))
        return difference(ranks, expected, num_replicas=data, tolerance=tolerance)

    return difference_of(adamw, steps) + difference_of(None, 1)


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


def construction_errors(pipeline, data, make):
    """What `make(places)` raises on every rank."""
    return on_mesh(pipeline, data, lambda places: error_of(make, places))


def zero(pipeline):
    for each in pipeline.parameters():
        each.grad = None
