"""The time that a change saves is weighed against the memory that it takes."""

from penstock.searching.advice import advice_of
from penstock.searching.what_if import Change


def change(text, step_change, memory_change=0.0, sort="schedule", **more):
    return Change(sort, text, step_change, memory_change, **more)


def test_what_saves_less_than_two_percent_is_left_out():
    found = advice_of([change("a", -0.019), change("b", -0.02), change("c", 0.5)])

    assert [each.text for each in found.worth] == ["b"]


def test_what_takes_more_memory_than_it_saves_time_is_apart():
    found = advice_of([change("a", -0.02, 0.5), change("b", -0.2, 0.39), change("c", -0.2, 0.41)])

    assert [each.text for each in found.worth] == ["b"]
    assert [each.text for each in found.costly] == ["c", "a"]
    assert found.best.text == "b"


def test_a_second_copy_of_the_weights_is_apart_and_never_advised():
    found = advice_of([change("a", -0.4, -0.5, copies_weights=True)])

    assert [each.text for each in found.second_copy] == ["a"]
    assert (found.worth, found.costly, found.best) == ((), (), None)


def test_of_changes_that_save_as_much_the_one_that_takes_least_memory_is_advised():
    near = [change("a", -0.200, 0.1), change("b", -0.185, -0.1), change("c", -0.17, -0.5)]

    assert advice_of(near).best.text == "b"


def test_of_changes_alike_the_simplest_is_advised():
    assert advice_of([change("a", -0.21), change("b", -0.2, sort="split")]).best.text == "b"


def test_no_sort_of_change_crowds_out_the_others():
    many = [change(str(index), -0.5 - 0.01 * index) for index in range(9)]

    found = advice_of([*many, change("split", -0.1, sort="split")])

    assert [each.text for each in found.worth] == ["8", "7", "6", "5", "4", "3", "split"]
