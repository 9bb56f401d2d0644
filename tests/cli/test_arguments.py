"""The arguments that name schedules and give their shape."""

from argparse import ArgumentParser

import pytest

from penstock.cli.arguments import (
    Parser,
    add_memory_limit,
    add_one_schedule,
    add_schedules,
    counted_limit_of,
    memory_limit_of,
)
from penstock.errors import ConfigError
from penstock.proofs import Limit


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


# ---- --memory-limit means the same in every command


def read(*arguments, activation_bytes=None):
    parser = ArgumentParser()
    add_memory_limit(parser)
    return memory_limit_of(parser.parse_args(arguments), activation_bytes)


def test_activations_need_no_costs():
    assert read() is None
    assert read("--memory-limit", "12 activations") == Limit.read("12 activations")


def test_bytes_need_costs_that_know_activations():
    assert read("--memory-limit", "2GiB", activation_bytes=[8.0]).amounts == (2 * 2**30,)
    for activation_bytes, lack in ((None, "there are no costs"), ([0.0], "the costs have no activation_bytes")):
        with pytest.raises(ConfigError, match=lack):
            read("--memory-limit", "2GiB", activation_bytes=activation_bytes)


@pytest.mark.parametrize("given", ["0 activations", "-1", "many", "3 apples"])
def test_anything_else_is_refused_under_the_name_of_the_option(given):
    with pytest.raises(ConfigError, match=r"^--memory-limit: "):
        read(f"--memory-limit={given}")


def test_where_activations_are_only_counted_bytes_are_refused_as_such():
    parser = ArgumentParser()
    add_memory_limit(parser)

    assert counted_limit_of(parser.parse_args([])) is None
    assert counted_limit_of(parser.parse_args(["--memory-limit", "3 activations"])).amounts == (3,)
    with pytest.raises(ConfigError, match=r"20GiB is a number of bytes, .* count them: '6 microbatches'"):
        counted_limit_of(parser.parse_args(["--memory-limit", "20GiB"]))
