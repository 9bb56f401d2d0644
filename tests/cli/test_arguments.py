"""The arguments that name schedules and give their shape."""

import pytest

from penstock.cli.arguments import Parser, add_one_schedule, add_schedules


def parsed(add, *arguments):
    parser = Parser()
    add(parser)
    return parser.parse_args(arguments)


def test_nothing_of_a_shape_must_be_given_since_a_file_has_it():
    found = parsed(add_one_schedule, "mine.csv")

    assert (found.name, found.function, found.ranks, found.microbatches) == ("mine.csv", None, None, None)
    assert (found.stages_per_rank, found.stages, found.slices) == (None, None, None)
    assert (found.options, found.forward_only) == ([], False)


def test_several_names_and_functions_keep_their_order():
    found = parsed(add_schedules, "--function", "a.py:f", "1f1b", "gpipe", "--function", "b.py:g")

    assert (found.names, found.functions) == (["1f1b", "gpipe"], ["a.py:f", "b.py:g"])


@pytest.mark.parametrize("wrong", [["--ranks", "two"], ["--microbatches", "1.5"], ["--rows", "2"]])
def test_an_odd_number_or_flag_is_wrong_usage(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        parsed(add_one_schedule, "1f1b", *wrong)


def test_commands_can_refuse_a_usage_that_only_they_can_judge(capsys):
    found = parsed(add_one_schedule, "1f1b")

    with pytest.raises(SystemExit, match="2"):
        found.wrong_usage("not like this")
    assert "not like this\nTry `" in capsys.readouterr().err
