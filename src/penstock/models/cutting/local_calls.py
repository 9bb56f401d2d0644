"""Calls of the submodules of a part: what they change besides the tensors that they return is found, and refused."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.cutting.routes import Routes
from penstock.models.cutting.stand_in import CALL
from penstock.models.cutting.state import fingerprint
from penstock.models.cutting.undocumented import version_of

PLAIN = (bool, int, float, str, type(None))


def call_module(
    module: nn.Module, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], routes: Routes
) -> Any:
    """Call a submodule of a part.

    Raises:
        PenstockError: it changes what the forward gives to it besides its first argument, or an attribute of its own
            that the forward reads: other stages would not see that.
    """
    further_inputs = {index: value for index, value in enumerate(args) if index or not args} | kwargs
    if not args and kwargs:
        del further_inputs[next(iter(kwargs))]
    prints_before = _prints(further_inputs)
    attributes = routes.reads.get(name, ())
    values_before = [fingerprint(getattr(module, attribute, None)) for attribute in attributes]
    output = module(*args, **kwargs) if method == CALL else getattr(module, method)(*args, **kwargs)
    if prints_before != _prints(further_inputs):
        _refuse_change(name, further_inputs, prints_before)
    for attribute, value_before in zip(attributes, values_before, strict=True):
        if fingerprint(getattr(module, attribute, None)) != value_before:
            raise PenstockError(
                f"{name!r} changes its attribute {attribute!r}, which the forward around the points reads; other "
                "stages would read another value. Return it, hand it on by a ps.Skip, or add it to a ps.AuxiliaryLoss"
            )
    return output


def _prints(inputs: Mapping[Any, Any]) -> list[Any]:
    return [
        version_of(value) if isinstance(value, Tensor) else None if isinstance(value, PLAIN) else fingerprint(value)
        for value in inputs.values()
    ]


def _refuse_change(name: str, inputs: Mapping[Any, Any], prints_before: list[Any]) -> None:
    pairs = zip(inputs.items(), prints_before, _prints(inputs), strict=True)
    argument, value = next(item for item, before, after in pairs if before != after)
    cause = f"{name!r} changes its argument {argument!r} ({type(value).__name__}), which the forward gives to it"
    if "Cache" in type(value).__name__:
        raise PenstockError(f"{cause}; pass use_cache=False, since a cache is of no use in training")
    raise PenstockError(
        f"{cause}: what blocks fill or count there, other stages do not see. Return the value, hand it on by a "
        "ps.Skip, or add a loss to a ps.AuxiliaryLoss"
    )
