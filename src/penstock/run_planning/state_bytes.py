"""The bytes of gradients and optimizer state, as a run of some precision and optimizer keeps them."""

import torch
from torch import nn

from penstock.simulation.costs.layer_work import LayerWork
from penstock.train.optimizing.optim import build_optimizer, check_optimizer
from penstock.train.optimizing.precision import Precision
from penstock.train.settings.sections import OptimizerSection, PrecisionSection

MAIN_BYTES = 4
"""Of a main weight, a main gradient, and a moment beside them: all of them are float32."""
_SIDE = 256
"""Rows and columns of the matrix on which an optimizer shows what it keeps."""


def gradient_bytes_of(precision: PrecisionSection, layer: LayerWork) -> int:
    """Return the bytes of the gradients of a layer, of which it has those of its own parameters."""
    if Precision(precision).has_main_weights:
        return MAIN_BYTES * layer.trainable_parameters
    return layer.gradient_bytes


def optimizer_bytes_of(precision: PrecisionSection, optimizer: OptimizerSection, parameter_bytes: float) -> float:
    """Return the bytes of the main weight, where there is one, and of the optimizer's state of one parameter.

    `parameter_bytes` are those of the parameter itself. Raises: ConfigError, for an optimizer that cannot train.
    """
    check_optimizer(optimizer)
    matrix = nn.Parameter(torch.ones(_SIDE, _SIDE))
    torch.autograd.backward(matrix.sum())
    torch_optimizer = build_optimizer([("matrix", matrix)], optimizer)
    torch_optimizer.step()
    kept = [value for value in torch_optimizer.state[matrix].values() if isinstance(value, torch.Tensor)]
    # Numbers of steps are tensors, too, without dimensions.
    values_per_parameter = sum(tensor.numel() for tensor in kept if tensor.dim()) / matrix.numel()
    if Precision(precision).has_main_weights:
        return MAIN_BYTES * (1 + values_per_parameter)
    return parameter_bytes * values_per_parameter
