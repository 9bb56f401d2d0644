"""Where ranks compute, on machines that are made up."""

import pytest
import torch

from penstock.errors import ConfigError
from penstock.train.devices import Machine, choose_device, describe_devices, has_bfloat16, look, require_precision


@pytest.mark.parametrize(
    ("wanted", "ranks", "gpus", "expected"),
    [
        ("auto", 1, 0, "cpu"),
        ("auto", 4, 0, "cpu"),
        ("auto", 1, 1, "cuda"),
        ("auto", 1, 8, "cuda"),
        ("auto", 4, 4, "cuda"),
        ("cuda", 2, 4, "cuda"),
        ("cpu", 2, 4, "cpu"),
        ("cpu", 2, 1, "cpu"),
    ],
)
def test_ranks_take_gpus_where_there_are_enough_or_none(wanted, ranks, gpus, expected):
    assert choose_device(wanted, ranks, Machine(gpus, has_nccl=True)) == expected


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
        choose_device(wanted, ranks, Machine(gpus, has_nccl=True))

    assert caught.value.key == "run.device"
    assert all(word in str(caught.value) for word in words)
    assert ("pipeline.ranks" in str(caught.value)) is (gpus > 0)


def test_several_gpus_need_nccl_and_one_does_not():
    assert choose_device("auto", 1, Machine(2, has_nccl=False)) == "cuda"
    with pytest.raises(ConfigError, match="this torch has no NCCL"):
        choose_device("auto", 2, Machine(2, has_nccl=False))


@pytest.mark.parametrize(("compute", "kind"), [("bfloat16", "cpu"), ("float16", "cuda"), ("model", "cuda")])
def test_other_types_and_devices_need_no_bfloat16(compute, kind):
    require_precision(compute, kind, has_bfloat16=False)


def test_a_gpu_without_bfloat16_is_refused_for_it():
    require_precision("bfloat16", "cuda", has_bfloat16=True)
    with pytest.raises(ConfigError, match="does not compute in bfloat16; use 'float16'") as caught:
        require_precision("bfloat16", "cuda", has_bfloat16=False)

    assert caught.value.key == "precision.compute"


def test_this_machine_can_be_looked_at():
    assert look().num_gpus == torch.cuda.device_count()
    assert has_bfloat16(torch.device("cpu"))


def test_a_line_says_where_a_run_computes():
    cpu = torch.device("cpu")

    assert describe_devices(cpu, 1, "float32") == "1 rank on CPU; precision float32"
    assert describe_devices(cpu, 2, "bfloat16") == "2 ranks on CPU, messages by gloo; precision bfloat16"
