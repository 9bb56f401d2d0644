"""Flags by the numbers of operations: who takes part in a collective, and what makes weights, gradients and data."""

from penstock.ir.operations import Group, Value, flags_where

JOINS_RANKS = flags_where(lambda operation: operation.group in (Group.TIED, Group.PIPELINE))
"""The collectives whose members are ranks of one pipeline, and wait for each other."""
UPDATES_WEIGHTS = flags_where(lambda operation: operation.group is Group.PIPELINE and operation.needs_backward)
IS_BARRIER = JOINS_RANKS & flags_where(lambda operation: not operation.needs_backward)
"""The collectives that do nothing but wait: the n-th ones of all ranks end together."""
IS_REDUCTION = flags_where(lambda operation: any(read.value is Value.GRADIENT for read in operation.reads))
REDUCES_REPLICAS = IS_REDUCTION & flags_where(lambda operation: operation.group is Group.REPLICAS)
"""The reductions of a stage over its replicas; the other reductions are of tied stages."""
GATHERS = flags_where(lambda operation: Value.WEIGHTS in operation.makes)
NEEDS_SUMS = JOINS_RANKS & ~IS_BARRIER
"""The collectives that wait for the reductions over replicas which their rank has launched before them."""
DROPS = flags_where(lambda operation: Value.WEIGHTS in operation.frees)
LOADS_DATA = flags_where(lambda operation: Value.DATA in operation.makes)
MAKES_GRADIENT = flags_where(lambda operation: Value.GRADIENT in operation.makes)
"""Computations that add to the gradients which reductions take."""
