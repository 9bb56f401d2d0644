"""Calls of the submodules of a part: what they change besides the tensors that they return is found, and refused."""

from typing import Any

from torch import nn

from penstock.errors import PenstockError
from penstock.models.cutting.arguments import UnchangedArguments
from penstock.models.cutting.routes import Routes
from penstock.models.cutting.stand_in import CALL, CHANGES_OWN
from penstock.models.cutting.state import fingerprint


def call_module(
    module: nn.Module, name: str, method: str, args: tuple[Any, ...], kwargs: dict[str, Any], routes: Routes
) -> Any:
    """Call a submodule of a part.

    Raises:
        PenstockError: it changes what the forward gives to it besides its first argument, or an attribute of its own
            that the forward reads: other stages would not see that.
    """
    unchanged = UnchangedArguments(name, args, kwargs)
    attributes = [
        (module.get_submodule(reader[len(name) + 1 :]), attribute)
        for reader, attributes in routes.reads.items()
        if f"{reader}.".startswith(f"{name}.")
        for attribute in attributes
    ]
    values_before = [fingerprint(getattr(owner, attribute, None)) for owner, attribute in attributes]
    module_method = module if method == CALL else getattr(module, method)
    output = module_method(*args, **kwargs)
    unchanged.require(module_method)
    for (owner, attribute), value_before in zip(attributes, values_before, strict=True):
        if fingerprint(getattr(owner, attribute, None)) != value_before:
            raise PenstockError(CHANGES_OWN.format(name, attribute))
    return output
