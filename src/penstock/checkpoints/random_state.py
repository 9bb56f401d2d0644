"""The random numbers that a process would draw next, as plain values: of Python, NumPy, torch and its CUDA device."""

import base64
import random
from typing import Any

import numpy as np
import torch
from torch import Tensor


def random_state(device: torch.device) -> dict[str, Any]:
    """Return where the generators of this process are; `device` is that of the pipeline."""
    numpy_kind, keys, *rest = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [str(numpy_kind), np.asarray(keys).tolist(), *map(float, rest)],
        "torch": _text_of(torch.get_rng_state()),
    }
    if device.type == "cuda":
        state["cuda"] = _text_of(torch.cuda.get_rng_state(device))
    return state


def restore_random_state(state: dict[str, Any], device: torch.device) -> None:
    """Put the generators of this process back where they were; what the process does not have is left out."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, position, has_gauss, cached = state["numpy"]
    np.random.set_state((kind, np.array(keys, np.uint32), int(position), int(has_gauss), cached))
    torch.set_rng_state(_state_of(state["torch"]))
    if device.type == "cuda" and "cuda" in state:
        torch.cuda.set_rng_state(_state_of(state["cuda"]), device)


def _text_of(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _state_of(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
