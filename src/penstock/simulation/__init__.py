"""Simulation: costs, and the timeline that a program has under them."""

from penstock.simulation.costs.costs import Costs
from penstock.simulation.costs.layer_costs import LayerCosts
from penstock.simulation.engine import simulate

__all__ = ["Costs", "LayerCosts", "simulate"]
