"""Costs: what instructions take, and where that is known from."""
