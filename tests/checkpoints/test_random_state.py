"""Random numbers continue where they were."""

import json
import random

import numpy as np
import torch

from penstock.checkpoints.random_state import random_state, restore_random_state

CPU = torch.device("cpu")


def draws():
    return random.random(), random.gauss(0, 1), np.random.rand(3).tolist(), np.random.randn(), torch.rand(3).tolist()


def test_all_generators_continue_after_json():
    random.seed(1), np.random.seed(2), torch.manual_seed(3)
    draws()
    state = json.loads(json.dumps(random_state(CPU)))
    expected = draws()

    random.seed(9), np.random.seed(9), torch.manual_seed(9)
    restore_random_state(state, CPU)

    assert draws() == expected
