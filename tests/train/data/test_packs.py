"""Packing whole documents."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.train.data.packs import Packs, best_fit


def packs_of(sizes, capacity, documents=None):
    """Return the sizes, or the documents, in each pack."""
    sizes = np.array(sizes, dtype=np.int64)
    documents = np.arange(len(sizes)) if documents is None else np.array(documents)
    packs = Packs.of(documents, sizes, capacity)
    return [packs[index].tolist() for index in range(len(packs))]


def test_the_longest_come_first_and_each_goes_where_the_least_room_suffices():
    assert packs_of([5, 4, 3, 3, 1], 8) == [[0, 2], [1, 3, 4]]
    assert packs_of([1, 3, 3, 4, 5], 8, documents=[10, 11, 12, 13, 14]) == [[11, 14], [10, 12, 13]]
    assert packs_of([8, 8], 8) == [[0], [1]]
    assert packs_of([], 8) == []
    # 6 leaves 4 and 7 leaves 3, so that 3 goes to 7
    assert packs_of([7, 6, 3], 10) == [[0, 2], [1]]


@given(st.lists(st.integers(1, 40), max_size=60), st.integers(40, 64))
def test_each_document_is_in_one_pack_none_overflows_and_no_two_could_be_one(sizes, capacity):
    packs = packs_of(sizes, capacity)

    assert sorted(document for pack in packs for document in pack) == list(range(len(sizes)))
    assert all(pack == sorted(pack) for pack in packs)
    filled = sorted(sum(sizes[document] for document in pack) for pack in packs)
    assert all(size <= capacity for size in filled)
    assert len(filled) < 2 or filled[0] + filled[1] > capacity


@given(st.lists(st.integers(1, 30), max_size=50))
def test_the_pack_of_each_is_that_of_a_search_through_all_packs(sizes):
    rooms, expected = [], {}
    for item in sorted(range(len(sizes)), key=lambda item: (-sizes[item], item)):
        fitting = [room for room in rooms if room >= sizes[item]]
        if not fitting:
            rooms.append(32)
        place = rooms.index(min(fitting)) if fitting else len(rooms) - 1
        rooms[place] -= sizes[item]
        expected[item] = rooms[place]

    packs = best_fit(np.array(sizes, dtype=np.int64), 32)

    filled = np.bincount(packs, weights=sizes) if sizes else []
    assert sorted(filled) == sorted(32 - room for room in rooms)


@pytest.mark.parametrize("documents", [[], [3, 5, 9]])
def test_packs_of_one_are_the_documents_themselves(documents):
    packs = Packs.of_one(np.array(documents, dtype=np.int64))

    assert [packs[index].tolist() for index in range(len(packs))] == [[document] for document in documents]
