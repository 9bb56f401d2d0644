"""Costs of all that a rank does, shared by its stages and slices."""

from penstock.schedules import build
from penstock.simulation import Costs
from penstock.simulation.costs.equal_work import has_entry_per_rank, share_of_rank


def schedule(name="1f1b", ranks=2, **others):
    return build(name, ranks=ranks, microbatches=4, **others)


def test_stages_and_slices_share_what_a_rank_has_of_the_model():
    costs = Costs.uniform(
        forward=1, transfer=5, launch_s=6, activation_bytes=40, message_bytes=8, parameter_bytes=100, optimizer_s=2,
        backward_workspace_bytes=60,
    )  # fmt: skip

    two_stages = share_of_rank(costs, schedule("zbv"))
    two_slices = share_of_rank(costs, schedule("seq1f1b", slices=2))

    assert (two_stages.forward_s, two_stages.backward_s, two_stages.optimizer_s) == ((0.5,), (1.0,), (1.0,))
    assert (two_stages.activation_bytes, two_stages.parameter_bytes) == ((20,), (50,))
    assert (two_slices.forward_s, two_slices.backward_s, two_slices.optimizer_s) == ((0.5,), (1.0,), (2,))
    assert (two_slices.activation_bytes, two_slices.parameter_bytes) == ((20,), (100,))
    assert (two_stages.message_bytes, two_slices.message_bytes) == ((8,), (4,))
    # The largest workspace of a rank's layers is that of one of its stages.
    assert (two_stages.backward_workspace_bytes, two_slices.backward_workspace_bytes) == ((60,), (30,))
    assert (two_stages.latency_s, two_stages.launch_s) == (5, 6)


def test_stages_share_the_entry_of_their_rank_and_a_second_copy_of_the_model_costs_the_same():
    costs = Costs(forward_s=(1.0, 2.0, 3.0), backward_s=(2.0,), message_bytes=(5, 6, 7))

    shared = share_of_rank(costs, schedule("zbv", ranks=3))
    copied = share_of_rank(Costs(forward_s=(1.0, 2.0), backward_s=(2.0,)), schedule("chimera"))

    assert shared.forward_s == (0.5, 1.0, 1.5, 1.5, 1.0, 0.5)
    assert shared.message_bytes == (5, 6, 7, 7, 6, 5)
    assert copied.forward_s == (1.0, 2.0, 1.0, 2.0)
    assert share_of_rank(costs, schedule("1f1b", ranks=3)) == costs


def test_entries_per_stage_are_those_of_the_stages_already():
    costs = Costs(forward_s=(1.0, 2.0, 3.0, 4.0), backward_s=(2.0,))

    assert share_of_rank(costs, schedule("zbv")).forward_s == (1.0, 2.0, 3.0, 4.0)
    assert share_of_rank(costs, schedule("zbv")).backward_s == (1.0,)
    assert share_of_rank(costs, schedule("seq1f1b", ranks=4, slices=2)).forward_s == (0.5, 1.0, 1.5, 2.0)


def test_entries_are_those_of_ranks_where_ranks_have_several_stages():
    per_rank = Costs(forward_s=(1.0, 2.0), backward_s=(1.0,))
    looped = schedule("interleaved-1f1b", stages_per_rank=2).placement

    assert has_entry_per_rank(per_rank, looped)
    assert not has_entry_per_rank(per_rank, schedule().placement)
    assert not has_entry_per_rank(Costs(forward_s=(1.0,) * 4, backward_s=(1.0,)), looped)
    assert not has_entry_per_rank(Costs.uniform(), looped)
