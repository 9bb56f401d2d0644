"""What a comparison is written as."""

import json
import re
from argparse import Namespace
from fractions import Fraction

import pytest

from penstock.cli.comparison import Comparison, Refusal
from penstock.cli.comparison_result import MEMORY_NAME, result_of
from penstock.errors import ConfigError
from penstock.proofs import Limit


def row(name, makespan_s, peak, num_microbatches=8, num_parts=1):
    return Comparison(name, makespan_s, makespan_s, 0.1, 0.1, [peak], 4, num_microbatches, Fraction(num_parts))


def asked(**changes):
    usual = {
        "memory_limit": None,
        "per_action": False,
        "ranks": 4,
        "microbatches": 8,
        "costs": "F=1,I=1,W=1",
        "theme": None,
        "sweep": [],
    }
    return Namespace(**usual | changes)


ROWS = [row("fast", 5.0, 8), Refusal("odd", "needs an even number"), row("small", 6.0, 4)]


def texts_of(result):
    return re.findall(r"<text[^>]*>(.*?)</text>", result.decode())


@pytest.mark.slow
@pytest.mark.parametrize("format", ["svg", "html"])
def test_pictures_name_what_was_compared_and_its_memory(format):
    result = result_of(ROWS, format, asked())

    assert {"fast", "small", MEMORY_NAME} <= set(texts_of(result))
    assert b"Step time and memory, 4 ranks, 8 microbatches, with F=1,I=1,W=1" in result
    assert b"odd" not in result


def test_memory_is_that_of_a_microbatch():
    page = result_of([row("halves", 5.0, 8, num_parts=2)], "html", asked()).decode()

    assert "4</title>" in page


def test_text_formats_end_with_a_newline():
    assert json.loads(result_of(ROWS, "json", asked()))[1]["error"] == "needs an even number"
    assert result_of(ROWS, "json", asked()).endswith(b"]\n")
    assert result_of(ROWS, "table", asked()).decode().splitlines()[2].startswith("fast")


def test_numbers_of_microbatches_stand_beside_the_names_where_they_differ():
    texts = texts_of(result_of([row("a", 1.0, 2), row("b", 2.0, 1, num_microbatches=16)], "html", asked()))

    assert {"a, 8 microbatches", "b, 16 microbatches"} <= set(texts)


def test_names_of_a_sweep_say_their_sizes_themselves_and_times_are_for_equal_work():
    rows = [row("a, 8 microbatches", 1.0, 2), row("b, 16 microbatches", 3.0, 1, num_microbatches=16)]

    page = result_of(rows, "html", asked(sweep=["microbatches=8,16"], microbatches=None))

    assert {"a, 8 microbatches", "b, 16 microbatches"} <= set(texts_of(page))
    assert b"times are for 16 microbatches" in page


def test_a_sweep_of_one_size_is_drawn_over_it():
    rows = [row("a, 8 microbatches", 1.0, 4), row("a, 16 microbatches", 1.5, 4, num_microbatches=16)]
    sizes = {"microbatches": (8, 16)}

    picture = result_of(rows, "svg", asked(sweep=["microbatches=8,16"], microbatches=None), swept_sizes=sizes)

    assert {"a", "microbatches", "step time (s)"} <= set(texts_of(picture))
    assert not any("a, 8" in text for text in texts_of(picture))


def test_unequal_work_is_told_where_costs_are_per_action():
    rows = [row("a", 1.0, 2), row("b", 2.0, 1, num_parts=2)]

    assert b"ranks do unequal work" not in result_of(rows, "html", asked())
    unequal = result_of(rows, "html", asked(per_action=True))
    assert b"ranks do unequal work" in unequal
    assert b"F=1,I=1,W=1 per action" in unequal


def test_what_is_over_the_limit_says_so():
    texts = texts_of(result_of(ROWS, "html", asked(memory_limit=Limit.read("4 activations"))))

    assert "fast (over the limit)" in texts
    assert "small" in texts


def test_a_picture_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="no schedule can be compared"):
        result_of(ROWS[1:2], "svg", asked())
