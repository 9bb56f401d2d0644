"""Model FLOPs utilisation: what a token takes, and what devices can do."""

import pytest
import torch

from penstock.train.watching.utilization import Utilization, flops_per_token, utilization_of
from tests.train.settings.tables import config_with, merged

MODEL = {"width": 64, "layers": 3, "heads": 4, "key_value_heads": 2, "hidden": 96}
CUDA = torch.device("cuda", 0)


def config_of(**sections):
    return config_with(**merged({"model": MODEL, "batch": {"length": 32}}, sections))


@pytest.fixture
def gpu(monkeypatch):
    names = ["NVIDIA H200"]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: names[0])
    return names


@pytest.mark.feature("X4")
def test_a_token_takes_six_flops_per_weight_and_the_attention():
    """Queries and output are of full width, keys and values of half of it; the feed-forward part has three matrices."""
    weights = 3 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 96) + 64 * 1000
    attention = 3 * 12 * 32 * 64

    assert flops_per_token(config_of(), vocabulary=1000) == 6 * weights + attention


def test_the_share_is_of_all_devices_together(gpu):
    one = utilization_of(config_of(pipeline={"ranks": 1}, precision={"compute": "bfloat16"}), 1000, CUDA)
    four = utilization_of(config_of(pipeline={"ranks": 4}, precision={"compute": "bfloat16"}), 1000, CUDA)

    assert one.flops_per_s == 989.4e12
    assert four == Utilization(one.flops_per_token, 4 * one.flops_per_s)
    assert one.share(1e6) == pytest.approx(1e6 * one.flops_per_token / 989.4e12)


@pytest.mark.parametrize(
    ("sections", "matmul", "flops_per_s"),
    [
        ({"precision": {"compute": "float16"}}, "highest", 989.4e12),
        ({"model": {"dtype": "bfloat16"}}, "highest", 989.4e12),
        ({}, "highest", 66.9e12),
        ({}, "high", 494.7e12),
    ],
)
def test_the_peak_is_that_of_the_type(gpu, monkeypatch, sections, matmul, flops_per_s):
    monkeypatch.setattr(torch, "get_float32_matmul_precision", lambda: matmul)

    assert utilization_of(config_of(pipeline={"ranks": 1}, **sections), 1000, CUDA).flops_per_s == flops_per_s


def test_where_the_peak_is_not_known_there_is_none(gpu):
    assert utilization_of(config_of(), 1000, torch.device("cpu")) is None
    assert utilization_of(config_of(model={"dtype": "float64"}), 1000, CUDA) is None
    gpu[0] = "NVIDIA GeForce GTX 970"
    assert utilization_of(config_of(), 1000, CUDA) is None
