"""`--memory-limit` means the same in every command."""

from argparse import ArgumentParser

import pytest

from penstock.cli.arguments import (
    add_memory_limit,
    counted_limit_of,
    memory_limit_of,
)
from penstock.errors import ConfigError
from penstock.proofs import Limit


def read(*arguments, activation_bytes=None):
    parser = ArgumentParser()
    add_memory_limit(parser)
    return memory_limit_of(parser.parse_args(arguments), activation_bytes)


def test_activations_need_no_costs_and_bytes_need_those_that_know_activations():
    assert read() is None
    assert read("--memory-limit", "12 activations") == Limit.read("12 activations")
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
