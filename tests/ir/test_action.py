"""Actions: torch's text."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.action import Action, Kind, OverlappedPair
from tests.support.actions import parse_action

NUMBERS = st.integers(0, 2**31 - 1)
ACTIONS = st.builds(Action, st.sampled_from(list(Kind)), NUMBERS, NUMBERS, st.integers(0, 2**15 - 1))


@pytest.mark.parametrize(
    ("action", "text"),
    [
        (Action(Kind.FORWARD, 2, 0), "2F0"),
        (Action(Kind.BACKWARD, 0, 3), "0B3"),
        (Action(Kind.BACKWARD_INPUT, 1, 3), "1I3"),
        (Action(Kind.BACKWARD_WEIGHT, 0, 3), "0W3"),
        (Action(Kind.RECOMPUTE, 0, 3), "0R3"),
        (Action(Kind.FORWARD, 2, 0, 1), "2F0.1"),
        (OverlappedPair(Action(Kind.FORWARD, 0, 7), Action(Kind.BACKWARD, 7, 3)), "(0F7;7B3)OVERLAP_F_B"),
    ],
)
def test_an_action_has_the_text_of_torch(action, text):
    assert str(action) == text
    assert parse_action(text) == action


@given(st.one_of(ACTIONS, st.builds(OverlappedPair, ACTIONS, ACTIONS)))
def test_reading_a_written_action_gives_it_back(action):
    assert parse_action(str(action)) == action
