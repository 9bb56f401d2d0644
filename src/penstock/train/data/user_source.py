"""`UserSource`: what a user's function gives, called, iterated and checked.

The function is called with what it names of `config`, `batch_size`, `length`, `seed` and `split` ("train" or
"held_out"). Whatever fails in it is one message with its file and line.
"""

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, PenstockError, described
from penstock.execute.batch.stream import Part, as_part
from penstock.models.decoder import IGNORED_TARGET
from penstock.schedules.third_party import run_third_party
from penstock.train.data.batches import Batch
from penstock.train.settings.config import RunConfig
from penstock.train.settings.user_function import load_function

KEY = "data.source"
SPLIT = "split"
NO_MORE = object()


class UserSource:
    """The batches of a user's function, one after another; where they end, the iterable is iterated again."""

    def __init__(self, config: RunConfig, vocabulary: int) -> None:
        """Call the function.

        Raises:
            ConfigError: there is no such function, it fails, or it returns nothing to iterate over.
        """
        self.place = config.data.source
        self._config = config
        self._vocabulary = vocabulary
        self._function: Callable[..., Any] = load_function(self.place, KEY)
        self._parameters: Mapping[str, inspect.Parameter] = self._run(
            lambda: inspect.signature(self._function).parameters
        )
        self.begin()

    @property
    def is_stateful(self) -> bool:
        """Whether what the function returns has a state that can be kept and loaded."""
        return all(callable(getattr(self._iterable, name, None)) for name in ("state_dict", "load_state_dict"))

    @property
    def has_held_out(self) -> bool:
        """Whether the function has a split to evaluate on."""
        return SPLIT in self._parameters

    def begin(self) -> None:
        """Call the function and begin with its first batch. Raises: ConfigError."""
        self._iterable = self._called("train")
        self._items = self._iterated(self._iterable)

    def next(self, number: int) -> Batch:
        """Return the next batch; `number` is for messages. Raises: ConfigError."""
        item = self._run(lambda: next(self._items, NO_MORE))
        if item is NO_MORE and self._items is not self._iterable:
            self._items = self._iterated(self._iterable)  # the next epoch
            item = self._run(lambda: next(self._items, NO_MORE))
        if item is NO_MORE:
            raise ConfigError(
                f"{self.place} has ended after {number} batches; return what can be iterated over again, such as a "
                "list or a data loader, or an iterator without an end",
                key=KEY,
            )
        return self._checked(item, number)

    def held_out(self, num_batches: int) -> list[Batch]:
        """Return the first batches of the held-out split; none without one. Raises: ConfigError."""
        if not self.has_held_out:
            return []
        items = self._iterated(self._called("held_out"))
        found = self._run(lambda: list(islice(items, num_batches)))
        if not found:
            raise ConfigError(f"{self.place} has no batches for split='held_out'; yield at least one", key=KEY)
        return [self._checked(item, number) for number, item in enumerate(found)]

    def state(self) -> Any:
        """Return the state behind the last batch, made of JSON's values. Raises: ConfigError."""
        state = self._run(self._iterable.state_dict)
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the state_dict of {self.place} is not of numbers, texts, lists and dicts, as a checkpoint holds "
                f"them: {error}",
                key=KEY,
            ) from error

    def load_state(self, state: Any) -> None:
        """Begin behind the batch that a state is of. Raises: ConfigError."""
        self._iterable = self._called("train")
        self._run(lambda: self._iterable.load_state_dict(state))
        self._items = self._iterated(self._iterable)

    def _called(self, split: str) -> Any:
        batch = self._config.batch
        offered = {
            "config": self._config,
            "batch_size": batch.size,
            "length": batch.length,
            "seed": self._config.run.seed,
            SPLIT: split,
        }
        if not any(each.kind is inspect.Parameter.VAR_KEYWORD for each in self._parameters.values()):
            offered = {name: value for name, value in offered.items() if name in self._parameters}
        return self._run(lambda: self._function(**offered))

    def _iterated(self, iterable: Any) -> Iterator[Any]:
        if not hasattr(iterable, "__iter__"):
            raise ConfigError(f"{self.place} returned {described(iterable)}; expected an iterable of batches", key=KEY)
        items: Iterator[Any] = self._run(lambda: iter(iterable))
        return items

    def _checked(self, item: Any, number: int) -> Batch:
        """Return a batch of tokens and target. Raises: ConfigError, if it is none."""
        size, length = self._config.batch.size, self._config.batch.length
        expected = f"expected tokens and target, int64 tensors of shape [{size}, up to {length}]"
        batch = _as_batch(item)
        if batch is None:
            raise ConfigError(f"batch {number} of {self.place} is {described(item)}; {expected}", key=KEY)
        for name, value in (("tokens", batch.args[0]), ("target", batch.target)):
            if not (isinstance(value, Tensor) and value.dtype == torch.int64 and _fits(value, size, length)):
                raise ConfigError(f"batch {number} of {self.place}: {name} is {_shown(value)}; {expected}", key=KEY)
        counted = batch.target[batch.target != IGNORED_TARGET]
        ids = torch.cat([batch.args[0].flatten(), counted])
        wrong = ids[(ids < 0) | (ids >= self._vocabulary)]
        if len(wrong):
            raise ConfigError(
                f"batch {number} of {self.place} has token {int(wrong[0])}, but the model's vocabulary is "
                f"{self._vocabulary}; set model.vocabulary",
                key=KEY,
            )
        return batch

    def _run(self, act: Callable[[], Any]) -> Any:
        return run_third_party(f"{KEY} = {self.place!r}", act)


def _as_batch(item: Any) -> Batch | None:
    """Return what a source yields as a batch: a pair, a part, or a dict with tokens, target and further keywords."""
    if isinstance(item, Mapping):
        rest = {name: value for name, value in item.items() if name not in ("tokens", "target")}
        is_known = "tokens" in item and "target" in item and all(isinstance(name, str) for name in rest)
        return Part(item["tokens"], target=item["target"], **rest) if is_known else None
    try:
        batch = as_part(item)
    except PenstockError:
        return None
    return batch if len(batch.args) == 1 else None


def _fits(value: Tensor, size: int, length: int) -> bool:
    return value.dim() == 2 and len(value) == size and 0 < value.shape[1] <= length


def _shown(value: Any) -> str:
    if not isinstance(value, Tensor):
        return described(value)
    return f"a tensor of shape {list(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"
