"""Costs of a schedule's stages: costs per stage as they are, costs per layer summed over the layers of each stage."""

from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.partition.split import split_over
from penstock.simulation import Costs, LayerCosts


def stage_costs(costs: Costs | LayerCosts, table: Schedule | Program) -> Costs:
    """Return what the stages of a schedule or program cost.

    Layers are split evenly over the stages, as `Pipeline` does.

    Raises:
        PartitionError: if there are more stages than layers.
        ConfigError: if the costs do not say how many layers there are.
    """
    if isinstance(costs, Costs):
        return costs
    return costs.of_table(table, split_over(table.placement, costs.num_layers))
