"""The arguments that name schedules and give their shape."""

from argparse import ArgumentParser

import pytest

from penstock.cli.shape import add_one_schedule, add_schedules


def parsed(add, *arguments):
    parser = ArgumentParser()
    add(parser)
    return parser.parse_args(arguments)


def test_nothing_of_a_shape_must_be_given_since_a_file_has_it():
    found = parsed(add_one_schedule, "mine.csv")

    assert (found.name, found.own, found.ranks, found.microbatches) == ("mine.csv", None, None, None)
    assert (found.stages_per_rank, found.stages, found.slices) == (None, None, None)
    assert (found.option, found.forward_only) == ([], False)


def test_several_names_and_functions_keep_their_order():
    found = parsed(add_schedules, "--from", "a.py:f", "1f1b", "gpipe", "--from", "b.py:g")

    assert (found.names, found.own) == (["1f1b", "gpipe"], ["a.py:f", "b.py:g"])


@pytest.mark.parametrize("wrong", [["--ranks", "two"], ["--microbatches", "1.5"], ["--rows", "2"]])
def test_an_odd_number_or_flag_is_wrong_usage(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        parsed(add_one_schedule, "1f1b", *wrong)


def test_commands_can_refuse_a_usage_that_only_they_can_judge(capsys):
    found = parsed(add_one_schedule, "1f1b")

    with pytest.raises(SystemExit, match="2"):
        found.wrong_usage("not like this")
    assert capsys.readouterr().err.endswith("error: not like this\n")
