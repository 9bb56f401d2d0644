"""Whether a layer's module has the methods of a protocol.

Asked of its class: `isinstance` with a protocol reads the module's attributes, and to read the `weight` of a
parametrized layer computes it, which changes the state of `spectral_norm`.
"""

from torch import nn


def has_methods(module: nn.Module, protocol: type) -> bool:
    """Return whether a module's class has all public methods of a protocol."""
    names = [name for name, value in vars(protocol).items() if callable(value) and not name.startswith("_")]
    return all(callable(getattr(type(module), name, None)) for name in names)
