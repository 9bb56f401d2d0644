"""Ranks find out together that they were set up differently, or that they run different things."""

from dataclasses import replace

import pytest
import torch

from penstock.errors import PipelineError, StepRefused
from penstock.execute.batch.agreement import (
    Extra,
    Mode,
    Offer,
    agree_on_setup,
    agree_on_step,
    agreed_lengths,
    agreed_sizes,
    digest,
    signature_of,
    trained_of,
)
from tests.local_pipelines import error_of, on_ranks

CPU = torch.device("cpu")
GIVEN = Offer(Mode.TRAIN, 11, 22, False, (2, 2), lengths=(3, 2))
NOTHING = Offer(Mode.TRAIN, 0, 0, False, (0, 0), lengths=(0, 0))


def refusals(*offers):
    return on_ranks(len(offers), lambda wires: error_of(agree_on_step, wires, offers[wires.rank], CPU))


def agreements(*offers):
    return on_ranks(len(offers), lambda wires: agree_on_step(wires, offers[wires.rank], CPU))


def test_a_digest_is_the_same_in_every_process_and_never_means_nothing():
    assert digest("schedule") == 26865468698641645
    assert digest("a") != digest("b")
    assert all(0 < digest(str(number)) < 2**56 for number in range(100))


def test_ranks_with_equal_set_ups_agree():
    assert on_ranks(3, lambda wires: agree_on_setup(wires, {"the split": "1, 2"})) == [None] * 3


def test_a_different_set_up_names_the_field_and_the_ranks_everywhere():
    def case(wires):
        return error_of(agree_on_setup, wires, {"the version": "1", "the split": "1, 2" if wires.rank == 0 else "2, 1"})

    for error in on_ranks(3, case):
        assert type(error) is PipelineError
        assert error.rank == 1
        assert "disagree on the split: rank 0 has 1, 2, rank 1 has 2, 1 (and so do ranks 2)" in str(error)


def test_ranks_that_need_nothing_may_offer_nothing():
    first = Offer(Mode.TRAIN, 11, 0, False, (2, 2), lengths=(0, 0))
    last = Offer(Mode.TRAIN, 0, 22, False, (2, 2), lengths=(3, 2), takes_target=True)

    for offers in agreements(first, NOTHING, last):
        assert [offer.inputs for offer in offers] == [11, 0, 0]
        assert agreed_sizes(offers) == (2, 2)
        assert agreed_lengths(offers) == (3, 2)
        assert signature_of(offers) == "TRAIN 11 0 22 0"


def test_equal_batches_have_one_signature_whoever_was_given_them():
    (whole, *_), (parts, *_) = agreements(GIVEN, GIVEN), agreements(GIVEN, NOTHING)

    assert signature_of(whole) == signature_of(parts)


def test_the_largest_digest_survives_the_exchange():
    large = Offer(Mode.EVALUATE, 2**56 - 1, 2**56 - 1, True, (3, 3), 7, True, True, True, (2, 1, 2, 1))

    assert agreements(large, large)[0] == [large, large]


@pytest.mark.parametrize(
    ("second", "text"),
    [
        (Offer(Mode.EVALUATE, 11, 22, False, (2, 2), lengths=(3, 2)), "rank 0 runs step, rank 1 runs evaluate"),
        (Offer(Mode.TRAIN_SPLIT, 11, 22, False, (2, 2), lengths=(3, 2)), "rank 1 runs a step with split backwards"),
        (Offer(Mode.TRAIN, 12, 22, False, (2, 2), lengths=(3, 2)), "inputs of different shape"),
        (Offer(Mode.TRAIN, 11, 23, False, (2, 2), lengths=(3, 2)), "a target of different shape"),
        (Offer(Mode.TRAIN, 0, 22, False, (3, 1), lengths=(3, 2)), "microbatches of different shape"),
        (Offer(Mode.TRAIN, 11, 22, False, (2, 2), lengths=(2, 1)), "slices of different shape"),
        (
            Offer(Mode.TRAIN, 11, 0, False, (2, 2), 0, False, True, False, (0, 0)),
            "a target, rank 1 was not, but holds",
        ),
    ],
    ids=["mode", "parts", "inputs", "target", "microbatches", "slices", "no target"],
)
def test_ranks_that_run_different_things_all_refuse(second, text):
    for error in refusals(GIVEN, second):
        assert type(error) is StepRefused
        assert error.rank == 1
        assert text in str(error)


@pytest.mark.parametrize(("places", "is_refused"), [((9, 9), False), ((9, 0), False), ((9, 5), True)])
def test_streams_that_are_not_at_one_place_are_refused(places, is_refused):
    offers = [replace(GIVEN, position=place) for place in places]

    if is_refused:
        for error in refusals(*offers):
            assert "the stream of rank 0 is at microbatch 8, that of rank 1 at 4" in str(error)
    else:
        assert agreements(*offers) == [offers, offers]


def test_ranks_that_would_draw_different_random_numbers_all_refuse_with_both_numbers():
    for error in refusals(*(replace(GIVEN, step_number=number) for number in (5, 5, 3))):
        assert type(error) is StepRefused
        assert error.rank == 2
        assert "rank 0 is at step_number 5, rank 2 at 3" in str(error)
        assert "set pipeline.step_number alike on all ranks" in str(error)


def test_ranks_whose_losses_and_gradients_would_be_scaled_differently_all_refuse_with_both_scales():
    for error in refusals(*(replace(GIVEN, scale=scale) for scale in (65536.0, 65536.0, 2.0**-3))):
        assert type(error) is StepRefused
        assert error.rank == 2
        assert "rank 0 has the scale 65536, that of rank 2 has 0.125" in str(error)


@pytest.mark.parametrize(
    ("extras", "text"),
    [
        ((Extra.NOTHING, Extra.NOTHING, Extra.RECORDING), "nothing besides in this step, rank 2 for a recording (rec"),
        ((Extra.RECORDING, Extra.RECORDING, Extra.MEMORY), "(record=True, profile) in this step, rank 2 for a memory"),
        ((Extra.MEMORY, Extra.MEMORY, Extra.NOTHING), "a memory report (memory_report) in this step, rank 2 for noth"),
    ],
)
def test_ranks_that_would_gather_different_things_after_the_step_all_refuse(extras, text):
    for error in refusals(*(replace(GIVEN, extra=extra) for extra in extras)):
        assert type(error) is StepRefused
        assert error.rank == 2
        assert text in str(error)


def test_what_is_asked_besides_and_the_step_number_survive_the_exchange():
    offer = replace(GIVEN, position=9, step_number=2**40, extra=Extra.MEMORY, scale=1 / 3)

    assert agreements(offer, offer)[0] == [offer, offer]


def test_what_any_rank_trains_is_part_of_the_signature_and_the_same_for_all():
    trained = [(5, 2**56 - 1), (5, 6), (6, 5), (0, 0)]
    found = [agreements(*(replace(GIVEN, trained=each) for each in pair)) for pair in trained]

    assert [[offer.trained for offer in offers[1]] for offers in found] == [list(pair) for pair in trained]
    assert all(signature_of(first) == signature_of(second) for first, second in found)
    assert len({signature_of(offers[0]) for offers in found}) == len(trained)
    assert [trained_of(offers[0]) == 0 for offers in found] == [False, False, False, True]


def test_no_rank_needs_a_target_where_none_was_given():
    without = Offer(Mode.EVALUATE, 11, 0, False, (2, 2), takes_target=True)

    assert agreements(without, without)[0] == [without, without]
