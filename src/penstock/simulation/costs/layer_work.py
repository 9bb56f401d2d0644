"""What one layer does and keeps for one microbatch, counted and not timed: products, bytes moved, bytes held.

`sizing` counts it from the layer's own code; `roofline` makes seconds of it for a device.

    layer's code --sizing--> LayerWork --roofline, with a device--> LayerCosts
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from penstock.errors import ConfigError, nearest, shortened

ProductKernel = Literal["matmul", "attention", "grouped", "convolution"]
"""The kind of kernel that computes a product, of which each reaches another share of a device's peak."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Product:
    """One matrix product of a kernel: `batch` times [rows, inner] x [inner, columns].

    An attention kernel is several products in a row, with the heads of all sequences as their batch. A grouped kernel
    is a batch of its groups, each with the mean of their rows (for a weight gradient, of their inner dimensions), so
    that the matrix of every group is read and fills tiles of its own. A convolution is the product that an im2col would
    make of it.
    """

    rows: int
    columns: int
    inner: int
    batch: int = 1
    data_type: str
    """The type of the two matrices, in torch's words: "bfloat16", "float16", "float32"."""
    kernel: ProductKernel = "matmul"
    computed_share: float = 1.0
    """The share of the result that is computed: about half for causal attention."""

    def __post_init__(self) -> None:
        _require_sizes(self, ("rows", "columns", "inner", "batch"))
        if self.kernel not in get_args(ProductKernel):
            kernels = get_args(ProductKernel)
            known = f"expected one of {', '.join(kernels)}.{nearest(self.kernel, kernels)}"
            raise ConfigError(f"{shortened(self.kernel)}; {known}", key="kernel")
        if not 0 < self.computed_share <= 1:
            problem = f"{shortened(self.computed_share)}; expected a share of the product, above 0 and at most 1"
            raise ConfigError(problem, key="computed_share")

    @property
    def flops(self) -> float:
        """Multiplications and additions that are computed, each counted as one operation."""
        return 2.0 * self.rows * self.columns * self.inner * self.batch * self.computed_share


@dataclass(frozen=True, slots=True, kw_only=True)
class PassWork:
    """The work of one forward, one input gradient or one weight gradient of a layer."""

    products: tuple[Product, ...] = ()
    moved_bytes: int = 0
    """Bytes that the kernels read and write that are no products, such as norms, activations and sums."""
    num_kernels: int = 0
    """Kernels that are launched, those of products among them."""
    unknown: tuple[str, ...] = ()
    """Names of operations that cost work and for which there is no formula."""

    def __post_init__(self) -> None:
        _require_sizes(self, ("moved_bytes", "num_kernels"))

    @property
    def flops(self) -> float:
        """Multiplications and additions of all products, each counted as one operation."""
        return math.fsum(product.flops for product in self.products)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """The work of one layer for one microbatch, and the bytes that it makes and keeps; sizes are those of one device.

    Where the layer is checkpointed, the work that its backward does again is part of `backward_input`, and
    `activation_bytes` are those that the forward really keeps.
    """

    name: str
    forward: PassWork
    backward_input: PassWork
    backward_weight: PassWork
    num_parameters: int
    trainable_parameters: int
    """Parameters that get a gradient and are updated; the optimizer keeps its state for these only."""
    parameter_bytes: int
    """Bytes of parameters and buffers."""
    gradient_bytes: int
    activation_bytes: int
    """Bytes that a forward keeps until its backward, its inputs among them."""
    weight_context_bytes: int
    """Bytes that stay from the input gradient until the weight gradient."""
    message_bytes: int
    """Bytes of the layer's output, which are those of its gradient."""
    checkpoint_bytes: int
    """Bytes of the inputs, which a forward keeps that is to run again."""
    forward_workspace_bytes: int
    """Bytes that a forward takes beside what it keeps, and gives back at its end."""
    backward_workspace_bytes: int
    """The most bytes that a backward, or a part of one, takes beside what it frees, and gives back at its end."""

    def __post_init__(self) -> None:
        sizes = [size.name for size in fields(self) if size.name.endswith("_bytes")]
        _require_sizes(self, [*sizes, "num_parameters", "trainable_parameters"])
        if self.trainable_parameters > self.num_parameters:
            problem = f"{self.trainable_parameters} are more than the layer's {self.num_parameters} parameters"
            raise ConfigError(f"layer {shortened(self.name)}: {problem}", key="trainable_parameters")


def _require_sizes(value: object, names: Sequence[str]) -> None:
    """Refuse fields that are no whole number of 0 or more."""
    for name in names:
        size = getattr(value, name)
        if not isinstance(size, int) or size < 0:
            raise ConfigError(f"{shortened(size)}; expected a whole number, 0 or more", key=name)
