"""A trace counts kernels, the bytes that they move, and names what it does not know."""

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.sizing.trace import Trace
from penstock.sizing.undocumented import FakeTensors

FLOAT = 4


def traced(function, *shapes):
    with FakeTensors().making():
        inputs = [torch.empty(shape) for shape in shapes]
    trace = Trace()
    with trace, trace.part() as part:
        function(*inputs)
    return part.work(), trace


def test_elementwise_operations_move_what_they_read_and_write():
    work, _ = traced(lambda x: (x * 2).add_(1), (10, 10))

    assert work.num_kernels == 2
    assert work.moved_bytes == FLOAT * 100 * 4


def test_views_and_empty_memory_move_nothing():
    work, _ = traced(lambda x: (x.view(-1)[5:].t(), torch.empty_like(x)), (10, 10))

    assert (work.num_kernels, work.moved_bytes) == (0, 0)


def test_an_expanded_operand_is_read_once():
    work, _ = traced(lambda row, x: row.expand(10, 10) + x, (1, 10), (10, 10))

    assert work.moved_bytes == FLOAT * (10 + 200)


def test_a_table_is_read_where_it_is_looked_up():
    tokens = torch.zeros(3, dtype=torch.int64)

    work, _ = traced(lambda table: nn.functional.embedding(tokens, table), (1000, 10))

    assert work.moved_bytes == FLOAT * 10 * 3 * 2


def test_a_product_counts_its_operations_and_not_its_bytes():
    work, _ = traced(torch.mm, (8, 4), (4, 6))

    assert (work.flops, work.moved_bytes, work.num_kernels) == (2 * 8 * 4 * 6, 0, 1)


def test_what_has_no_formula_is_named_once():
    work, _ = traced(lambda x: (torch.linalg.qr(x), torch.linalg.qr(x)), (8, 8))

    assert work.unknown == ("aten::linalg_qr",)


def test_operations_on_real_tensors_are_no_work():
    trace = Trace()
    with trace, trace.part() as part:
        torch.ones(100, 100).tril()

    assert part.work().num_kernels == 0
    assert trace.kind == []


def test_the_kind_of_a_layer_is_its_operations_with_shapes_but_without_factors():
    kinds = [
        traced(lambda x, factor=factor: x * factor, shape)[1].kind for factor, shape in ((2.0, 3), (3.0, 3), (2.0, 4))
    ]

    assert kinds[0] == kinds[1] != kinds[2]


def test_rows_beyond_a_table_are_refused():
    positions = torch.arange(12)

    with pytest.raises(ConfigError, match="row 11 of a table of 8 rows"):
        traced(lambda table: nn.functional.embedding(positions, table), (8, 4))
