"""`LayerSpec`: a layer that is not there yet, and makes itself the same on whatever rank it is asked to."""

import hashlib
import math
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn

from penstock.errors import ConfigError

# Modules draw their first values from torch's one generator per process, so ranks that are threads take turns.
# Re-entrant, because a layer may build another.
_GENERATOR_TURN = threading.RLock()


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer of a model: calling it allocates and initializes the module, on the CPU.

    The first values depend on `seed` and `name` alone: not on the split, nor on what else was built or drawn before.

    Raises:
        ConfigError: no name, or a weight that is not a finite number of 0 or more; when called, a tied name that is
            not a parameter of the module.
    """

    name: str
    """Prefix of the layer's parameter names in the unsplit model, as in `blocks.3`."""
    build: Callable[[], nn.Module]
    seed: int = 0
    weight: float = 1.0
    """Compute of a forward relative to the other layers, for the split into stages."""
    tied: tuple[tuple[str, str], ...] = ()
    """Pairs (own parameter, full name of another layer's parameter) that must hold the same values.

    A built layer still has a parameter of its own there; who places the layers shares it or copies the other's values.
    """
    has_full_names: bool = False
    """Whether its module names parameters and buffers as the unsplit model does, so that `name` is no prefix of them.

    The module says so too, by an attribute of this name.
    """

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("a layer has no name; give the prefix of its parameters, as in 'blocks.3'", key="name")
        if not (math.isfinite(self.weight) and self.weight >= 0):
            raise ConfigError(
                f"layer {self.name!r} weighs {self.weight}; expected a finite number, 0 or larger", key="weight"
            )

    def full_name(self, own: str) -> str:
        """Return the unsplit model's name of the parameter or buffer that the layer's module calls `own`."""
        return own if self.has_full_names else f"{self.name}.{own}"

    def __call__(self) -> nn.Module:
        module = _build(self, "cpu")
        parameter_names = [name for name, _ in module.named_parameters(remove_duplicate=False)]
        for local_name, owner_name in self.tied:
            if local_name not in parameter_names:
                raise ConfigError(
                    f"layer {self.name!r} ties {local_name!r} to {owner_name!r}, but its parameters are "
                    f"{parameter_names}; use one of these",
                    key="tied",
                )
        return module


def count_parameters(layers: Iterable[LayerSpec]) -> int:
    """Return the number of trained scalars, a tied one once; builds on the meta device, so nothing is allocated."""
    layers = list(layers)
    sizes = {
        layer.full_name(name): parameter.numel()
        for layer in layers
        for name, parameter in built_on_meta(layer).named_parameters()
    }
    for layer in layers:
        for local_name, owner_name in layer.tied:
            if owner_name in sizes:
                sizes.pop(layer.full_name(local_name), None)
    return sum(sizes.values())


def saved_shapes(layers: Iterable[LayerSpec]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of all parameters and saved buffers by the unsplit model's names, of tied ones the owner's."""
    layers = list(layers)
    shapes = {
        layer.full_name(name): tuple(value.shape)
        for layer in layers
        for name, value in built_on_meta(layer).state_dict().items()
    }
    for layer in layers:
        for local_name, _ in layer.tied:
            shapes.pop(layer.full_name(local_name), None)
    return shapes


def embedding_names(layers: Iterable[LayerSpec]) -> frozenset[str]:
    """Return the unsplit model's names of the weights of every `nn.Embedding`, and of what is tied to one."""
    layers = list(layers)
    names = {
        layer.full_name(f"{name}.{local_name}" if name else local_name)
        for layer in layers
        for name, module in built_on_meta(layer).named_modules()
        if isinstance(module, nn.Embedding)
        for local_name, _ in module.named_parameters(recurse=False)
    }
    ties = [{layer.full_name(local_name), owner_name} for layer in layers for local_name, owner_name in layer.tied]
    for tie in ties * len(ties):  # a tie may lead to the next one
        names |= tie if tie & names else set()
    return frozenset(names)


def built_on_meta(layer: LayerSpec) -> nn.Module:
    """Build a layer on the meta device, where its parameters take no memory."""
    return _build(layer, "meta")


def _build(layer: LayerSpec, device: str) -> nn.Module:
    """Build with a generator state of the layer's own, and leave the global one as it was."""
    with _GENERATOR_TURN, torch.random.fork_rng(devices=[]), torch.device(device):
        torch.default_generator.manual_seed(_generator_seed(layer))
        return layer.build()


def _generator_seed(layer: LayerSpec) -> int:
    digest = hashlib.sha256(f"{layer.seed}:{layer.name}".encode()).digest()  # hash() differs between processes
    return int.from_bytes(digest[:8], "big") >> 1
