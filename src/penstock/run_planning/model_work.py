"""The work of a model's layers for any size of microbatches, counted for two sizes alone.

A dimension of a product, and a number of bytes, is what a sequence adds, times the sequences, and what is there without
any. So two counts give all others; each takes seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from penstock.run_planning.model import PlannedModel
from penstock.simulation.costs.layer_work import LayerWork, PassWork, Product
from penstock.sizing.layer_work import layer_work
from penstock.train.settings.section import Kept

PASSES = ("forward", "backward_input", "backward_weight")
SIZES_OF_PRODUCT = ("rows", "columns", "inner", "batch")


@dataclass(slots=True, eq=False)
class ModelWork:
    """Counts the work of a model's layers when it is asked for."""

    model: PlannedModel
    sequence_length: int
    tell: Callable[[str], None]
    _counted: dict[tuple[int, Kept], list[LayerWork]] = field(default_factory=dict)

    def of(self, microbatch_size: int, checkpointing: Kept) -> list[LayerWork]:
        """Return the work of each layer for one microbatch. Raises: ConfigError, as `sizing.layer_work`."""
        if microbatch_size <= 2:
            return self._count(microbatch_size, checkpointing)
        one, two = (self._count(size, checkpointing) for size in (1, 2))
        pairs = zip(one, two, strict=True)
        return [extrapolated(single, double, microbatch_size) for single, double in pairs]

    def sequence_flops(self) -> float:
        """Return the floating-point operations of forward and backward for one sequence, without what runs again."""
        passes = [getattr(layer, name) for layer in self.of(1, "none") for name in PASSES]
        return float(sum(product.flops for layer_pass in passes for product in layer_pass.products))

    def _count(self, microbatch_size: int, checkpointing: Kept) -> list[LayerWork]:
        key = (microbatch_size, checkpointing)
        if key not in self._counted:
            self.tell(f"counts what layers do and keep: microbatches of {microbatch_size}, checkpointing {key[1]}")
            self._counted[key] = layer_work(
                self.model.layers,
                sequence_length=self.sequence_length,
                microbatch=microbatch_size,
                activation_checkpointing=checkpointing,
                loss=self.model.loss,
            )
        return self._counted[key]


def extrapolated(one: LayerWork, two: LayerWork, microbatch_size: int) -> LayerWork:
    """Return the work of a layer for more sequences than two, from that for one and that for two."""
    sizes = [size.name for size in fields(LayerWork) if size.name.endswith("_bytes")]
    changes: dict[str, Any] = _sizes(one, two, sizes, microbatch_size)
    changes |= {name: _pass(getattr(one, name), getattr(two, name), microbatch_size) for name in PASSES}
    return replace(one, **changes)


def _pass(one: PassWork, two: PassWork, microbatch_size: int) -> PassWork:
    products: Sequence[Product] = one.products
    if len(one.products) == len(two.products):
        products = tuple(
            replace(single, **_sizes(single, double, SIZES_OF_PRODUCT, microbatch_size))
            for single, double in zip(one.products, two.products, strict=True)
        )
    counts = _sizes(one, two, ("moved_bytes", "num_kernels"), microbatch_size)
    return replace(one, products=tuple(products), **counts)


def _sizes(one: object, two: object, names: Sequence[str], microbatch_size: int) -> dict[str, Any]:
    """Return the sizes of these names for a number of sequences, on the line through those for one and for two."""
    pairs = {name: (getattr(one, name), getattr(two, name)) for name in names}
    return {
        name: max(0, single + (microbatch_size - 1) * (double - single)) for name, (single, double) in pairs.items()
    }
