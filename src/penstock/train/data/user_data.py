"""A user's own data in a run file: `data.source` names a function that gives batches one after another.

Every rank calls the function, and those that take inputs or targets iterate over what it returns: whole batches, of
which a replica takes its rows. So the place in the data is one for all replicas, however many there are. Where what it
returns has `state_dict` and `load_state_dict`, a run resumes by them; otherwise it passes over the batches that it has
seen. A failure in the function is one message with its file and line.
"""

import hashlib
import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, PenstockError, described
from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.batch.stream import Part, as_part
from penstock.models.decoder import IGNORED_TARGET, count_target_tokens
from penstock.schedules.third_party import run_third_party
from penstock.train.data.batches import Batch, Wants
from penstock.train.data.dataset import EVERYTHING, TokenDataset
from penstock.train.data.tokenizer import tokenizer_of
from penstock.train.settings.config import RunConfig
from penstock.train.settings.user_function import load_function
from penstock.train.together import Beat

KEY = "data.source"
SPLIT = "split"
NO_MORE = object()


class UserDataset:
    """The batches of a user's function.

    `digest` is of the first batch, which every rank reads: by it, ranks and a run that resumes see that their data are
    the same.
    """

    def __init__(self, config: RunConfig) -> None:
        """Call the function, and look at its first batch.

        Raises:
            ConfigError: there is no such function, it fails (with its file and line), or it gives no batches of tokens.
        """
        self.vocabulary = config.model.vocabulary or tokenizer_of(config).vocabulary
        self._plan, self._num_ahead = config.batch_plan, config.data.prefetch
        self._source = UserSource(config, self.vocabulary)
        if config.run.patience and not self._source.has_held_out:
            raise ConfigError(
                f"needs evaluations, but {self._source.place} takes no parameter `split` to give a held-out part by",
                key="run.patience",
            )
        self._step = 1
        """The first optimizer step whose batches have not all been read."""
        self._states: dict[int, Any] = {}
        """By optimizer step, the state behind its last batch."""
        self._following = 0
        self._first = self._next()
        self._held_out: list[Batch] | None = None
        self.digest = _digest(self._first)

    @property
    def num_train_tokens(self) -> int | None:
        """Unknown: a source may have no end."""
        return None

    @property
    def is_stateful(self) -> bool:
        """Whether a run resumes by the state of the source, not by passing over batches."""
        return self._source.is_stateful

    def batch(self, number: int, wants: Wants = EVERYTHING) -> Batch:
        """Return a batch; those before it are passed over, and for an earlier one the source begins anew.

        Raises: ConfigError, if the source fails or ends.
        """
        if not (wants.inputs or wants.target or self._first.kwargs):
            return Part()
        batch = self._first
        if 0 < number < self._following:
            self._source.begin()
            self._following, self._step = 0, 1
        while self._following <= number:
            batch = self._next()
        return _parts_for_rank(batch, wants)

    def num_targets(self, number: int) -> int:
        """Return as many as the first batch has: another one is not read for it."""
        return count_target_tokens(self._first.target)

    def shares(self, first: int, count: int) -> None:
        """Let batches share alike in a step: how many targets they have is known only on ranks that read them."""

    def held_out_batches(self, num_batches: int, wants: Wants = EVERYTHING) -> list[Batch]:
        """Return the first batches of the held-out split; none where the function has no such split.

        Raises: ConfigError, if it fails, or gives none.
        """
        if self._held_out is None or len(self._held_out) < num_batches:
            self._held_out = self._source.held_out(num_batches)
        return [_parts_for_rank(batch, wants) for batch in self._held_out[:num_batches]]

    def held_out_weights(self, num_batches: int) -> list[float] | None:
        """Return how many targets each of these batches has."""
        return [float(count_target_tokens(batch.target)) for batch in self.held_out_batches(num_batches)]

    def state(self, step: int) -> Any:
        """Return the state of the source behind the batches of an optimizer step; None on a rank that reads none."""
        return self._states.get(step)

    def resume(self, step: int, state: Any, beat: Beat) -> str:
        """Go on behind an optimizer step; return a line on how, if it takes time.

        Raises: ConfigError, if the source fails.
        """
        self._step, self._states = step + 1, {}
        end = self._plan.begin(step + 1)
        if state is not None and self.is_stateful:
            self._source.begin(state)
            self._following = end
            return ""
        while self._following < end:
            self._next()
            beat()
        return f"{self._source.place} has no state_dict: {end} batches were passed over"

    def _next(self) -> Batch:
        """Read a batch; where an optimizer step ends with it, keep the state, for the reader is ahead of the steps."""
        batch = self._source.next(self._following)
        self._following += 1
        while self._plan.begin(self._step + 1) < self._following:
            self._step += 1
        if self.is_stateful and self._plan.begin(self._step + 1) == self._following:
            self._states[self._step] = self._source.state()
            for step in sorted(self._states)[: -self._num_ahead - 2]:
                del self._states[step]
        return batch


Dataset = TokenDataset | UserDataset
"""The batches of a run, by their numbers from 0. Of a user's function, they are found in order alone."""


