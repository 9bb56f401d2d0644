"""Where ranks compute, on machines that are made up."""

import resource

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError
from penstock.train import devices
from penstock.train.devices import Machine, choose_device, device_of_rank, look, peak_bytes
from penstock.train.settings.config import config_from_table


@pytest.mark.parametrize(
    ("wanted", "ranks", "gpus", "expected"),
    [
        ("auto", 4, 0, "cpu"),
        ("auto", 1, 8, "cuda"),
        ("auto", 4, 4, "cuda"),
        ("cpu", 2, 1, "cpu"),
    ],
)
def test_ranks_take_gpus_where_there_are_enough_or_none(wanted, ranks, gpus, expected):
    assert choose_device(wanted, ranks, Machine("cuda", gpus, has_backend=True)) == expected


@pytest.mark.parametrize(
    ("wanted", "ranks", "gpus", "words"),
    [
        ("auto", 2, 1, ["2 ranks on a machine with 1 GPU", "pipeline.ranks=1", "run.device='cpu'"]),
        ("cuda", 8, 4, ["8 ranks on a machine with 4 GPUs", "pipeline.ranks=4", "run.device='cpu'"]),
        ("cuda", 1, 0, ["1 rank on a machine with no GPU", "run.device='cpu'"]),
    ],
)
def test_too_few_gpus_are_an_error_with_the_choices(wanted, ranks, gpus, words):
    with pytest.raises(ConfigError) as caught:
        choose_device(wanted, ranks, Machine("cuda", gpus, has_backend=True))

    assert caught.value.key == "run.device"
    assert all(word in str(caught.value) for word in words)
    assert ("pipeline.ranks" in str(caught.value)) is (gpus > 0)


def test_several_gpus_need_nccl_and_one_does_not():
    machine = Machine("cuda", 2, has_backend=False)
    assert choose_device("auto", 1, machine) == "cuda"
    with pytest.raises(ConfigError, match="this torch has no backend such as NCCL, by which 2 GPUs exchange messages"):
        choose_device("auto", 2, machine)


@pytest.mark.parametrize(
    ("kind", "wanted", "text"),
    [
        (None, "cuda", "this torch computes on CPUs alone, and has no device 'cuda'; expected 'auto' or 'cpu'"),
        (
            "cuda",
            "cdua",
            "this torch is built for 'cuda', and has no device 'cdua'; expected 'auto' or 'cpu' or 'cuda'",
        ),
        ("xpu", "cuda", "this torch is built for 'xpu', and has no device 'cuda'; expected 'auto' or 'cpu' or 'xpu'"),
    ],
)
def test_a_kind_that_this_torch_lacks_is_an_error_with_those_that_it_has(kind, wanted, text):
    with pytest.raises(ConfigError) as caught:
        choose_device(wanted, 1, Machine(kind, 4 if kind else 0, has_backend=True))

    assert str(caught.value) == f"run.device: {text}"


def test_another_kind_than_cuda_is_taken_as_well():
    assert choose_device("auto", 2, Machine("xpu", 2, has_backend=True)) == "xpu"
    assert choose_device("xpu", 1, Machine("xpu", 2, has_backend=False)) == "xpu"


def run_of(ranks=1, device="auto", compute="model"):
    return config_from_table(
        {
            "run": {"folder": "runs/x", "device": device},
            "pipeline": {"ranks": ranks},
            "data": {"corpus": "stdlib"},
            "precision": {"compute": compute},
        }
    )


@pytest.fixture
def one_gpu(monkeypatch):
    """A machine with a GPU that computes in float16 and float32."""
    monkeypatch.setattr(devices, "look", lambda: Machine("cuda", 1, has_backend=True))
    monkeypatch.setattr(devices, "has_bfloat16", lambda device: device.type == "cpu")


@pytest.mark.parametrize(("device", "expected"), [("auto", "cuda:0"), ("cuda", "cuda:0"), ("cpu", "cpu")])
def test_a_rank_that_is_alone_takes_the_gpu(one_gpu, device, expected):
    assert str(device_of_rank(run_of(device=device))) == expected


def test_a_gpu_without_bfloat16_is_refused_for_it_and_a_cpu_is_not(one_gpu):
    with pytest.raises(ConfigError, match="does not compute in bfloat16; use 'float16'") as caught:
        device_of_rank(run_of(compute="bfloat16"))

    assert caught.value.key == "precision.compute"
    assert str(device_of_rank(run_of(compute="float16"))) == "cuda:0"
    assert str(device_of_rank(run_of(compute="bfloat16", device="cpu"))) == "cpu"


def test_this_machine_can_be_looked_at():
    machine = look()

    assert machine.num_gpus == torch.accelerator.device_count()
    assert machine.kind is not None or not machine.has_backend


def test_on_a_cpu_it_is_what_the_process_had_in_memory_at_most():
    before = peak_bytes(torch.device("cpu"))
    held = np.ones(16 * 2**20 + max(before - current_bytes(), 0) // 8)  # beyond any earlier peak
    grown = peak_bytes(torch.device("cpu"))
    del held

    assert grown >= before + 100 * 2**20
    assert peak_bytes(torch.device("cpu")) >= grown


def current_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


def peak_is_what_tensors_took(device):
    before = peak_bytes(device)
    held = torch.zeros(before + 2**20, dtype=torch.uint8, device=device)

    assert peak_bytes(device) >= held.nbytes


def test_on_a_device_it_is_what_tensors_took(on_device):
    on_device(peak_is_what_tensors_took)
