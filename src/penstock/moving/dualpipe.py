"""For users of DualPipe: the store into which autograd functions put what computes their weight gradients.

Change the import and keep the functions. docs/moving/dualpipe.md has the rest.
"""

from penstock.execute.split.own_weight_gradients import WEIGHT_GRADIENTS

WeightGradStore = WEIGHT_GRADIENTS
"""`put(function)` has it called in `W`, `enabled` says whether `I` runs; DualPipe's own calls of the rest are gone."""
