"""An error tells where in the user's code it was raised, and stays what it is."""

import traceback

from penstock.execute.control.error_notes import note_place, noted_place, without_target


def test_the_first_place_that_is_noted_stays_is_read_back_and_shown_by_tracebacks():
    error = ValueError("planted")
    error.add_note("of somebody else")
    assert noted_place(error) == noted_place(KeyError()) == ""
    note_place(error, "layer 3 (Linear)")
    note_place(error, "the loss function")

    assert noted_place(error) == "layer 3 (Linear)"
    assert str(error) == "planted"
    assert traceback.format_exception(error)[-1] == "raised in layer 3 (Linear)\n"


def test_a_target_that_is_missing_is_told_with_the_way_out():
    assert without_target("count", [0]) == "count"
    assert without_target("count", None) == "count (no target was given; pass step(..., target=...))"
