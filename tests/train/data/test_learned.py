"""Ids with marks."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.data.learned import ids_of, is_learned, marked


@given(st.lists(st.tuples(st.integers(0, 2**31 - 1), st.booleans())))
def test_ids_and_marks_come_back(pairs):
    ids = np.array([id for id, _ in pairs], dtype=np.uint32)
    marks = np.array([mark for _, mark in pairs], dtype=bool)

    both = marked(ids, marks)

    assert both.dtype == np.uint32
    assert ids_of(both).tolist() == ids.tolist()
    assert is_learned(both).tolist() == marks.tolist()


def test_a_vocabulary_takes_twice_as_many_numbers():
    assert marked(np.array([17, 4, 9]), np.array([False, True, True])).tolist() == [34, 9, 19]
