"""How the ranks of a group agree on a place in their store that nobody has written to before.

Connections are made through keys in a store. Keys of an earlier connection would lead to closed ports, so each
connection gets a round of its own. A rank that gives up a round raises the `floor`, and whoever comes late skips it:
a rank that missed rounds, because it failed before it came to them, meets the others again in the next one.
"""

import time
from datetime import timedelta

from torch.distributed.distributed_c10d import PrefixStore, Store

from penstock.execute.transport.protocol import missing_ranks


class Meeting:
    """The rounds in which one group of ranks meets, as one rank sees them.

    Their count is in the store, so a second meeting over the same store goes on where the first one was.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self._store = store
        self._rank = rank
        self._num_ranks = num_ranks
        self._round = -1

    def fresh_store(self, deadline_s: float) -> Store:
        """Wait until all ranks have come; return a store that is empty and the same for all of them.

        Raises: DeadlineExceeded, naming the ranks that did not come.
        """
        begin_s = time.monotonic()
        self._round = self._enter_round()
        self._store.set(self._key(self._rank), "here")
        keys = [self._key(rank) for rank in range(self._num_ranks)]
        try:
            self._store.wait(keys, timedelta(seconds=deadline_s))
        except RuntimeError as error:
            missing = [rank for rank, key in enumerate(keys) if not self._store.check([key])]
            self.give_up()
            raise missing_ranks(self._rank, missing, time.monotonic() - begin_s) from error
        return PrefixStore(f"{self._round}", self._store)

    def give_up(self) -> None:
        """Make every rank skip this round, because this rank has left it."""
        floor = self._store.add("floor", 0)
        if floor <= self._round:
            self._store.add("floor", self._round + 1 - floor)

    def _enter_round(self) -> int:
        counter = f"rounds/{self._rank}"
        entered = self._store.add(counter, 0)
        number = max(entered, self._store.add("floor", 0))
        self._store.add(counter, number + 1 - entered)
        return number

    def _key(self, rank: int) -> str:
        return f"{self._round}/here/{rank}"
