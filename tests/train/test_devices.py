"""Where ranks compute, on machines that are made up."""

import resource

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError
from penstock.train import devices
from penstock.train.devices import Machine, choose_device, device_of_rank, look, peak_bytes
from tests.train.settings.tables import config_with


@pytest.mark.parametrize(
    ("wanted", "ranks", "machine", "expected"),
    [
        ("auto", 4, Machine("cuda", 0, has_backend=True), "cpu"),
        ("auto", 1, Machine("cuda", 8, has_backend=True), "cuda"),
        ("auto", 4, Machine("cuda", 4, has_backend=True), "cuda"),
        ("cpu", 2, Machine("cuda", 1, has_backend=True), "cpu"),
        ("auto", 1, Machine("cuda", 2, has_backend=False), "cuda"),
        ("auto", 2, Machine("xpu", 2, has_backend=True), "xpu"),
        ("xpu", 1, Machine("xpu", 2, has_backend=False), "xpu"),
    ],
)
def test_ranks_take_gpus_of_any_kind_where_there_are_enough_or_none(wanted, ranks, machine, expected):
    assert choose_device(wanted, ranks, machine) == expected


@pytest.mark.parametrize(
    ("wanted", "ranks", "machine", "told"),
    [
        (
            "auto",
            2,
            Machine("cuda", 2, has_backend=False),
            "no backend such as NCCL, by which 2 GPUs",
        ),
        (
            "cuda",
            1,
            Machine(None, 0, has_backend=True),
            "computes on CPUs alone, .*'cuda'; expected 'auto' or 'cpu'$",
        ),
        (
            "cdua",
            1,
            Machine("cuda", 4, has_backend=True),
            "is built for 'cuda', .* 'cdua'; .* 'cpu' or 'cuda'$",
        ),
        (
            "cuda",
            1,
            Machine("xpu", 4, has_backend=True),
            "is built for 'xpu', .* 'cuda'; .* 'cpu' or 'xpu'$",
        ),
    ],
)
def test_a_kind_or_a_backend_that_this_torch_lacks_is_an_error_with_those_that_it_has(wanted, ranks, machine, told):
    with pytest.raises(ConfigError, match=f"^run.device: this torch (has )?{told}"):
        choose_device(wanted, ranks, machine)


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


def run_of(device="auto", compute="model"):
    return config_with(run={"device": device}, pipeline={"ranks": 1}, precision={"compute": compute})


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
