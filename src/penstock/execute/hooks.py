"""What instructions other than computations and messages call: reductions and the optimizer step."""

from collections.abc import Callable
from dataclasses import dataclass

from penstock.execute.calls import Call
from penstock.ir.instruction import Instruction, Op


@dataclass(slots=True, eq=False)
class Hooks:
    """The calls of one rank."""

    reduce_stage: Callable[[int], None]
    """Stage index; its gradients are whole."""
    reduce_tied: Callable[[int], None]
    """Index of the tied group."""
    optimizer_step: Callable[[], None]


def call_of(instruction: Instruction, hooks: Hooks) -> Call:
    """Return what an instruction calls; parameters are not sharded, so gathering and dropping them is nothing."""
    calls: dict[Op, Call] = {
        Op.UNSHARD: lambda: None,
        Op.RESHARD: lambda: None,
        Op.REDUCE_GRADIENT: lambda: hooks.reduce_stage(instruction.stage),
        Op.REDUCE_TIED: lambda: hooks.reduce_tied(instruction.peer),
        Op.OPTIMIZER_STEP: hooks.optimizer_step,
    }
    return calls[instruction.op]
