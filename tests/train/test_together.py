"""What stops one rank stops all of them."""

import pytest

from penstock.errors import ConfigError, PenstockError
from penstock.train.together import failing_together
from tests.train.local_ranks import error_of, on_ranks


def block(transport, failing_ranks):
    with failing_together(transport):
        if transport.rank in failing_ranks:
            raise ConfigError(f"rank {transport.rank} cannot", key="a.key")
    return transport.rank


def failure(transport, failing_ranks):
    return error_of(block, transport, failing_ranks)


def test_nothing_is_raised_where_no_rank_fails():
    assert on_ranks(2, block, []) == [0, 1]


@pytest.mark.parametrize("failing_ranks", [[0], [1]])
def test_every_rank_fails_with_the_words_of_the_one_that_did(failing_ranks):
    errors = on_ranks(2, failure, failing_ranks)

    assert {str(error) for error in errors} == {f"a.key: rank {failing_ranks[0]} cannot"}
    assert [type(error) for error in errors] == [
        ConfigError if rank in failing_ranks else PenstockError for rank in (0, 1)
    ]


def test_each_of_several_that_fail_keeps_its_own_error():
    assert [str(error) for error in on_ranks(3, failure, [1, 2])] == [
        "a.key: rank 1 cannot",
        "a.key: rank 1 cannot",
        "a.key: rank 2 cannot",
    ]
