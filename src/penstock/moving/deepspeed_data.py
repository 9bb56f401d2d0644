"""The data of DeepSpeed's engine: pairs (inputs, labels), which an iterator gives one microbatch at a time."""

from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from penstock.errors import EndOfData, PipelineError


class BatchItems(Iterator[Any]):
    """The items of one batch, each pulled off the caller's iterator when it is asked for.

    Raises:
        PipelineError: there is no iterator.
    """

    num_pulled: int = 0
    """The number of items that have left the iterator for this batch."""

    def __init__(self, data_iter: Iterator[Any] | None, rank: int, num_microbatches: int) -> None:
        if not isinstance(data_iter, Iterator):
            description = "nothing" if data_iter is None else f"a {type(data_iter).__name__}"
            raise PipelineError(
                f"rank {rank} holds the first or the last layer and was given {description} for data_iter; pass an "
                "iterator, made once, off which every batch takes its items"
            )
        self._data_iter = data_iter
        self._rank = rank
        self._num_microbatches = num_microbatches

    def __next__(self) -> Any:
        """Return the next pair.

        Raises:
            EndOfData: the iterator has no further item.
            PipelineError: the iterator fails, or its item is no pair.
        """
        if self.num_pulled == self._num_microbatches:
            raise StopIteration
        try:
            item = next(self._data_iter)
        except StopIteration:
            raise EndOfData(
                f"the data of rank {self._rank} ended: a batch takes {self._num_microbatches} items, and "
                f"{self.num_pulled} were left"
            ) from None
        except Exception as error:
            raise PipelineError(f"data_iter of rank {self._rank} raised {type(error).__name__}: {error}") from error
        self.num_pulled += 1
        if not (isinstance(item, (tuple, list)) and len(item) == 2):
            raise PipelineError(
                f"data_iter of rank {self._rank} gave a {type(item).__name__}; expected pairs (inputs, labels), in "
                "which several inputs are a tuple"
            )
        return item

    def pass_over(self) -> None:
        """Pull what a batch that failed has left, since all ranks go on with the items behind it."""
        with suppress(Exception):  # the next batch meets the end of the data, or what is wrong with them
            while self.num_pulled < self._num_microbatches:
                next(self._data_iter)
                self.num_pulled += 1
