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


def read(*arguments, read_limit=memory_limit_of, **options):
    parser = ArgumentParser()
    add_memory_limit(parser)
    return read_limit(parser.parse_args(arguments), **options)


def test_activations_need_no_costs_and_bytes_need_those_that_know_activations():
    assert read(activation_bytes=None) is read(read_limit=counted_limit_of) is None
    assert read("--memory-limit", "12 activations", activation_bytes=None) == Limit.read("12 activations")
    assert read("--memory-limit", "2GiB", activation_bytes=[8.0]).amounts == (2 * 2**30,)
    assert read("--memory-limit", "3 activations", read_limit=counted_limit_of).amounts == (3,)
    for activation_bytes, lack in ((None, "there are no costs"), ([0.0], "the costs have no activation_bytes")):
        with pytest.raises(ConfigError, match=lack):
            read("--memory-limit", "2GiB", activation_bytes=activation_bytes)
    with pytest.raises(ConfigError, match=r"20GiB is a number of bytes, .* count them: '6 microbatches'"):
        read("--memory-limit", "20GiB", read_limit=counted_limit_of)
    for given in ("0 activations", "-1", "many", "3 apples"):
        with pytest.raises(ConfigError, match=r"^--memory-limit: "):
            read(f"--memory-limit={given}", activation_bytes=None)
