"""Where the costs of a plan come from: measured, or sizes of the model's own code and the roofline of a device."""

from dataclasses import dataclass
from pathlib import Path

from penstock.errors import ConfigError
from penstock.run_planning.model import PlannedModel
from penstock.searching.layouts.layout import Choices
from penstock.searching.layouts.problem import RANGE_OF_MEASURED, CostsOf, measured_costs
from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.file import read_costs
from penstock.simulation.costs.layer_costs import LayerCosts
from penstock.train.settings.config import RunConfig


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


def measured_source(costs: LayerCosts | str | Path, config: RunConfig | None, model: PlannedModel) -> CostsSource:
    """Return the source of measured costs; `config` is that of the run that was measured, None where it is not known.

    Raises:
        ConfigError: costs that are not per layer, or of another number of layers.
    """
    layer_costs = costs if isinstance(costs, LayerCosts) else _read(costs)
    if layer_costs.num_layers != len(model.layers):
        raise ConfigError(
            f"{layer_costs.num_layers} layers, but the model has {len(model.layers)}; give the costs of this model, "
            "which penstock profile measures",
            key="costs",
        )
    size, kind, note = 1, "none", ", taken to be of microbatches of 1 sequence"
    if config is not None:
        size = config.batch.size // config.parallel.data // config.pipeline.microbatches
        setting = config.pipeline.activation_checkpointing
        kind = setting if isinstance(setting, str) else _one_kind(setting)
        note = f", of microbatches of {size}"
    choices = Choices(microbatch_sizes=(size,), checkpointing=(kind,))
    return CostsSource(
        costs_of=measured_costs(layer_costs, size, kind),
        choices=choices,
        seconds_range=RANGE_OF_MEASURED,
        bytes_note=f"as {layer_costs.source or 'the costs'} says{note}",
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
