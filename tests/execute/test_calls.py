"""Changes to bound calls wrap each call, the first change innermost."""

from dataclasses import replace

from penstock.execute.calls import Bound, changed


def saying(word, said):
    def wrap(bound):
        def call(step):
            said.append(word)
            bound.call(step)

        return call

    return lambda bounds: [replace(bound, call=wrap(bound)) for bound in bounds]


def test_the_first_change_is_the_innermost_and_rows_stay():
    said = []
    bounds = [Bound(3, lambda step: said.append("three")), Bound(4, lambda step: said.append("four"), 2)]

    found = changed(bounds, [saying("inner", said), saying("outer", said)])
    for bound in found:
        bound.call(None)

    assert [(bound.row, bound.receive_row) for bound in found] == [(3, None), (4, 2)]
    assert said == ["outer", "inner", "three", "outer", "inner", "four"]


def test_without_changes_the_calls_are_the_same():
    bounds = [Bound(0, print)]

    assert changed(bounds, []) == bounds
