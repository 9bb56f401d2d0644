"""What fails on one rank fails on all of them, at once."""

import time

import pytest

from penstock.errors import ConfigError, PartitionError
from penstock.execute.together import together
from tests.local_pipelines import error_of, on_ranks


def test_every_rank_gets_its_own_result():
    assert on_ranks(3, lambda wires: together(wires, lambda: wires.rank * 10)) == [0, 10, 20]


@pytest.mark.parametrize(
    ("error", "told"),
    [(PartitionError("planted"), "rank 1: planted"), (RuntimeError("planted"), "rank 1: RuntimeError: planted")],
    ids=["ours", "another"],
)
def test_an_error_of_one_rank_is_raised_there_as_it_is_and_told_on_the_others_at_once(error, told):
    def make(rank):
        if rank == 1:
            raise error

    begin_s = time.monotonic()
    first, own, last = on_ranks(3, lambda wires: error_of(together, wires, lambda: make(wires.rank)), deadline_s=30.0)

    assert own is error
    assert [type(other) for other in (first, last)] == [ConfigError, ConfigError]
    assert str(first) == str(last) == told
    assert time.monotonic() - begin_s < 15.0


def test_an_error_without_a_text_is_told_by_its_type():
    def case(wires):
        return error_of(together, wires, int if wires.rank else fails_silently)

    assert str(on_ranks(2, case)[1]) == "rank 0: KeyError: "


def fails_silently():
    raise KeyError
