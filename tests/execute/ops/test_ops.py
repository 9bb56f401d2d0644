"""Every operation has one handler."""

from penstock.execute.ops import HANDLERS
from penstock.ir.operations import Op


def test_every_operation_has_a_handler_of_its_own():
    assert set(HANDLERS) == set(Op)
    assert len(set(HANDLERS.values())) == len(Op)
