"""What a joint search finds on one placement."""

import numpy as np

from penstock.placement import Placement
from penstock.proofs import Limit
from penstock.searching.joint.place import Place
from penstock.searching.joint.splits import Splits
from penstock.searching.starting import excess_bytes
from tests.searching.joint.test_splits import layers


def place_of(limit=None, *, placement=None, may_recompute=False, costs=None):
    splits = Splits(costs or layers(0), placement or Placement.line(3), 4, None if limit is None else np.full(3, limit))
    return Place(splits, None if limit is None else Limit.read(limit), seed=0, may_recompute=may_recompute)


def test_annealing_begins_with_the_balanced_split():
    place = place_of(may_recompute=True)

    rows = place.rows()

    assert len(rows) == 4
    assert all(row[:3].tolist() == np.cumsum(place.balanced).tolist() for row in rows)
    assert [row[3:6].tolist() for row in rows] == [[0, 0, 0]] * 2 + [[1, 1, 1]] * 2
    assert rows[1][6:9].tolist() == [3, 2, 1]


def test_families_that_do_not_fit_with_the_balanced_split_get_another_one():
    sizes = {"activation_bytes": [100, *[1] * 7, 100], "weight_context_bytes": [1] * 9, "message_bytes": [2]}
    place = place_of(480, costs=layers(1, **sizes))
    families = list(place.families(place.balanced))
    unfitting = [family for family in families if not family.fits]

    others = [place.resplit(family) for family in unfitting]

    assert unfitting
    assert any(others)
    for family in filter(None, others):
        assert family.fits
        assert not excess_bytes(family, place.question_of(family.problem)).any()
        assert place.split_of_problem[id(family.problem)][1] != place.balanced


def test_room_is_made_for_messages():
    """Messages are large: an order that fits without them does not fit with them, and later runs know."""
    costs = layers(2, message_bytes=[120])
    place = place_of(800, costs=costs)
    before = place.annealing.most_bytes.copy()

    candidates = [place.anneal(place.rows()[0], 200, 0.5) for _ in range(6)]

    assert (place.annealing.most_bytes <= before).all()
    assert (place.annealing.most_bytes < before).any()
    for candidate in filter(None, candidates):
        assert not excess_bytes(candidate, place.question_of(candidate.problem)).any()
    assert candidates[-1] is not None
