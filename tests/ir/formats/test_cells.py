"""Cells: what every text of a schedule shares."""

import pytest

from penstock.errors import FormatError
from penstock.ir.formats.cells import MAX_CELLS, cannot_express, infer_layout, parse_cells
from penstock.placement import Placement


def fail(problem, rank, cell, offset):
    return FormatError(problem, line=rank + 1, column=100 * cell + offset)


def layout_of(*ranks):
    return infer_layout(parse_cells([rank.split() for rank in ranks], fail), fail)


def test_a_row_knows_its_cell_behind_pairs():
    cells = parse_cells([["0F0"], ["(1F3;1B4)OVERLAP_F_B", "1F5"]], fail)

    assert [cells.place(row) for row in range(4)] == [(0, 0, 0), (1, 0, 0), (1, 0, 0), (1, 1, 0)]


@pytest.mark.parametrize(
    ("cell", "offset", "told"),
    [
        ("2F0junk", 3, "expected stage, type, microbatch"),
        ("0f0", 1, "is not an action"),
        ("-1F0", 0, "is not an action"),
        ("0F", 2, "ends without its microbatch; expected such as 0F0"),
        ("0REDUCE_TIED", 12, "ends without its tied group"),
        ("0UNSHARD3", 8, "has a microbatch; expected 0UNSHARD alone"),
        ("0STEP.1", 5, "has a slice"),
        ("0BW3", 2, "old name BW of the whole backward; expected 0B3"),
        ("0SEND_FF0", 7, "Did you mean 'SEND_F'"),
        ("99999999999F0", 10, "too large a number"),
        ("0F0.32768", 0, "at most 2147483647, and 32767 for a slice"),
        ("٢F0", 0, "is not an action"),
        ("()OVERLAP_F_B", 0, "two actions and no nesting"),
        ("(0F0;(0F1;0B0)OVERLAP_F_B)OVERLAP_F_B", 0, "no nesting"),
        ("(0F0;0B1)OVERLAP", 0, "(A;B)OVERLAP_F_B"),
        ("(0F0;0B1x)OVERLAP_F_B", 8, "is not an action"),
        ("(0F0;0SEND_F1)OVERLAP_F_B", 5, "cannot overlap"),
        ("x" * 1000, 0, "'" + "x" * 60 + "...'"),
    ],
)
def test_what_does_not_fit_whole_is_refused_with_its_character(cell, offset, told):
    with pytest.raises(FormatError) as caught:
        parse_cells([["0F0"], ["0F0", cell]], fail)

    assert told in str(caught.value)
    assert (caught.value.line, caught.value.column) == (2, 100 + offset)


def test_more_cells_than_the_cap_are_refused():
    class Endless(list):
        def __len__(self):
            return MAX_CELLS + 1

    with pytest.raises(FormatError, match="more than 20000000 cells"):
        parse_cells([Endless()], fail)


@pytest.mark.parametrize(
    ("ranks", "placement"),
    [
        (["0F0", "1F0"], Placement.line(2)),
        (["0F0 2F0", "1F0 3F0"], Placement.loop(2, 4)),
        (["0F0 3F0", "1F0 2F0"], Placement.vee(2)),
        (["0F0 3F0 4F0", "1F0 2F0 5F0"], Placement.wave(2, 6)),
        (["0F0 1F0"], Placement.loop(1, 2)),
        (["0F0 1F1"], Placement.loop(1, 2)),
        (["1F0", "0F0"], Placement.explicit([1, 0])),
        (["0F0 3F1", "1F0 2F1"], Placement("bidirectional", (0, 1, 1, 0), ((0, 1), (2, 3)))),
    ],
)
def test_the_placement_is_read_off_the_stages(ranks, placement):
    found = layout_of(*ranks)["placement"]

    assert found == placement
    assert found.style == placement.style


@pytest.mark.parametrize(
    ("ranks", "place", "told"),
    [
        (["0F0", "", "1F0"], (2, 0), "rank 1 has no actions"),
        (["0F0 1F0", "1F1"], (2, 0), "stage 1 is on rank 0 and on rank 1"),
        (["0F0 3F0", "1F0"], (1, 100), "stage 3 is here, but stage 2 is on no rank"),
        (["0UNSHARD"], (1, 0), "no action names a microbatch"),
        (["0F0 0F2147483646"], (1, 100), "far more than the 2 actions"),
    ],
)
def test_what_fits_no_placement_is_refused_with_its_place(ranks, place, told):
    with pytest.raises(FormatError, match=told) as caught:
        layout_of(*ranks)

    assert (caught.value.line, caught.value.column) == place


def test_a_format_that_cannot_hold_an_order_says_what_it_expected_and_which_can():
    error = cannot_express("a table of Megatron-LM", "rank 0 has 3 actions", "4")

    assert error.key == "format"
    assert str(error) == (
        "format: a table of Megatron-LM cannot express this order: rank 0 has 3 actions; expected 4. CSV and JSON can"
    )
