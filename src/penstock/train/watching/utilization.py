"""Model FLOPs utilisation (MFU): the FLOPs that the model needs for its tokens, as a share of what the devices can do.

Counted are the matrix products of forward and backward, with the attention to all tokens, as arXiv 2204.02311 does in
appendix B. Forwards that run again for activation checkpointing do not count.
"""

from dataclasses import dataclass

import torch

from penstock.execute.accelerator import is_queued, name_of
from penstock.simulation.costs.devices import device_of_torch
from penstock.simulation.costs.transformer import DataType, LayerGroup, Transformer, head_of, layer_of
from penstock.train.settings.config import RunConfig

TYPES: dict[str, DataType] = {"bfloat16": "bf16", "float16": "fp16"}


@dataclass(frozen=True, slots=True)
class Utilization:
    """The meaning of tokens per second for the devices of a run."""

    flops_per_token: float
    flops_per_s: float
    """The peak of all devices together."""

    def share(self, tokens_per_s: float) -> float:
        """Return the model FLOPs utilisation."""
        return tokens_per_s * self.flops_per_token / self.flops_per_s


def utilization_of(config: RunConfig, vocabulary: int, device: torch.device) -> Utilization | None:
    """Return the utilisation of a run whose ranks have devices like this one; None where their peak is not known."""
    data_type = _data_type(config)
    if not is_queued(device) or data_type is None or config.model.place:
        return None
    device_model = device_of_torch(name_of(device))
    if device_model is None:
        return None
    return Utilization(flops_per_token(config, vocabulary), config.num_processes * device_model.flops_per_s(data_type))


def flops_per_token(config: RunConfig, vocabulary: int) -> float:
    """Return the FLOPs of forward and backward for one token of the decoder."""
    model = config.model
    transformer = Transformer(
        num_layers=model.layers,
        hidden=model.width,
        num_heads=model.heads,
        num_key_value_heads=model.key_value_heads,
        feed_forward=model.hidden,
        is_gated=True,
        vocabulary=vocabulary,
        sequence=config.batch.length,
    )
    return (model.layers * _flops(layer_of(transformer)) + _flops(head_of(transformer))) / config.batch.length


def _flops(part: LayerGroup) -> float:
    return part.forward_flops + part.backward_input_flops + part.backward_weight_flops


def _data_type(config: RunConfig) -> DataType | None:
    """Return the type of matrix products; None where no device's figure is of it."""
    if config.precision.compute != "model":
        return TYPES[config.precision.compute]
    if config.model.dtype == "float32":
        return "fp32" if torch.get_float32_matmul_precision() == "highest" else "tf32"
    return TYPES.get(config.model.dtype)
