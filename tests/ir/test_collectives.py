"""The flags of collectives, by name."""

from penstock.ir import collectives
from penstock.ir.operations import Op


def test_the_flags_say_what_each_operation_does():
    names = (
        "JOINS_RANKS",
        "IS_BARRIER",
        "NEEDS_SUMS",
        "IS_REDUCTION",
        "REDUCES_REPLICAS",
        "GATHERS",
        "DROPS",
        "LOADS_DATA",
        "MAKES_GRADIENT",
    )

    assert {name: [op.name for op in Op if getattr(collectives, name)[op]] for name in names} == {
        "JOINS_RANKS": ["REDUCE_TIED", "OPTIMIZER_STEP", "BARRIER"],
        "IS_BARRIER": ["BARRIER"],
        "NEEDS_SUMS": ["REDUCE_TIED", "OPTIMIZER_STEP"],
        "IS_REDUCTION": ["REDUCE_GRADIENT", "REDUCE_TIED"],
        "REDUCES_REPLICAS": ["REDUCE_GRADIENT"],
        "GATHERS": ["UNSHARD"],
        "DROPS": ["RESHARD"],
        "LOADS_DATA": ["LOAD"],
        "MAKES_GRADIENT": ["BACKWARD", "BACKWARD_WEIGHT"],
    }
