"""The random numbers that a process would draw next, as plain values: of Python, NumPy, torch and its accelerator."""

import base64
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from penstock.errors import CheckpointError
from penstock.execute.accelerator import default_generator, is_queued


def random_state(device: torch.device) -> dict[str, Any]:
    """Return the state of each generator of this process, by name; `device` is that of the pipeline."""
    numpy_kind, keys, *rest = np.random.get_state(legacy=True)
    version, internal, gauss = random.getstate()
    state: dict[str, Any] = {
        "python": [version, list(internal), gauss],
        "numpy": [str(numpy_kind), np.asarray(keys).tolist(), *map(float, rest)],
        "torch": _text_of(torch.get_rng_state()),
    }
    generator = default_generator(device) if is_queued(device) else None
    if generator is not None:
        state[device.type] = _text_of(generator.get_state())
    return state


def random_state_restorer(states_by_name: dict[str, Any], device: torch.device) -> Callable[[], None]:
    """Return a function that sets the random generators of this process to the states that `random_state` returned.

    These are Python's, numpy's, torch's and the accelerator's; the last one is left out on a process without it. Each
    state is tried on another generator first, so that the returned function cannot fail after it has set some. Raises:
    CheckpointError, where one is no state of a generator.
    """
    try:
        python, numpy = _python_state(*states_by_name["python"]), _numpy_state(*states_by_name["numpy"])
        random.Random().setstate(python)
        np.random.RandomState().set_state(numpy)
        states = [(torch.default_generator, _state_of(states_by_name["torch"]))]
        generator = default_generator(device) if is_queued(device) and device.type in states_by_name else None
        if generator is not None:
            states.append((generator, _state_of(states_by_name[device.type])))
        for generator, state in states:
            torch.Generator(generator.device).set_state(state)
    except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointError(f"`random` is not what generators of random numbers hold: {error}") from error

    def restore() -> None:
        random.setstate(python)
        np.random.set_state(numpy)
        for generator, state in states:
            generator.set_state(state)

    return restore


def _python_state(version: int, internal: list[int], gauss: float | None) -> tuple[Any, ...]:
    return version, tuple(internal), None if gauss is None else float(gauss)


def _numpy_state(kind: str, keys: list[int], position: float, has_gauss: float, cached: float) -> tuple[Any, ...]:
    if not 0 <= position <= len(keys):
        raise ValueError(f"numpy is at {position:g} of {len(keys)} numbers")  # it would read other memory
    return kind, np.array(keys, np.uint32), int(position), int(has_gauss), float(cached)


def _text_of(state: Tensor) -> str:
    return base64.b64encode(state.numpy().tobytes()).decode()


def _state_of(text: str) -> Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)
