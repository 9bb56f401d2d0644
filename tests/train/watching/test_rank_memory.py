"""How much memory a rank has taken."""

import resource

import numpy as np
import torch

from penstock.train.watching.rank_memory import peak_bytes


def test_on_a_cpu_it_is_what_the_process_had_in_memory_at_most():
    before = peak_bytes(torch.device("cpu"))
    held = np.ones(32 * 2**20 + max(before - current_bytes(), 0) // 8)  # beyond any earlier peak
    grown = peak_bytes(torch.device("cpu"))
    del held

    assert grown >= before + 200 * 2**20
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
