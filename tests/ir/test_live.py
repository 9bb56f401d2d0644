"""An activation is alive from its F until its B or W has run, per rank, in counts and bytes."""

import numpy as np
import pytest
from hypothesis import given

from penstock.ir.live import alive, live_activations, live_bytes, peak_activations, peak_alive, peak_bytes, peaks
from penstock.lowering import lower
from penstock.schedules import build
from tests.proofs.tables import schedule_of
from tests.strategies import feasible_schedules


def test_a_backward_still_holds_the_activation_that_it_frees():
    schedule = schedule_of("0F0 0F1 0F2 0B0 0F3 0B1 0B2 0B3")

    assert live_activations(schedule).tolist() == [1, 2, 3, 3, 3, 3, 2, 1]


def test_an_input_part_frees_no_activation_and_the_weight_part_does():
    schedule = schedule_of("0F0 0F1 0I0 0I1 0W0 0W1")

    assert live_activations(schedule).tolist() == [1, 2, 2, 2, 2, 1]


def test_bytes_shrink_to_the_weight_context_after_the_input_part():
    schedule = schedule_of("0F0 0F1 0I0 0I1 0W0 0W1")

    live = live_bytes(schedule, np.array([10]), np.array([3]))

    assert live.tolist() == [10, 20, 20, 13, 6, 3]


def test_bytes_are_those_of_each_stage():
    schedule = schedule_of("0F0 0B0\n1F0 1B0")

    assert live_bytes(schedule, np.array([10, 7]), np.array([0, 0])).tolist() == [10, 10, 7, 7]


def test_a_forward_without_any_backward_frees_its_activation_itself():
    assert live_activations(schedule_of("0F0 0F1 0F2")).tolist() == [1, 1, 1]


@pytest.mark.parametrize("pair", ["(0F1;0B0)OVERLAP_F_B", "(0B0;0F1)OVERLAP_F_B"])
def test_both_members_of_a_pair_are_alive_together(pair):
    assert live_activations(schedule_of(f"0F0 {pair} 0B1")).tolist() == [1, 2, 2, 1]


def test_what_one_rank_leaves_alive_does_not_count_on_the_next():
    assert live_activations(schedule_of("0F0 0F1\n1F0 1F1 1B0 1B1")).tolist() == [1, 2, 1, 2, 2, 1]


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("gpipe", {}, [6, 6, 6, 6]),
        ("1f1b", {}, [4, 3, 2, 1]),
        ("1f1b", {"warmup": "eager"}, [6, 5, 3, 1]),
        ("sequential", {}, [1, 1, 1, 1]),
        ("forward-only", {}, [1, 1, 1, 1]),
    ],
)
def test_the_peaks_of_the_families_are_those_of_their_formulas(name, options, expected):
    schedule = build(name, ranks=4, microbatches=6, **options)

    assert peak_activations(schedule) == expected
    assert peak_activations(lower(schedule)) == expected


def test_rows_that_take_and_free_at_once_count_themselves():
    schedule = schedule_of("0F0 0B0")

    live = alive(schedule, np.array([5, 1]), np.array([5, 0]))

    assert live.tolist() == [5, 1]
    assert peaks(schedule, live) == [5]


@given(feasible_schedules())
def test_peaks_are_the_largest_of_what_is_alive(schedule):
    program, sizes = lower(schedule), np.arange(1, schedule.num_stages + 1)
    made, gone = program.is_compute, ~program.is_compute

    assert peak_bytes(program, 3 * sizes, sizes) == peaks(program, live_bytes(program, 3 * sizes, sizes))
    assert peak_alive(program, made, gone) == peaks(program, alive(program, made, gone))
