"""Random numbers continue where they were."""

import json
import random

import numpy as np
import pytest
import torch

from penstock.checkpoints.random_state import random_state, random_state_restorer
from penstock.errors import CheckpointError

CPU = torch.device("cpu")


def draws():
    return random.random(), random.gauss(0, 1), np.random.rand(3).tolist(), np.random.randn(), torch.rand(3).tolist()


def test_all_generators_continue_after_json():
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    draws()
    state = json.loads(json.dumps(random_state(CPU)))
    expected = draws()

    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    random_state_restorer(state, CPU)()

    assert draws() == expected


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("python", None),
        ("python", [3, [1, 2], None]),
        ("python", [3, ["a"] * 625, None]),
        ("numpy", ["MT19937", [1] * 624, 10**9, 0, 0.0]),
        ("numpy", ["MT19937", [1] * 624, -1, 0, 0.0]),
        ("numpy", ["MT19937", [-1] * 3, 0, 0, 0.0]),
        ("numpy", ["PCG64", [1] * 624, 1, 0, 0.0]),
        ("torch", ""),
        ("torch", "AAAA"),
        ("torch", 7),
    ],
)
def test_what_is_no_state_is_refused_and_nothing_changed(key, value):
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    state = random_state(CPU)

    with pytest.raises(CheckpointError, match="`random` is not what generators of random numbers hold: "):
        random_state_restorer(state | {key: value}, CPU)

    assert random_state(CPU) == state


@pytest.mark.parametrize("key", ["python", "numpy", "torch"])
def test_a_state_that_is_missing_is_refused(key):
    state = random_state(CPU)
    del state[key]

    with pytest.raises(CheckpointError, match=key):
        random_state_restorer(state, CPU)
