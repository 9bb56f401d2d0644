"""The arguments of a submodule besides its first one: it may not change them, since other stages would not see that."""

import inspect
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.cutting.state import fingerprint
from penstock.models.cutting.undocumented import version_of

PLAIN = (bool, int, float, str, type(None))


class UnchangedArguments:
    """Compares the further arguments of one call of a submodule before and after it."""

    def __init__(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """`name` is that of the submodule, for messages."""
        self._name = name
        # The first argument goes from part to part: a submodule may change it in place, as a rectifier does.
        items: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
        self._arguments = dict(items[1:])
        self._prints = self._current_prints()

    def require(self, method: Callable[..., Any]) -> None:
        """Refuse what the call of `method` has changed. Raises: PenstockError, with the name of the argument."""
        prints = self._current_prints()
        if prints == self._prints:
            return
        pairs = zip(self._arguments.items(), self._prints, prints, strict=True)
        place, value = next(item for item, before, after in pairs if before != after)
        argument = _parameter_name(method, place)
        kind = type(value).__name__
        cause = f"{self._name!r} changes its argument {argument!r} ({kind}), which the forward gives to it"
        if "Cache" in kind:
            raise PenstockError(f"{cause}; pass use_cache=False, since a cache is of no use in training")
        raise PenstockError(
            f"{cause}: what blocks fill or count there, other stages do not see. Return the value, hand it on by a "
            "ps.Skip, or add a loss to a ps.AuxiliaryLoss"
        )

    def _current_prints(self) -> list[Any]:
        return [
            version_of(value) if isinstance(value, Tensor) else None if isinstance(value, PLAIN) else fingerprint(value)
            for value in self._arguments.values()
        ]


def _parameter_name(method: Callable[..., Any], place: int | str) -> int | str:
    """Return the name of an argument by its position, if the method tells it."""
    parameters = list(inspect.signature(method.forward if isinstance(method, nn.Module) else method).parameters)
    return parameters[place] if isinstance(place, int) and place < len(parameters) else place
