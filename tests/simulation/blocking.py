"""Measured steps in which reductions over replicas hold their rank up, as a `reduce_stage` and DDP around layers do."""

from dataclasses import replace
from types import MappingProxyType

from penstock.ir.instruction import Op
from tests.simulation.events import Events, entry
from tests.simulation.slow_data import SlowDataEvents, with_slow_data


class BlockingEvents(Events):
    """A reduction over replicas keeps its rank busy."""

    def __init__(self, program, costs):
        super().__init__(program, replace(costs, reduce_s=(0.0,)))
        self.reduce_s = costs.reduce_s

    def work_s(self, row, computes, rank):
        if self.program.op[row] == Op.REDUCE_GRADIENT:
            return entry(self.reduce_s, self.program.stage[row])
        return super().work_s(row, computes, rank)


class SlowBlockingEvents(SlowDataEvents, BlockingEvents):
    """The same with waits for data."""


def with_blocking_reductions(program, costs, slow=MappingProxyType({})):
    """The measured step of a program; `slow` as `with_slow_data` takes it."""
    return replace(with_slow_data(program, costs, slow, SlowBlockingEvents), source="measured")
