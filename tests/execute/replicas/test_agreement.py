"""Replicas agree on a step in one gather each along both dimensions, or refuse it together."""

from dataclasses import replace

import pytest

from penstock.errors import EndOfData, StepRefused
from penstock.execute.control.agreement import AgreedStep, BatchWeight, Mode, StepProposal
from penstock.execute.control.collectives import Control
from penstock.execute.replicas.agreement import agree_across, refuse_across
from tests.support.local_pipelines import error_of
from tests.support.mesh_pipelines import on_mesh


def agreed_on(places, proposal, weight, values=()):
    return agree_across(Control.of(places), proposal, AgreedStep.of([proposal] * 2), weight, values)


def test_weights_add_up_and_the_step_is_that_of_the_job():
    def case(places):
        proposal = StepProposal(mode=Mode.TRAIN, attempt=places.replica, inputs=places.replica + 1, num_compilations=1)
        proposal = replace(proposal, planned=(5, 6 + places.replica))
        weight = BatchWeight(8.0 + places.replica, 3.0, 4)
        return agreed_on(places, proposal, weight)

    ranks = on_mesh(2, 3, case)

    for agreed in ranks:
        assert agreed.weight == BatchWeight(27.0, 9.0, 12)
        assert agreed.most_microbatches == 4
        assert agreed.attempt == 2
        assert agreed.planned == {5}  # reductions over replicas come in the order of the program
        assert agreed.compilations == [1] * 6
    assert len({agreed.job_signature for agreed in ranks}) == 1
    assert len({agreed.signature for agreed in ranks}) == 3


@pytest.mark.parametrize(
    ("digests", "is_equal"),
    [([[5, 0, 7]] * 2, True), ([[5, 0, 7], [6, 0, 7]], False), ([[]] * 2, False), ([[0, 0]] * 2, False)],
)
def test_equal_batches_are_seen_where_they_were_read(digests, is_equal):
    def case(places):
        proposal = StepProposal(mode=Mode.TRAIN)
        return agreed_on(places, proposal, BatchWeight(), digests[places.replica]).has_equal_batches

    assert on_mesh(2, 2, case) == [is_equal] * 4


@pytest.mark.parametrize(
    ("of_other", "weight", "words"),
    [
        ({"mode": Mode.EVALUATE}, BatchWeight(8), "data 0) has step, rank 2 (pipeline 0, data 1) has evaluate"),
        ({"step_number": 4}, BatchWeight(8), "disagree on step_number"),
        ({"scale": 2.0}, BatchWeight(8), "disagree on scale"),
        ({"trained": 9}, BatchWeight(8), "unfreeze parameters on all replicas alike"),
        ({"target": 9}, BatchWeight(8), "disagree on has_target"),
        ({}, BatchWeight(), "disagree on has_rows"),
    ],
)
def test_what_replicas_see_differently_is_refused_by_all_in_the_same_words(of_other, weight, words):
    def case(places):
        is_odd = places.replica == 1
        proposal = StepProposal(**{"mode": Mode.TRAIN} | (of_other if is_odd else {}))
        return error_of(agreed_on, places, proposal, weight if is_odd else BatchWeight(8))

    errors = on_mesh(2, 2, case)

    assert len({str(error) for error in errors}) == 1
    assert words in str(errors[0])
    assert {(type(error), error.rank) for error in errors} == {(StepRefused, 2)}


def test_a_refusal_of_one_replica_is_one_of_all_and_the_end_of_data_comes_first():
    def case(places, refusals):
        control, own = Control.of(places), refusals[places.replica]
        if own is None:
            return error_of(agreed_on, places, StepProposal(mode=Mode.TRAIN), BatchWeight())
        words = "no rows" if places.index == 3 else ""
        return error_of(refuse_across, control, StepProposal(mode=Mode.TRAIN, refusal=words), own)

    refused, ended = StepRefused("no rows", rank=3), EndOfData("at an end", rank=1)

    found = on_mesh(2, 2, case, [None, refused])
    assert {(type(error), error.rank) for error in found} == {(StepRefused, 3)}
    assert str(found[1]) == "rank 3 (pipeline 1, data 1) refuses the step: no rows"
    assert found[2] is found[3] is refused
    found = on_mesh(2, 2, case, [ended, refused])
    assert {(type(error), str(error), error.rank) for error in found} == {(EndOfData, "at an end", 1)}
