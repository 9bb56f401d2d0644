"""Simulation: costs, and the timeline that a program has under them."""

from penstock.simulate.costs.costs import Costs
from penstock.simulate.engine import simulate

__all__ = ["Costs", "simulate"]
