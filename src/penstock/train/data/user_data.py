"""A user's own data in a run file: `data.source` names a function that gives batches one after another.

Every rank calls the function, and those that take inputs or targets iterate over what it returns: whole batches, of
which a replica takes its rows. So the place in the data is one for all replicas, however many there are. Where what it
returns has `state_dict` and `load_state_dict`, a run resumes by them; otherwise it passes over the batches that it has
seen.
"""

import hashlib
from typing import Any

from penstock.errors import ConfigError
from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.batch.stream import Part
from penstock.models.decoder import count_target_tokens
from penstock.train.data.batches import Batch, Wants
from penstock.train.data.tokenizer import tokenizer_of
from penstock.train.data.user_source import UserSource
from penstock.train.settings.config import RunConfig
from penstock.train.together import Beat

EVERYTHING = Wants()


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
        self.vocabulary = config.model.vocabulary
        if not self.vocabulary:
            self.vocabulary = tokenizer_of(config).vocabulary
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
    def position(self) -> "UserDataset":
        """What a run keeps of where it is in the data."""
        return self

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
        found = self._first
        if 0 < number < self._following:
            self._source.begin()
            self._following, self._step = 0, 1
        while self._following <= number:
            found = self._next()
        return _wanted(found, wants)

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
        return [_wanted(batch, wants) for batch in self._held_out[:num_batches]]

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
            self._source.load_state(state)
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


def _wanted(batch: Batch, wants: Wants) -> Batch:
    own: Batch | Microbatch = batch
    if wants.num_replicas > 1:
        parts = BatchRule(wants.num_replicas, allow_ragged=True).microbatches(batch.args, batch.kwargs, batch.target)
        own = parts[wants.replica]
    args = own.args if wants.inputs else ()
    return Part(*args, target=own.target if wants.target else None, **own.kwargs)


def _digest(batch: Batch) -> str:
    found = hashlib.sha256()
    for value in (batch.args[0], batch.target):
        found.update(f"{tuple(value.shape)} ".encode())
        found.update(value.contiguous().numpy().tobytes())
    return found.hexdigest()
