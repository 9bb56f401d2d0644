"""The types that a run computes in, and how its layers, gradients and losses follow from them."""

import time
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor, nn
from torch.amp import GradScaler

from penstock.models import LayerSpec
from penstock.train.settings.sections import ModelSection, PrecisionSection

_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
"""They take inputs of fewer bits than their weights, but no statistics of more; and averages need the bits."""
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16}
_NUM_PRODUCTS = 5
"""The number of matrix products of which the fastest counts: other processes may disturb the rest."""
_SIDE = 128
"""Rows and columns of the matrices: some milliseconds where a CPU emulates the type."""
_SLOWER = 1.5
"""The seconds of a type, in those of float32, from which on a note says so; the same work varies by less."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The types that `[precision]` asks for."""

    options: PrecisionSection = field(default_factory=PrecisionSection)

    @property
    def dtype(self) -> torch.dtype | None:
        """The type to compute in; None where the model's own type is."""
        return _DTYPES.get(self.options.compute)

    @property
    def has_main_weights(self) -> bool:
        """Whether weights are rounded copies of float32 main weights."""
        return self.dtype is not None and not self.options.autocast

    @property
    def scales_losses(self) -> bool:
        """Whether gradients would underflow without a scale."""
        return self.dtype is torch.float16

    def cast(self, layers: Iterable[LayerSpec]) -> list[LayerSpec]:
        """Return layers whose parameters are in the type to compute in; buffers stay as they are.

        A BatchNorm is all in float32, its running statistics too.
        """
        if self.dtype is None or not self.has_main_weights:
            return list(layers)
        return [replace(layer, build=partial(_built_in, self.dtype, layer.build)) for layer in layers]

    def region(self, device: torch.device) -> AbstractContextManager[object]:
        """Return the context in which forwards and backwards run."""
        if not self.options.autocast:
            return nullcontext()
        return torch.autocast(device.type, self.dtype)

    def describe(self, model: ModelSection) -> str:
        """Say in a few words what is computed in which type."""
        if self.dtype is None:
            return model.dtype
        name = self.options.compute
        return f"{name} by autocast" if self.options.autocast else f"{name} with float32 main weights"


class LossScaler(GradScaler):
    """Scales the loss of a batch to its share in an optimizer step; with float16, also against underflow.

    The share may differ from batch to batch. Disabled, as a `GradScaler` is, it does the first only.
    """

    share = 1.0
    """The share of the batch that runs in the loss of its optimizer step."""

    def scale_mean(self, loss: Tensor) -> Tensor:
        """Return the loss times the scale and the share."""
        scaled: Tensor = self.scale(loss)
        return scaled if self.share == 1 else scaled * self.share


def loss_scaler(precision: Precision, device: torch.device) -> LossScaler:
    """Make the scaler of one rank."""
    options = precision.options
    return LossScaler(
        device.type,
        init_scale=options.loss_scale,
        growth_interval=options.loss_scale_growth_steps,
        enabled=precision.scales_losses,
    )


def note_on_speed(
    precision: Precision, device: torch.device, product_s: Callable[[torch.dtype], float] | None = None
) -> str:
    """Return what to tell users whose CPU computes slower in fewer bits than in float32; empty where it does not.

    Both types are measured by a small matrix product: which CPUs and libraries emulate a type changes with torch's
    version. `product_s` returns the seconds of one product.
    """
    if precision.dtype is None or device.type != "cpu":
        return ""
    measure = product_s or _product_s
    factor = measure(precision.dtype) / measure(torch.float32)
    if factor < _SLOWER:
        return ""
    return (
        f"{precision.options.compute} is slower than float32 on this CPU: {factor:.1f} times for a matrix product. "
        "Leave precision.compute out to train faster"
    )


def _product_s(dtype: torch.dtype) -> float:
    matrix = torch.ones(_SIDE, _SIDE, dtype=dtype, device="cpu")
    durations_s = []
    with torch.no_grad():
        for _ in range(_NUM_PRODUCTS):
            begin_s = time.perf_counter()
            torch.mm(matrix, matrix)
            durations_s.append(time.perf_counter() - begin_s)
    return min(durations_s)


def _built_in(dtype: torch.dtype, build: Callable[[], nn.Module]) -> nn.Module:
    module = build()
    for submodule in module.modules():
        is_norm = isinstance(submodule, _BATCH_NORMS)
        for parameter in submodule.parameters(recurse=False):
            parameter.data = parameter.data.to(torch.float32 if is_norm else dtype)
        for name, buffer in submodule.named_buffers(recurse=False) if is_norm else ():
            if buffer.is_floating_point():
                setattr(submodule, name, buffer.float())
    return module
