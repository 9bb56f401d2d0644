"""The record that a layer is told is a small frozen value."""

from dataclasses import FrozenInstanceError, fields

import pytest

from penstock.microbatch_place import MICROBATCH_PLACE, MicrobatchPlace


@pytest.mark.feature("G5")
def test_a_place_is_frozen_has_no_attributes_of_its_own_and_compares_by_value():
    place = MicrobatchPlace(index=1, number=4, slice=0, weight=0.25)

    assert place == MicrobatchPlace(1, 4, 0, 0.25)
    assert [field.name for field in fields(place)] == ["index", "number", "slice", "weight"]
    assert MICROBATCH_PLACE == "microbatch_place"
    with pytest.raises(FrozenInstanceError):
        place.index = 2
    assert not hasattr(place, "__dict__")
