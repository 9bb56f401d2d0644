"""What is asked of a device, on a process that has none but the CPU, and on accelerators that are made up."""

import logging

import pytest
import torch

from penstock.errors import ConfigError
from penstock.execute import accelerator
from penstock.execute.accelerator import (
    AllocatorBytes,
    accelerator_type,
    allocator_bytes,
    current_device,
    default_generator,
    has_bfloat16,
    has_events,
    is_queued,
    make_event,
    make_stream,
    memory_snapshot,
    name_of,
    num_accelerators,
    queued_backend,
    require_available,
    reset_peak,
    synchronize,
)

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


@pytest.fixture
def two_gpus(monkeypatch):
    """A process that is built for cuda, and sees two devices, the second of which is the current one."""
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 1)


def test_all_devices_but_the_cpu_queue_their_work():
    kinds = ["cpu", "meta", "cuda", "xpu", "mps", "hpu", "privateuseone"]

    assert [kind for kind in kinds if is_queued(torch.device(kind))] == kinds[2:]
    backends = [queued_backend(kind) for kind in ("cuda", "xpu", "mps", "cpu", "privateuseone")]
    assert backends == ["nccl", "xccl", None, None, None]  # gloo queues no messages on a device


def test_the_cpu_is_always_there_and_another_device_only_where_torch_is_built_for_it():
    assert require_available(CPU, "device") == CPU
    with pytest.raises(ConfigError) as caught:
        require_available(torch.device("xpu"), "device")

    built_for = "computes on CPUs alone" if accelerator_type() is None else f"is built for {accelerator_type()!r}"
    assert str(caught.value).startswith(f"device: there is no device 'xpu': this torch {built_for}. Choose 'cpu'")


def test_a_device_beyond_those_of_this_process_is_refused_with_the_choices(two_gpus, monkeypatch):
    assert (accelerator_type(), num_accelerators(), current_device()) == ("cuda", 2, torch.device("cuda", 1))
    assert require_available(torch.device("cuda", 1), "device") == torch.device("cuda", 1)
    assert require_available(torch.device("cuda"), "device") == torch.device("cuda")
    with pytest.raises(ConfigError) as caught:
        require_available(torch.device("cuda", 2), "device")

    expected = "this process sees 2 of this kind. Choose 'cpu' or 'cuda:0' or 'cuda:1'"
    assert str(caught.value) == f"device: there is no device 'cuda:2': {expected}"
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 0)
    with pytest.raises(ConfigError, match=r"'cuda': this process sees none of this kind\. Choose 'cpu'$"):
        require_available(torch.device("cuda"), "device")
    assert current_device() is None


@pytest.mark.skipif(accelerator_type() is not None, reason="this torch makes events of a GPU")
def test_a_torch_for_cpus_alone_has_no_events():
    assert not has_events(GPU)
    with pytest.raises(RuntimeError):
        make_event(GPU)


def lacks(device):
    raise RuntimeError("not on this device")


LACKING = {
    "streams beside the current one: not on this device": ((torch, "Stream", lacks), make_stream),
    "bytes of its allocator: not on this device": (
        (torch.accelerator, "memory_allocated", lacks),
        lambda device: reset_peak(device) or allocator_bytes(device),
    ),
    "generators of random numbers: seeds and checkpoints leave them out": (
        (torch, "get_device_module", lambda device: object()),
        default_generator,
    ),
}
"""By the end of the note, the part of torch that devices of kind mps lack, and ours that then returns None."""


@pytest.mark.parametrize("what", LACKING)
def test_what_a_device_lacks_is_noted_once_and_left_out(two_gpus, monkeypatch, caplog, what):
    lacking, ask = LACKING[what]
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)
    monkeypatch.setattr(*lacking)
    accelerator._say_once.cache_clear()

    with caplog.at_level(logging.WARNING, "penstock"):
        assert [ask(torch.device("mps")) for _ in range(2)] == [None, None]

    assert [record.getMessage() for record in caplog.records] == [f"devices of kind 'mps' have no {what}"]


def test_a_device_has_the_name_the_types_and_the_blocks_that_its_module_says_and_else_what_most_have(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"NVIDIA {device.index}")
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: including_emulation)
    monkeypatch.setattr(torch.cuda, "memory_snapshot", lambda: ["block"])

    assert (name_of(GPU), has_bfloat16(GPU), memory_snapshot(GPU)) == ("NVIDIA 0", False, ["block"])
    assert (has_bfloat16(CPU), memory_snapshot(CPU)) == (True, None)
    monkeypatch.setattr(torch, "get_device_module", lambda device: object())
    assert (name_of(GPU), has_bfloat16(GPU), memory_snapshot(GPU)) == ("cuda", True, None)


def test_the_allocator_says_what_it_has_given_out_and_the_host_waits_for_devices_that_queue_alone(monkeypatch):
    for number, name in enumerate(["memory_allocated", "memory_reserved"]):
        monkeypatch.setattr(torch.accelerator, name, lambda device, number=number: 10 + number)
        monkeypatch.setattr(torch.accelerator, f"max_{name}", lambda device, number=number: 20 + number)
    resets, waited = [], []
    monkeypatch.setattr(torch.accelerator, "reset_peak_memory_stats", resets.append)
    monkeypatch.setattr(torch.accelerator, "synchronize", waited.append)

    for device in (GPU, CPU):
        reset_peak(device)
        synchronize(device)

    assert allocator_bytes(GPU) == AllocatorBytes(10, 11)
    assert allocator_bytes(GPU, peak=True) == AllocatorBytes(20, 21)
    assert allocator_bytes(CPU) is None
    assert resets == waited == [GPU]


def test_layers_draw_from_the_generator_of_their_device(two_gpus, monkeypatch):
    generators = [torch.Generator(), torch.Generator()]
    monkeypatch.setattr(torch, "empty", lambda *size, device: None)
    monkeypatch.setattr(torch.cuda, "default_generators", generators)

    assert default_generator(GPU) is generators[0]
    assert default_generator(torch.device("cuda")) is generators[1]
