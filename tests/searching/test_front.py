"""The Pareto front."""

from hypothesis import given
from hypothesis import strategies as st

from penstock.searching.front import pareto_front


@given(st.lists(st.tuples(*[st.integers(1, 6)] * 3), max_size=20))
def test_every_row_off_the_front_is_beaten_by_one_on_it(rows):
    front = pareto_front(rows)

    def beats(other, one):
        return other != one and all(mine <= its for mine, its in zip(other, one, strict=True))

    for index, row in enumerate(rows):
        assert (index in front) != any(beats(rows[better], row) for better in front)
