"""Simulation: costs, and the timeline that a program has under them."""

from penstock.simulation.costs.costs import Costs
from penstock.simulation.engine import simulate

__all__ = ["Costs", "simulate"]
