"""Ranks compare what they bring before a pipeline is made: every stage once, and both copies of a part alike."""

import pytest
import torch
from torch import nn

from penstock.errors import PartitionError, PipelineError
from penstock.execute.transport.places import Places
from penstock.moving.stage_agreement import agree_on_stages
from penstock.schedules import build
from tests.support.local_pipelines import error_of, on_ranks, two_routes


def dualpipe():
    return build("dualpipe", ranks=2, microbatches=4)


def linear(*sizes, **options):
    return nn.Linear(*(sizes or (3, 3)), **options)


def outcomes(own_of_rank, schedule=None):
    """Every rank's pairs, or what it raised."""

    def case(transport):
        try:
            return agree_on_stages(Places.of(transport), own_of_rank[transport.rank], schedule or dualpipe())
        except PartitionError as error:
            return error

    return on_ranks(len(own_of_rank), case)


def message(own_of_rank, schedule=None):
    """What every rank is told alike."""
    errors = outcomes(own_of_rank, schedule)
    assert [type(error) for error in errors] == [PartitionError] * len(errors)
    (text,) = {str(error) for error in errors}
    return text


def test_copies_with_the_same_parameters_are_taken_whatever_their_values():
    assert outcomes([{0: linear(), 3: linear()}, {1: linear(), 2: linear()}]) == [[], []]


def test_a_stage_that_is_missing_or_foreign_is_named_with_all_that_are_expected():
    found = message([{0: linear(), 3: linear()}, {1: linear()}])

    assert "rank 1 brings the stages [1], but dualpipe with 4 stages places [1, 2] there" in found
    assert "in all: 0 3 | 1 2" in found


class Named(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.add_module(name, linear())


@pytest.mark.parametrize(
    ("copy", "text"),
    [
        (lambda: linear(3, 4), "with weight (4, 3) float32, trained, where"),
        (lambda: linear(dtype=torch.float64), "with weight (3, 3) float64, trained, where"),
        (lambda: linear().requires_grad_(False), "with weight (3, 3) float32, frozen, where"),
        (lambda: linear(bias=False), "with nothing more, where"),
        (lambda: Named("other"), "with other.weight (3, 3) float32, trained, where"),
        (lambda: nn.BatchNorm1d(3), "with weight (3,) float32, trained, where"),
    ],
)
def test_a_copy_that_differs_is_refused_with_rank_stage_and_the_first_difference(copy, text):
    found = message([{0: linear(), 3: linear()}, {1: linear(), 2: copy()}])

    assert f"rank 1 brings, as stage 2, a module {text}" in found
    assert "stage 0 of rank 0, has " in found


def test_buffers_are_compared_too():
    one, other = nn.BatchNorm1d(3), nn.BatchNorm1d(3)
    other.register_buffer("extra", torch.zeros(2))

    found = message([{0: one, 3: linear()}, {1: linear(), 2: other}])

    assert "with a buffer (2,) float32, frozen, where" in found
    assert "stage 0 of rank 0, has nothing more" in found


def test_copies_on_one_rank_must_be_one_module():
    schedule, shared = two_routes(1, 2), linear()

    assert outcomes([{0: shared, 1: shared}], schedule) == [[]]
    assert "the stages 0 and 1 are two copies of one part of the model, and both here" in (
        message([{0: linear(), 1: linear()}], schedule)
    )


def test_threads_may_not_bring_the_very_same_module():
    shared = linear()

    assert "rank 0 and rank 1 bring the very same module as the stages 0 and 2" in (
        message([{0: shared, 3: linear()}, {1: linear(), 2: shared}])
    )


def sharing(first, last):
    last.weight = first.weight
    return first, last


def test_what_two_parts_share_on_both_of_their_ranks_is_tied_everywhere():
    embedding, head = sharing(linear(), linear())
    copy, other = sharing(linear(), linear())

    found = outcomes([{0: embedding, 3: head}, {1: other, 2: copy}])

    assert found == [[("0.weight", "1.weight")]] * 2


def test_what_is_shared_on_one_rank_alone_is_refused():
    embedding, head = sharing(linear(), linear())

    assert "'0.weight' and '1.weight' are one parameter on rank 0, but two on rank 1" in (
        message([{0: embedding, 3: head}, {1: linear(), 2: linear()}])
    )


def test_one_route_asks_nothing_of_the_modules():
    first, last = sharing(linear(), linear(bias=False))

    assert outcomes([{0: first}, {1: last}], build("1f1b", ranks=2, microbatches=2)) == [[], []]


def test_other_schedules_are_told_before_anything_else():
    schedules = [dualpipe(), build("chimera", ranks=2, microbatches=4)]

    errors = on_ranks(2, lambda wires: error_of(agree_on_stages, Places.of(wires), {}, schedules[wires.rank]))

    assert [type(error) for error in errors] == [PipelineError] * 2
    assert "the ranks disagree on schedule" in str(errors[0])
