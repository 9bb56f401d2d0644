"""Models of transports are found by their names, and other names are refused with what was expected."""

import pytest

from penstock.errors import ConfigError
from penstock.ir.transports import find_transports


def test_all_means_every_model():
    assert [str(model) for model in find_transports("all")] == ["posted", "rendezvous", "pair_fifo", "coalesced"]


@pytest.mark.parametrize("name", ["buffered", "buffered(1)", "buffered(12)", "buffered(x)"])
def test_a_buffer_is_refused_with_the_model_that_covers_it(name):
    with pytest.raises(ConfigError) as caught:
        find_transports(name)

    assert str(caught.value) == (
        f"transport: unknown transport {name!r}; known: posted, rendezvous, pair_fifo, coalesced, all. "
        "Use 'rendezvous': a program that passes it passes with any buffer"
    )


@pytest.mark.parametrize(
    ("name", "hint"), [("possted", "'posted' or 'coalesced'"), ("colesced", "'coalesced' or 'posted'")]
)
def test_an_unknown_name_is_refused_with_the_nearest_one_and_the_list(name, hint):
    with pytest.raises(ConfigError) as caught:
        find_transports(name)

    assert str(caught.value) == (
        f"transport: unknown transport {name!r}; known: posted, rendezvous, pair_fifo, coalesced, all. "
        f"Did you mean {hint}?"
    )


@pytest.mark.parametrize("name", [None, 3, ["posted"], "x" * 10_000, ""])
def test_what_is_no_name_is_refused_in_few_words(name):
    with pytest.raises(ConfigError, match=r"(expected one of|known:) posted") as caught:
        find_transports(name)

    assert len(str(caught.value)) < 250
