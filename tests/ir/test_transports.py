"""Models of transports are found by their names, and other names are refused with what was expected."""

import pytest

from penstock.errors import ConfigError
from penstock.ir.transports import MODELS, buffered, find_transports


@pytest.mark.parametrize("name", ["posted", "rendezvous", "buffered(1)", "pair_fifo", "coalesced"])
def test_each_model_is_found_by_its_name(name):
    (model,) = find_transports(name)

    assert str(model) == model.name == name


def test_all_means_every_model():
    assert [str(model) for model in find_transports("all")] == [
        "posted", "rendezvous", "buffered(1)", "pair_fifo", "coalesced",
    ]  # fmt: skip


def test_a_buffer_holds_as_many_messages_as_its_name_says():
    assert find_transports("buffered(12)") == (buffered(12),)
    assert {str(model): model.capacity for model in (*MODELS, buffered(12))} == {
        "posted": None, "rendezvous": 0, "buffered(1)": 1, "pair_fifo": None, "coalesced": None, "buffered(12)": 12,
    }  # fmt: skip


def test_every_model_names_its_rule_and_a_backend():
    assert all(model.meaning.endswith(".") and model.backend for model in MODELS)
    assert len({model.meaning for model in MODELS}) == len({model.backend for model in MODELS}) == len(MODELS)


@pytest.mark.parametrize("name", ["buffered", "buffered()", "buffered(x)", "buffered(0)", "buffered(-1)",
                                  "buffered(1", "buffered(1.5)", "buffered(\u0663)", "buffered(1234567890)",
                                  "buffered(1)(2)"])  # fmt: skip
def test_a_buffer_without_a_size_is_refused(name):
    with pytest.raises(ConfigError) as caught:
        find_transports(name)

    assert str(caught.value) == (
        f"transport: {name!r}; expected a number of messages from 1 to 999999999, as in 'buffered(2)'. "
        "Without a buffer the transport is 'rendezvous'"
    )


@pytest.mark.parametrize(
    ("name", "hint"), [("possted", "'posted' or 'coalesced'"), ("colesced", "'coalesced' or 'posted'")]
)
def test_an_unknown_name_is_refused_with_the_nearest_one_and_the_list(name, hint):
    with pytest.raises(ConfigError) as caught:
        find_transports(name)

    assert str(caught.value) == (
        f"transport: unknown transport {name!r}; known: posted, rendezvous, buffered(n), pair_fifo, coalesced, all. "
        f"Did you mean {hint}?"
    )


@pytest.mark.parametrize("name", [None, 3, ["posted"], "x" * 10_000, ""])
def test_what_is_no_name_is_refused_in_few_words(name):
    with pytest.raises(ConfigError, match=r"(expected one of|known:) posted") as caught:
        find_transports(name)

    assert len(str(caught.value)) < 250
