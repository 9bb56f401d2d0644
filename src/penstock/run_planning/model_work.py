"""The work of a model's layers for any size of microbatches up to four, counted for one and for four alone.

Each count takes seconds. What lies between two counts is read off a line, which is never below the truth:

    bytes    |               x    products, and what each sequence keeps, grow as the line does;
             |       o       .    what the tokens of all sequences keep of each other, such as scores
             |   o   '       .    or places at experts, grows faster, and lies below the line
             |   x           .
             +---1---2---3---4    sequences: x are counted, o are read off
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch

from penstock.run_planning.model import PlannedModel
from penstock.simulation.costs.layer_work import LayerWork, PassWork
from penstock.sizing.layer_work import layer_work
from penstock.train.optimizing.precision import Precision
from penstock.train.settings.section import Kept

PASSES = ("forward", "backward_input", "backward_weight")
SIZES_OF_PRODUCT = ("rows", "columns", "inner", "batch")
LEAST, MOST = 1, 4
"""Sequences of the two microbatches that are counted for all sizes between."""


@dataclass(slots=True, eq=False)
class ModelWork:
    """Counts the work of a model's layers when it is asked for."""

    model: PlannedModel
    sequence_length: int
    tell: Callable[[str], None]
    _counted: dict[tuple[int, Kept], list[LayerWork]] = field(default_factory=dict)

    def of(self, microbatch_size: int, checkpointing: Kept) -> list[LayerWork]:
        """Return the work of each layer for one microbatch. Raises: ConfigError, as `sizing.layer_work`."""
        if LEAST < microbatch_size < MOST:
            least, most = (self._count(size, checkpointing) for size in (LEAST, MOST))
            if all(map(_are_alike, least, most)):
                return [_between(*pair, microbatch_size) for pair in zip(least, most, strict=True)]
        return self._count(microbatch_size, checkpointing)

    def sequence_flops(self) -> float:
        """Return the floating-point operations of forward and backward for one sequence, without what runs again."""
        passes = [getattr(layer, name) for layer in self.of(1, "none") for name in PASSES]
        return float(sum(product.flops for layer_pass in passes for product in layer_pass.products))

    def _count(self, microbatch_size: int, checkpointing: Kept) -> list[LayerWork]:
        key = (microbatch_size, checkpointing)
        if key not in self._counted:
            self.tell(f"counts what layers do and keep: microbatches of {microbatch_size}, checkpointing {key[1]}")
            with Precision(self.model.precision).region(torch.device("cpu")):
                self._counted[key] = layer_work(
                    self.model.layers,
                    sequence_length=self.sequence_length,
                    microbatch=microbatch_size,
                    activation_checkpointing=checkpointing,
                    loss=self.model.loss,
                )
        return self._counted[key]


def _are_alike(least: LayerWork, most: LayerWork) -> bool:
    """Whether a layer computes the same products for both sizes, none of which shrinks in any dimension.

    They differ where a layer runs once for each sequence, or where weights of larger microbatches wait for W.
    """
    for name in PASSES:
        small_products, large_products = getattr(least, name).products, getattr(most, name).products
        if len(small_products) != len(large_products):
            return False
        for small, large in zip(small_products, large_products, strict=True):
            if any(getattr(small, size) > getattr(large, size) for size in SIZES_OF_PRODUCT):
                return False
    return True


def _between(least: LayerWork, most: LayerWork, microbatch_size: int) -> LayerWork:
    """Return the work of a layer for a size on the line through its work for the least size and for the most."""

    def read_off(one: object, other: object, names: Sequence[str]) -> dict[str, Any]:
        pairs = {name: (getattr(one, name), getattr(other, name)) for name in names}
        steps, all_steps = microbatch_size - LEAST, MOST - LEAST
        return {
            name: -(-(small * (all_steps - steps) + large * steps) // all_steps)
            for name, (small, large) in pairs.items()
        }

    def pass_between(one: PassWork, other: PassWork) -> PassWork:
        pairs = zip(one.products, other.products, strict=True)
        products = tuple(replace(pair[0], **read_off(*pair, SIZES_OF_PRODUCT)) for pair in pairs)
        return replace(one, products=products, **read_off(one, other, ("moved_bytes", "num_kernels")))

    sizes = [size.name for size in fields(LayerWork) if size.name.endswith("_bytes")]
    passes: dict[str, Any] = {name: pass_between(getattr(least, name), getattr(most, name)) for name in PASSES}
    return replace(least, **read_off(least, most, sizes), **passes)
