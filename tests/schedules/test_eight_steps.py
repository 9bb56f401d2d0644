"""The eight steps: what one rank runs between its near stage 0 and its far stage 9."""

from penstock.schedules import FAMILIES
from penstock.schedules.eight_steps import eight_steps

OPTIONS = FAMILIES["dualpipe"].read_options


def made(*, outer, inner, microbatches, overlap=True):
    """The order between stage 0, which runs microbatches from 0 on, and stage 9, which runs those from 20 on."""
    return eight_steps(((0, 0), (9, 20)), outer, inner, microbatches, OPTIONS({"overlap": overlap}))


def test_a_rank_before_the_fold_runs_all_eight_steps():
    order = made(outer=1, inner=2, microbatches=6)

    steps = [
        "0F0 0F1",
        "0F2 9F20 0F3 9F21",
        "9I20 9W20 9F22",
        "(0F4;9B21) (9F23;0B0) (0F5;9B22) (9F24;0B1)",
        "9B23 (9F25;0B2)",
        "9B24 0B3 9I25 0I4",
        "9W25 0I5",
        "0W4 0W5",
    ]
    assert str(order) == " ".join(steps)


def test_without_overlap_the_same_actions_run_one_after_the_other():
    pairs, apart = (made(outer=1, inner=1, microbatches=4, overlap=overlap) for overlap in (True, False))

    assert pairs.joined.any()
    assert not apart.joined.any()
    assert apart.rows.tolist() == pairs.rows.tolist()
