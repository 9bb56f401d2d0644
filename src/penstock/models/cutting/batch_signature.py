"""How a cut model takes its batch: by the arguments of its own forward.

    step(words, mask)    step(words, mask=mask)    step(mask=mask, words=words)   ──► {"words": words, "mask": mask}

Every stage runs a part of the forward, and is given the batch by the names of these arguments.
"""

import inspect
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from torch import nn

from penstock.errors import ConfigError, PenstockError
from penstock.microbatch_place import MICROBATCH_PLACE


class BatchSignature:
    """The arguments of a model's forward that a batch may have; binds what a step passes, as Python binds a call."""

    def __init__(
        self,
        model: nn.Module,
        names: Collection[str] = (),
        first: Sequence[str] = (),
        of_entry: Sequence[str] = (),
    ) -> None:
        """Keep which arguments of the model's forward a batch may have; `names` are these, by default all.

        A layer of a pipeline takes the arguments in `first` by position, in this order and on the first stage alone,
        and all other arguments by name on every stage. A `**kwargs` of the forward counts where no `names` are given.
        `of_entry` are keywords that the model's forward does not have: the entry of its layers takes them.

        Raises:
            ConfigError: an argument has no name by which every stage could be given it.
        """
        # Refuse forwards with arguments that have no name: other stages than the first take arguments by name alone.
        signature = inspect.signature(model.forward)
        nameless = [item.name for item in signature.parameters.values() if item.kind is item.POSITIONAL_ONLY]
        if nameless:
            raise ConfigError(
                f"the forward of {type(model).__name__} takes {nameless[0]!r} by position alone, and every stage is "
                "given the batch by the names of its arguments; leave out the / among them",
                key="model",
            )
        parameters = [item for item in signature.parameters.values() if item.kind is not item.VAR_POSITIONAL]
        if signature.parameters and not parameters:
            raise ConfigError(
                f"the forward of {type(model).__name__} takes *{next(iter(signature.parameters))}, and every stage is "
                "given the batch by the names of its arguments; give each of them a name",
                key="model",
            )
        # Keep the arguments that a batch may have, and those of them without a default, which it must have.
        self.var_keyword = next((item for item in parameters if not names and item.kind is item.VAR_KEYWORD), None)
        """The `**kwargs` of the forward, if a batch may have keywords for it; else None."""
        plain_parameters = [item for item in parameters if item.kind is not item.VAR_KEYWORD]
        self._signature = inspect.Signature(plain_parameters)
        batch_parameters = [item for item in plain_parameters if item.name != MICROBATCH_PLACE]
        self.parameters = {item.name: item for item in batch_parameters if not names or item.name in names}
        """The arguments by name, in the order of the forward."""
        self._of_pipeline = [] if names else [item for item in plain_parameters if item.name == MICROBATCH_PLACE]
        self._required = [name for name, item in self.parameters.items() if item.default is item.empty]
        self._first = first
        self._of_entry = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None) for name in of_entry]
        self._model = type(model).__name__

    @property
    def keywords(self) -> list[inspect.Parameter]:
        """The arguments that every stage takes, by name; among them what a pipeline tells of a microbatch."""
        of_batch = [item for name, item in self.parameters.items() if name not in self._first]
        return [*of_batch, *self._of_pipeline, *self._of_entry]

    def bind(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], *, is_first: bool = True
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return a batch as a layer takes it: arguments of the first stage by position, all others by name.

        `args` and `kwargs` are what the user passes, as to the model itself; keywords that the model's forward does not
        have are those of layers, and stay as they are. `is_first` says whether this rank holds the first stage.

        Raises:
            PenstockError: an argument is missing, is given twice, or cannot be one of a batch.
        """
        # Bind the model's own arguments as Python would, to name those that were given by position.
        layer_keywords = {name: value for name, value in kwargs.items() if name not in self.parameters}
        model_keywords = {name: value for name, value in kwargs.items() if name in self.parameters}
        try:
            arguments = self._signature.bind_partial(*args, **model_keywords).arguments
        except TypeError as error:
            raise self._refusal(str(error)) from error
        # Refuse what is no argument of a batch, and a batch that lacks one; defaults are left to the model.
        foreign_names = [name for name in arguments if name not in self.parameters]
        if foreign_names:
            raise self._refusal(f"{foreign_names[0]!r} is no argument of a batch")
        required = [*self._required, *(self._first if is_first else ())]
        missing_names = [name for name in required if name not in arguments]
        if missing_names:
            raise self._refusal(f"missing a required argument: {missing_names[0]!r}")
        positional = tuple(arguments.pop(name) for name in self._first if name in arguments)
        return positional, {**arguments, **layer_keywords}

    def _refusal(self, problem: str) -> PenstockError:
        names = ", ".join(self.parameters)
        return PenstockError(
            f"the batch does not fit the forward of {self._model}: {problem}. Pass the arguments ({names}) as to the "
            "model itself, by position or by name, and what the loss compares the output with as target="
        )
