"""What one forward of a generation is given beside its tokens: the cache of its rows, their mask and positions.

A pipeline passes it as the keyword `CACHED_ROWS` of its batch, one for each microbatch. Every rank makes its own, so no
tensor of a cache goes to another rank, and nothing of it is a part of a message.
"""

from collections.abc import Mapping
from typing import Any

import torch

from penstock.errors import PenstockError, described

CACHED_ROWS = "cached_rows"
"""The keyword by which layers of a decoder take a `CachedRows`."""


class CachedRows:
    """The rows of one microbatch, on one rank, for one forward."""

    def __init__(self, arguments: Mapping[str, Any]) -> None:
        self.arguments = {**arguments, "use_cache": True}
        """What the forward gets beside its tokens, in the place of `use_cache=False`: cache, mask, positions."""


def with_cache(settings: Mapping[str, Any], keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keywords of a forward: those of a batch and the settings, or with a cache where the batch brings one.

    Raises:
        PenstockError: the batch brings something else, or the forward is one of a training step, in which every layer
            would have to keep its cache until its backward, and recompute by another one.
    """
    further = dict(keywords)
    rows = further.pop(CACHED_ROWS, None)
    if rows is None:
        return {**further, **settings}
    if not isinstance(rows, CachedRows):
        raise PenstockError(f"{CACHED_ROWS} is {described(rows)}; leave it to model.generate, which makes it")
    if torch.is_grad_enabled():
        raise PenstockError(f"{CACHED_ROWS}: a cache is of no use in training; call model.generate, or evaluate")
    return {**further, **settings, **rows.arguments}