def _parts_for_rank(batch: Batch, wants: Wants) -> Batch:
    """Return the rows of the rank's replica, and of these the inputs and the target that its stages take."""
    replica_batch: Batch | Microbatch = batch
    if wants.num_replicas > 1:
        rule = BatchRule(wants.num_replicas, allow_ragged=True)
        parts = rule.microbatches(batch.args, batch.kwargs, batch.target)
        replica_batch = parts[wants.replica]
    args = replica_batch.args if wants.inputs else ()
    return Part(*args, target=replica_batch.target if wants.target else None, **replica_batch.kwargs)


def _digest(batch: Batch) -> str:
    digest = hashlib.sha256()
    for value in (batch.args[0], batch.target):
        digest.update(f"{tuple(value.shape)} ".encode())
        digest.update(value.contiguous().numpy().tobytes())
    return digest.hexdigest()


class UserSource:
    """The batches of a user's function, one after another; where they end, the iterable is iterated again."""

    def __init__(self, config: RunConfig, vocabulary: int) -> None:
        """Call the function. Raises: ConfigError, also where there is no such function."""
        self.place = config.data.source
        self._config = config
        self._vocabulary = vocabulary
        self._function: Callable[..., Any] = load_function(self.place, KEY)
        self._parameters: Mapping[str, inspect.Parameter] = self._run_user_code(
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

    def begin(self, state: Any = None) -> None:
        """Call the function and begin with its first batch, or behind that of a state. Raises: ConfigError."""
        self._iterable = self._call_function("train")
        if state is not None:
            self._run_user_code(lambda: self._iterable.load_state_dict(state))
        self._items = self._iterator_of(self._iterable)

    def next(self, number: int) -> Batch:
        """Return the next batch; `number` is for messages. Raises: ConfigError."""
        item = self._run_user_code(lambda: next(self._items, NO_MORE))
        if item is NO_MORE and self._items is not self._iterable:
            self._items = self._iterator_of(self._iterable)  # the next epoch
            item = self._run_user_code(lambda: next(self._items, NO_MORE))
        if item is NO_MORE:
            raise ConfigError(
                f"{self.place} has ended after {number} batches; return what can be iterated over again, such as a "
                "list or a data loader, or an iterator without an end",
                key=KEY,
            )
        return self._checked_batch(item, number)

    def held_out(self, num_batches: int) -> list[Batch]:
        """Return the first batches of the held-out split; none without one. Raises: ConfigError."""
        if not self.has_held_out:
            return []
        items = self._iterator_of(self._call_function("held_out"))
        held_out_items = self._run_user_code(lambda: list(islice(items, num_batches)))
        if not held_out_items:
            raise ConfigError(f"{self.place} has no batches for split='held_out'; yield at least one", key=KEY)
        return [self._checked_batch(item, number) for number, item in enumerate(held_out_items)]

    def state(self) -> Any:
        """Return the state behind the last batch, made of JSON's values. Raises: ConfigError."""
        state = self._run_user_code(self._iterable.state_dict)
        try:
            return json.loads(json.dumps(state))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"the state_dict of {self.place} is not of numbers, texts, lists and dicts, as a checkpoint holds "
                f"them: {error}",
                key=KEY,
            ) from error

    def _call_function(self, split: str) -> Any:
        """Call the user's function with those of the arguments that its signature has, and return its iterable."""
        batch = self._config.batch
        arguments = {
            "config": self._config,
            "batch_size": batch.size,
            "length": batch.length,
            "seed": self._config.run.seed,
            SPLIT: split,
        }
        if not any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in self._parameters.values()):
            arguments = {name: value for name, value in arguments.items() if name in self._parameters}
        return self._run_user_code(lambda: self._function(**arguments))

    def _iterator_of(self, iterable: Any) -> Iterator[Any]:
        if not hasattr(iterable, "__iter__"):
            raise ConfigError(f"{self.place} returned {described(iterable)}; expected an iterable of batches", key=KEY)
        items: Iterator[Any] = self._run_user_code(lambda: iter(iterable))
        return items

    def _checked_batch(self, item: Any, number: int) -> Batch:
        """Return a batch of tokens and target. Raises: ConfigError, if it is none."""
        size, length = self._config.batch.size, self._config.batch.length
        expected = f"expected tokens and target, int64 tensors of shape [{size}, up to {length}]"
        batch_name = f"batch {number} of {self.place}"
        batch = _as_batch(item)
        if batch is None:
            raise ConfigError(f"{batch_name} is {described(item)}; {expected}", key=KEY)
        for name, value in (("tokens", batch.args[0]), ("target", batch.target)):
            if not (isinstance(value, Tensor) and value.dtype == torch.int64 and _fits(value, size, length)):
                raise ConfigError(f"{batch_name}: {name} is {_described_value(value)}; {expected}", key=KEY)
        counted_targets = batch.target[batch.target != IGNORED_TARGET]
        ids = torch.cat([batch.args[0].flatten(), counted_targets])
        unknown_ids = ids[(ids < 0) | (ids >= self._vocabulary)]
        if len(unknown_ids):
            raise ConfigError(
                f"{batch_name} has token {int(unknown_ids[0])}, but the model's vocabulary is {self._vocabulary}; "
                "set model.vocabulary",
                key=KEY,
            )
        return batch

    def _run_user_code(self, act: Callable[[], Any]) -> Any:
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


def _described_value(value: Any) -> str:
    if not isinstance(value, Tensor):
        return described(value)
    return f"a tensor of shape {list(value.shape)} and type {str(value.dtype).removeprefix('torch.')}"
