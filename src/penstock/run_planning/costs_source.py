"""Where the costs of a plan come from: measured, or sizes of the model's own code and the roofline of a device."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from penstock.errors import ConfigError
from penstock.execute.losses.tails import takes_tail
from penstock.run_planning.model import PlannedModel
from penstock.run_planning.model_work import ModelWork
from penstock.run_planning.state_bytes import gradient_bytes_of, optimizer_bytes_of
from penstock.searching.layouts.layout import Choices
from penstock.searching.layouts.problem import RANGE_OF_MEASURED, CostsOf, measured_costs
from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.devices import Link
from penstock.simulation.costs.devices import device as device_of
from penstock.simulation.costs.file import read_costs
from penstock.simulation.costs.layer_costs import LayerCosts
from penstock.simulation.costs.layer_work import LayerWork
from penstock.simulation.costs.roofline import CALIBRATION, CALIBRATION_RANGE, layer_costs
from penstock.train.settings.config import RunConfig
from penstock.train.settings.section import Kept


@dataclass(frozen=True, slots=True, kw_only=True)
class CostsSource:
    """Costs by the size of microbatches and the kind of checkpointing, and what is to be said of them."""

    costs_of: CostsOf
    choices: Choices
    seconds_range: tuple[float, ...]
    sequence_flops: float = 0.0
    """Floating-point operations for one sequence; 0: unknown."""
    bytes_note: str
    time_note: str


def roofline_source(work: ModelWork, device_name: str, within: Link) -> CostsSource:
    """Return the source of costs that nobody has measured: the model's own work, on the roofline of a device.

    Raises:
        ConfigError: an unknown device, operations that have no formula, or a loss in chunks.
    """
    if takes_tail(work.model.loss):
        raise ConfigError(
            "a loss in chunks cannot be counted; take it out for a plan in which all logits are held at once, or give "
            "the costs that penstock profile measures",
            key="loss.chunk",
        )
    device, model = device_of(device_name), work.model
    costs_by_key: dict[tuple[int, str], LayerCosts] = {}

    def costs_of(microbatch_size: int, checkpointing: str) -> LayerCosts:
        key = (microbatch_size, checkpointing)
        if key not in costs_by_key:
            layers = work.of(microbatch_size, cast(Kept, checkpointing))
            costs_by_key[key] = layer_costs(
                [replace(layer, gradient_bytes=gradient_bytes_of(model.precision, layer)) for layer in layers],
                device,
                link=within,
                optimizer_bytes_per_parameter=_state_bytes(layers, model),
            )
        return costs_by_key[key]

    low, high = CALIBRATION_RANGE
    return CostsSource(
        costs_of=costs_of,
        choices=Choices(),
        seconds_range=costs_of(1, "none").seconds_range,
        sequence_flops=work.sequence_flops(),
        bytes_note="as the model's own code saves them on CPUs",
        time_note=f"roofline x {CALIBRATION:g}; public runs took {low:g} to {high:g} (docs/planning.md); measure: "
        "penstock profile",
    )


def _state_bytes(layers: Sequence[LayerWork], model: PlannedModel) -> float:
    """Return the bytes of the optimizer's state of a trained parameter, which all layers have alike."""
    num_trained = sum(layer.trainable_parameters for layer in layers)
    # A gradient has the type of its parameter; frozen ones may have another.
    parameter_bytes = sum(layer.gradient_bytes for layer in layers) / max(num_trained, 1)
    return optimizer_bytes_of(model.precision, model.optimizer, parameter_bytes)


def measured_source(
    costs: LayerCosts | str | Path, config: RunConfig | None, model: PlannedModel, sequence_length: int
) -> CostsSource:
    """Return the source of measured costs; `config` is that of the run that was measured, None where it is not known.

    Raises:
        ConfigError: costs that are not per layer, or of another number of layers or tokens of a sequence.
    """
    measured = costs if isinstance(costs, LayerCosts) else _read(costs)
    if measured.num_layers != len(model.layers):
        raise ConfigError(
            f"{measured.num_layers} layers, but the model has {len(model.layers)}; give the costs of this model, "
            "which penstock profile measures",
            key="costs",
        )
    size, kind, note = 1, "none", ", taken to be of microbatches of 1 sequence"
    if config is not None:
        if config.batch.length != sequence_length:
            raise ConfigError(
                f"they were measured with sequences of batch.length = {config.batch.length} tokens, not "
                f"{sequence_length}; measure a run with batch.length = {sequence_length}, with penstock profile",
                key="costs",
            )
        size = config.batch.size // config.parallel.data // config.pipeline.microbatches
        setting = config.pipeline.activation_checkpointing
        kind = setting if isinstance(setting, str) else _one_kind(setting)
        note = f", of microbatches of {size}"
    choices = Choices(microbatch_sizes=(size,), checkpointing=(kind,))
    return CostsSource(
        costs_of=measured_costs(measured, size, kind),
        choices=choices,
        seconds_range=RANGE_OF_MEASURED,
        bytes_note=f"as {measured.source or 'the costs'} says{note}",
        time_note="measured, within 5 % expected on an idle machine; messages and exchanges as the costs say",
    )


def _read(path: str | Path) -> LayerCosts:
    costs = read_costs(Path(path))
    if isinstance(costs, Costs):
        raise ConfigError(f"{path} has costs per stage; expected those per layer of penstock profile", key="costs")
    return costs


def _one_kind(kinds: tuple[str, ...]) -> str:
    """Return the kind of all stages. Raises: ConfigError, where they differ, since the layers' costs do too."""
    if len(set(kinds)) != 1:
        raise ConfigError(
            f"the run that was measured has {', '.join(kinds)} by stage; measure one with the same kind on all stages",
            key="costs",
        )
    return kinds[0]
