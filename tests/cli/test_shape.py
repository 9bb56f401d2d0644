"""The arguments of a shape."""

from argparse import ArgumentParser

import pytest

from penstock.cli.shape import add_shape_arguments


def parsed(*arguments):
    parser = ArgumentParser()
    add_shape_arguments(parser)
    return parser.parse_args(arguments)


def test_only_ranks_and_microbatches_must_be_given():
    found = parsed("--ranks", "2", "--microbatches", "3")

    assert (found.ranks, found.microbatches, found.stages_per_rank, found.slices) == (2, 3, None, 1)
    assert (found.option, found.forward_only) == ([], False)


@pytest.mark.parametrize("missing", [["--ranks", "2"], ["--microbatches", "3"], ["--ranks", "two"]])
def test_a_missing_or_odd_number_is_wrong_usage(missing, capsys):
    with pytest.raises(SystemExit):
        parsed(*missing)
