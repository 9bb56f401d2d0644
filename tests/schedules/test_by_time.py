"""Orders by time: ranks sort their actions, whatever the shape of the tables."""

import numpy as np

from penstock.schedules.by_time import orders_by_time

STAGE = np.array([[[0], [3]], [[1], [2]]])
MICROBATCH = np.arange(2)
FORWARD = np.array([[[0, 1], [3, 6]], [[1, 3], [2, 4]]])


def texts(orders):
    return [" ".join(f"{stage}{'FBIW'[kind]}{microbatch}" for kind, stage, microbatch in rows) for rows in orders]


def test_every_rank_runs_its_actions_by_ascending_time():
    backward = np.array([[[9, 10], [5, 7]], [[8, 9], [6, 7]]])

    assert texts(orders_by_time(STAGE, MICROBATCH, FORWARD, backward)) == [
        "0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1",
        "1F0 2F0 1F1 2F1 2B0 2B1 1B0 1B1",
    ]
