"""Megatron-LM's schedule tables as text: as drawn, as recorded, read back, and refused with the place."""

from textwrap import dedent

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, FormatError
from penstock.ir.formats import megatron
from penstock.ir.formats.megatron import from_megatron, to_megatron
from penstock.placement import Placement
from penstock.schedules import build
from tests.proofs.tables import schedule_of
from tests.schedules.golden import recorded, sizes
from tests.support.grids import assert_grid

TABLE = """\
Megatron-LM schedule table
ranks: 2
group size: 2
warm-up: 4 2
(0, 0) (1, 0)
(0, 1) (1, 1)
(2, 0)
(2, 1)
"""
ORDERS = ("0F0 0F1 2F0 2F1 0F2 2B0 2F2 2B1 0B0 0B1 2B2 0B2", "1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 3F2 1B1 3B2 1B2")


def looped(*orders, stages_per_rank=2, slices=1):
    placement = Placement.loop(len(orders), stages_per_rank * len(orders))
    return schedule_of("\n".join(orders), placement=placement, slices=slices)


def fields(text):
    return dict(line.split(": ") for line in text.splitlines() if ": " in line)


def test_a_table_is_read_as_the_order_of_every_rank():
    assert_grid(from_megatron(TABLE), "\n".join(ORDERS))


def test_a_schedule_is_written_with_its_table_group_size_and_warm_up():
    assert to_megatron(looped(*ORDERS)) == TABLE


def test_the_docstring_shows_a_table():
    drawn = dedent(megatron.__doc__.partition("\n\n")[2]).partition("\n\nA pair is")[0]

    assert dedent(drawn.replace("    ", "")) + "\n" == TABLE


@pytest.mark.parametrize(("key", "orders"), recorded("megatron", "head_interleaved"))
def test_a_recorded_order_has_the_group_size_and_the_warm_up_of_megatron(key, orders):
    size = sizes(key)
    schedule = looped(*orders, stages_per_rank=size["vpp"])

    text = to_megatron(schedule)

    usual = [2 * (size["p"] - rank - 1) + (size["vpp"] - 1) * size["group"] for rank in range(size["p"])]
    warmups = [min(number, size["m"] * size["vpp"]) for number in usual]
    assert fields(text) == {
        "ranks": str(size["p"]), "group size": str(size["group"]), "warm-up": " ".join(map(str, warmups)),
    }  # fmt: skip
    assert from_megatron(text) == schedule


@given(
    ranks=st.integers(1, 4),
    microbatches=st.integers(1, 9),
    per_rank=st.integers(2, 3),
    group=st.integers(1, 9),
    data=st.data(),
)
def test_any_group_size_and_warm_up_is_read_and_written_again(ranks, microbatches, per_rank, group, data):
    warmups = [data.draw(st.integers(0, microbatches * per_rank)) for _ in range(ranks)]
    pairs = [
        (microbatch, local)
        for begin in range(0, microbatches, group)
        for local in range(per_rank)
        for microbatch in range(begin, min(begin + group, microbatches))
    ]
    numbers = " ".join(map(str, warmups))
    text = f"{megatron.TITLE}\nranks: {ranks}\ngroup size: {group}\nwarm-up: {numbers}\n{pairs}"

    schedule = from_megatron(text)

    assert from_megatron(to_megatron(schedule)) == schedule


def test_forwards_alone_have_no_warm_up():
    schedule = from_megatron(TABLE).forward_only()

    text = to_megatron(schedule)

    assert text.splitlines()[3] == "forward only"
    assert "warm-up" not in text
    assert from_megatron(text) == schedule


def test_blanks_empty_lines_and_the_order_of_the_fields_do_not_count():
    lines = TABLE.splitlines()
    loose = [f"\n {lines[0].lower()} ", lines[3].replace(" ", "  "), *lines[4:], lines[2], "", lines[1]]

    assert from_megatron("\r\n".join(loose)) == from_megatron(TABLE)


@pytest.mark.parametrize(
    ("right", "wrong", "place", "told"),
    [
        (TABLE, "", "1:1", "the text is empty; expected 'Megatron-LM schedule table'"),
        ("schedule table", "table", "1:1", "'Megatron-LM table' is no title"),
        ("ranks: 2\n", "", "1:1", "ranks: nothing; expected one number of 1 or more"),
        ("ranks: 2", "ranks: 0", "1:1", "ranks: [0]; expected one number"),
        ("group size: 2", "group size: 2 2", "1:1", "group size: [2, 2]; expected one number"),
        ("group size: 2", "group size: 2\ngroup size: 2", "4:1", "group size is there twice"),
        ("group size: 2", "group-size: 2", "3:1", "'group-size: 2' is neither a pair (microbatch, chunk) nor a field"),
        ("warm-up: 4 2\n", "", "1:1", "either warm-up with a number per rank, or 'forward only'"),
        ("warm-up: 4 2", "warm-up: 4", "1:1", "warm-up: 4; expected 2 numbers, none above 6"),
        ("group size: 2", "group size: 3", "6:1", "(0, 1) is here; expected (2, 0) with groups of 3 microbatches"),
        ("(0, 1) (1, 1)", "(0, 1) (1; 1)", "6:8", "'(1; 1)' is neither a pair"),
        ("(2, 1)", "", "7:1", "the table ends with 5 pairs; expected 3 microbatches x 2 chunks = 6"),
        ("(2, 1)", "(999999999, 1)", "8:1", "the table ends with 6 pairs; expected 1000000000 microbatches x 2"),
        (TABLE[TABLE.index("(") :], "", "1:1", "the table is empty"),
        (TABLE[TABLE.index("(") :], "(0, 0) (1, 0)", "5:8", "a single chunk; expected 2 or more"),
        ("ranks: 2", "ranks: 999999999", "1:1", "more than 20000000 actions"),
    ],
)  # fmt: skip
def test_what_is_no_table_is_refused_with_its_place(right, wrong, place, told):
    assert right in TABLE

    with pytest.raises(FormatError) as error:
        from_megatron(TABLE.replace(right, wrong, 1), file="plan")

    assert str(error.value).startswith(f"plan:{place}: ")
    assert told in str(error.value)


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (build("1f1b", ranks=2, microbatches=4), "2 stages on 2 ranks .*a loop with as many stages on each rank"),
        (schedule_of("0F0 1F0", placement=Placement.explicit([0, 0], [[0], [1]])), "2 stages on 1"),
        (looped("0F0 1F0 1I0 1W0 0B0"), "it splits backwards"),
        (looped("0F0 1F0 1R0 1B0 0B0"), "runs forwards again"),
        (looped("0F0 1F0 1F0.1", slices=2), "cut into 2 slices"),
        (looped("0F0 0F1 (1F0;1F1)OVERLAP_F_B"), "overlaps actions"),
        (looped(ORDERS[0].replace("0F2 2B0", "2B0 0F2"), ORDERS[1]), r"6 is 2F2 \(its last group .*\); expected 2B1"),
        (looped(ORDERS[0], ORDERS[1].replace(" 1B2", "")), "rank 1 has 11 actions; expected 12"),
        (looped("1B0 0F0 0B0 1F0"), "position 0 is 1B0; expected 0F0"),
    ],
)
def test_what_is_no_interleaved_1f1b_is_refused(schedule, told):
    with pytest.raises(ConfigError, match=f"^format: .*{told}.* CSV and JSON can$"):
        to_megatron(schedule)
