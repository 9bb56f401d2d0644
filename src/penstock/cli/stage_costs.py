"""Costs of a schedule's stages: costs per stage as they are, costs per layer summed over the layers of each stage."""

from dataclasses import replace

from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.partition.split import split_over
from penstock.simulation import Costs, LayerCosts


def stage_costs(costs: Costs | LayerCosts, table: Schedule | Program) -> Costs:
    """Return what the stages of a schedule or program cost.

    Costs per layer are split into stages of as many layers each as can be, as `Pipeline` does, and are shared by the
    slices of a microbatch. Of the channels that differ, those count whose ranks there are.

    Raises:
        PartitionError: if there are more stages than layers.
        ConfigError: if the costs do not say how many layers there are.
    """
    if isinstance(costs, Costs):
        return costs
    found = costs.of_stages(split_over(table.placement, costs.num_layers))
    ranks = range(table.num_ranks)
    known = tuple(each for each in found.channels if each.sender in ranks and each.receiver in ranks)
    return replace(found, channels=known).of_share(1 / table.num_slices)
