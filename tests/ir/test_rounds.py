"""Rounds of a schedule or program: drawn, proved for every family and transport, and no more memory than one round."""

import pytest

from penstock.errors import ConfigError
from penstock.ir.rounds import in_rounds
from penstock.lowering import place_reductions
from penstock.planning import prove_and_lower
from penstock.proofs import check
from penstock.schedules import FAMILIES, build
from tests.lowering.programs import drawn, lines, program_of
from tests.support.local_pipelines import two_routes

NUMBERS = [1, 2, 3, 5, 9, 12, 16, 19]


def test_rounds_follow_each_other_and_the_last_one_is_cut():
    program = place_reductions(program_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"))

    assert drawn(in_rounds(program, 5)) == lines(
        """
        0F0 0F1 0B0 0B1 0F2 0F3 0B2 0B3 0F4 0B4 0REDUCE_GRAD
        1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3 1F4 1B4 1REDUCE_GRAD
        """
    )
    assert drawn(in_rounds(program, 1)) == lines("0F0 0B0 0REDUCE_GRAD\n1F0 1B0 1REDUCE_GRAD")


def test_its_own_number_is_the_table_itself():
    schedule = build("1f1b", ranks=2, microbatches=3)

    assert in_rounds(schedule, 3) is schedule


def test_a_pair_stays_a_pair_unless_it_loses_a_member():
    schedule = build("dualpipe-v", ranks=2, microbatches=8)

    whole, cut = in_rounds(schedule, 16), in_rounds(schedule, 3)

    assert whole.joined.sum() == 2 * schedule.joined.sum() > 0
    assert 0 < cut.joined.sum() < schedule.joined.sum()
    for table in (whole, cut):
        check(table)


def test_a_cut_takes_microbatches_of_every_route():
    cut = in_rounds(build("dualpipe", ranks=2, microbatches=8), 11)

    assert cut.route_of_microbatch.tolist() == [0] * 4 + [1] * 4 + [0, 0, 1]


def test_a_copy_of_the_model_without_microbatches_is_refused_in_training_alone():
    schedule = two_routes(2, 4)

    with pytest.raises(ConfigError, match="trains 2 copies of the model, by a route each; use 2 or more") as error:
        in_rounds(schedule, 1)
    assert error.value.key == "microbatches"
    assert check(in_rounds(schedule.forward_only(), 1)).num_actions == 2


def proved_in_rounds(name, messages):
    """The numbers of microbatches whose rounds are not proved, or hold more than one round."""
    schedule = build(name, ranks=2, microbatches=8)
    program = prove_and_lower(schedule, messages=messages, optimizer_step=not schedule.is_forward_only)
    usual_peak, least = check(program).peak_activations, len(schedule.placement.routes)
    wrong = []
    for number in NUMBERS if schedule.is_forward_only else [each for each in NUMBERS if each >= least]:
        check(in_rounds(schedule, number))
        peak = check(in_rounds(program, number), transport=messages).peak_activations
        wrong += [number] if any(more > usual for more, usual in zip(peak, usual_peak, strict=True)) else []
    return wrong


@pytest.mark.parametrize("messages", ["posted", "coalesced", "rendezvous"])
def test_rounds_of_a_family_are_proved(messages):
    assert proved_in_rounds("zbv", messages) == []


@pytest.mark.slow
@pytest.mark.parametrize("messages", ["posted", "coalesced", "rendezvous"])
@pytest.mark.parametrize("name", FAMILIES)
def test_rounds_of_every_family_are_proved(name, messages):
    assert proved_in_rounds(name, messages) == []
