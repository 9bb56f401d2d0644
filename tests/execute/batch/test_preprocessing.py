"""Which functions of a stream are told of the microbatch that they prepare."""

from functools import partial

import pytest

from penstock.errors import ConfigError
from penstock.execute.batch.preprocessing import Preprocessor, StreamContext

CONTEXT = StreamContext(index=1, number=4, is_training=True, step=7)


class Method:
    def of_item(self, item):
        return item

    def __call__(self, item, context):
        return item, context


def with_default(item, context="own"):
    return item, context


def of_both(item, context, /):
    return item, context


@pytest.mark.feature("G4")
@pytest.mark.parametrize(
    ("function", "result"),
    [
        (None, 3),
        (str, "3"),
        (lambda item: item + 1, 4),
        (lambda *items: items, (3,)),
        (Method().of_item, 3),
        (with_default, (3, "own")),
        (partial(of_both, 2), (2, 3)),
        (of_both, (3, CONTEXT)),
        (Method(), (3, CONTEXT)),
        (lambda item, context, *, pad=0: (item, context), (3, CONTEXT)),
    ],
)
def test_a_function_that_needs_two_arguments_gets_the_context_and_any_other_the_item_alone(function, result):
    assert Preprocessor(function).prepare(3, CONTEXT) == result


@pytest.mark.parametrize(
    ("function", "problem"),
    [
        (lambda: 3, "a function of () can be called neither with an item nor with an item and a ps.StreamContext"),
        (lambda item, context, third: 3, "a function of (item, context, third) can be called neither"),
        (lambda item, *, context: 3, "a function of (item, *, context) can be called neither"),
        ("prepare", "expected a function of an item"),
    ],
)
def test_a_function_that_can_be_called_in_neither_way_is_refused(function, problem):
    with pytest.raises(ConfigError) as caught:
        Preprocessor(function)

    assert problem in str(caught.value)
    assert caught.value.key == "preprocess"
