"""Losses for `Pipeline` beside those of torch."""

from penstock.execute.losses.chunked import chunked_cross_entropy as chunked_cross_entropy

__all__ = ["chunked_cross_entropy"]
