"""What a rank did before a step is told apart from its wait for data."""

from penstock.ir.measured import Prologue


def test_a_rank_waited_for_its_batch_from_when_it_was_free_until_it_had_it():
    assert Prologue(-3.0, -1.0, -0.5).data_s == 2.0
