"""The eight steps: what one rank runs between its near stage 0 and its far stage 9."""

from penstock.schedules import FAMILIES
from penstock.schedules.eight_steps import eight_steps

OPTIONS = FAMILIES["dualpipe"].read_options


def made(*, outer, inner, microbatches, overlap=True):
    """The order between stage 0, which runs microbatches from 0 on, and stage 9, which runs those from 20 on."""
    return eight_steps(((0, 0), (9, 20)), outer, inner, microbatches, OPTIONS({"overlap": overlap}))


def test_without_overlap_the_same_actions_run_one_after_the_other():
    pairs, apart = (made(outer=1, inner=1, microbatches=4, overlap=overlap) for overlap in (True, False))

    assert pairs.joined.any()
    assert not apart.joined.any()
    assert apart.rows.tolist() == pairs.rows.tolist()
