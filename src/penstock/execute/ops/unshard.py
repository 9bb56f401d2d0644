"""UNSHARD and RESHARD: parameters are not sharded, so gathering and dropping them is nothing."""

from collections.abc import Iterator

from penstock.execute.ops.context import CompileContext
from penstock.execute.step import Bound


def unshard(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle UNSHARD."""
    yield Bound(row, lambda step: None)


def reshard(context: CompileContext, row: int) -> Iterator[Bound]:
    """Handle RESHARD."""
    yield Bound(row, lambda step: None)
