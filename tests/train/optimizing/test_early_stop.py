"""A run ends early where its held-out loss does not fall any more."""

from penstock.train.optimizing.early_stop import EarlyStop


def test_it_ends_after_so_many_evaluations_in_a_row_without_a_lower_loss():
    stop = EarlyStop(2)

    assert [stop.note(loss) for loss in (3.0, None, 3.5, 2.9, None, 2.9, 2.95)] == [False] * 6 + [True]
    assert stop.describe() == "2 evaluations in a row without a held-out loss below 2.9000"


def test_without_patience_it_never_ends():
    stop = EarlyStop(0)

    assert not any(stop.note(loss) for loss in (1.0, 2.0, 3.0, 4.0))
