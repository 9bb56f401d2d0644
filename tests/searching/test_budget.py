"""When a search ends."""

from penstock.searching.budget import MOVES_PER_ROUND, Budget


def test_without_a_number_seconds_count():
    assert Budget(0.0, None).is_over
    assert not Budget(60.0, None).is_over
    assert Budget(60.0, None).next_moves() == MOVES_PER_ROUND


def test_with_a_number_of_evaluations_seconds_do_not_count():
    budget = Budget(0.0, MOVES_PER_ROUND + 10)

    assert not budget.is_over
    assert budget.next_moves() == MOVES_PER_ROUND
    budget.spent += MOVES_PER_ROUND
    assert budget.next_moves() == 10
    budget.spent += 10
    assert budget.is_over
    assert budget.next_moves() == 0


def test_a_share_of_it_is_over_before_all_of_it():
    budget = Budget(0.0, 10)
    budget.spent = 4

    assert budget.is_over_at(0.4)
    assert not budget.is_over_at(0.5)
    assert Budget(0.0, None).is_over_at(0.4)


def test_a_share_of_it_is_so_many_trials():
    budget = Budget(0.0, 100)
    budget.spent = 70

    assert [budget.trials(share, 1e9) for share in (0.2, 0.5)] == [20, 30]
    assert Budget(60.0, None).trials(0.5, 0.01) == 3000
    assert Budget(0.0, None).trials(1.0, 0.01) == 0
