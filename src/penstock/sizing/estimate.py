"""`estimate`: what the layers of a model cost on a device, before anybody has run them."""

from collections.abc import Sequence
from typing import Any

import torch

from penstock.errors import ConfigError, described
from penstock.execute.losses.loss import Loss
from penstock.simulation.costs import devices
from penstock.simulation.costs.layer_costs import LayerCosts
from penstock.simulation.costs.roofline import layer_costs
from penstock.sizing.layer_work import layer_work
from penstock.train.settings.section import Kept


def estimate(
    model: Any,
    *,
    sequence_length: int,
    microbatch: int = 1,
    device: str | devices.Device,
    link: str | devices.Link | None = None,
    activation_checkpointing: Kept | Sequence[Kept] = "none",
    split: Sequence[int] | None = None,
    loss: Loss | None = None,
    data_type: torch.dtype | str | None = None,
    optimizer_bytes_per_parameter: float = 8.0,
) -> LayerCosts:
    """Return the seconds and bytes of each layer for one microbatch, from the model's code and a data sheet.

        costs = ps.estimate("Meta-Llama-3-8B", sequence_length=4096, device="h100-sxm")
        plan = ps.search(costs, ranks=8, microbatches=32)

    `model` is a folder of transformers, of which config.json suffices, a config or model of it, or layers as `Pipeline`
    takes them. Nothing of its size is allocated, and no device is needed. `microbatch` is the number of its sequences,
    and `sequence_length` that of their tokens. `device` and `link` are names in `devices.toml`, or descriptions; the
    link is by default the one between two devices of a node. `activation_checkpointing` is "none", "full" or
    "selective", or one of them for each layer. `split` is the number of layers of each stage: what layers of a stage
    share counts once. `loss` is by default the model's own, and `data_type` of parameters as the layers have them. The
    optimizer keeps 8 bytes for each trained parameter, as Adam does, unless it is said otherwise.

    Bytes are those that a pipeline reports on CPU kernels. Seconds are an estimate: public runs took the range that the
    costs carry. `penstock profile` measures them.

    Raises:
        ConfigError: an unknown device or link; no layers, an unknown kind, type or split; a first layer that takes no
            tokens, a sequence beyond the model's positions; a layer that decides by the values of its inputs, or has
            operations without a formula.
        PartitionError: a layer cannot be built.
    """
    described_device = device if isinstance(device, devices.Device) else devices.device(_name(device, "device"))
    link = described_device.link_within_node if link is None else link
    described_link = link if isinstance(link, devices.Link) else devices.link(_name(link, "link"))
    work = layer_work(
        model,
        sequence_length=sequence_length,
        microbatch=microbatch,
        activation_checkpointing=activation_checkpointing,
        split=split,
        loss=loss,
        data_type=data_type,
    )
    return layer_costs(
        work, described_device, link=described_link, optimizer_bytes_per_parameter=optimizer_bytes_per_parameter
    )


def _name(value: object, key: str) -> str:
    if not isinstance(value, str):
        raise ConfigError(
            f"{described(value)}; expected a name, or a description of penstock.simulation.costs.devices", key=key
        )
    return value
