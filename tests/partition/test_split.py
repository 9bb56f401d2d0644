"""Stages take consecutive layers, even, by weight or as given, and a wrong split says what is wrong."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import PartitionError
from penstock.partition.split import (
    ParameterCounts,
    count_stages,
    describe_split,
    split_layers,
    split_over,
    split_text,
)
from penstock.placement import Placement
from penstock.tables import Screen
from tests.schedules.golden import cases


def sizes(stages):
    return [len(stage) for stage in stages]


@pytest.mark.feature("F1")
@given(num_layers=st.integers(1, 96), num_stages=st.integers(1, 96))
def test_an_even_split_covers_all_layers_in_order(num_layers, num_stages):
    num_stages = min(num_stages, num_layers)

    stages = split_layers(num_layers, num_stages)

    assert [layer for stage in stages for layer in stage] == list(range(num_layers))
    assert len(stages) == num_stages
    assert max(sizes(stages)) - min(sizes(stages)) <= 1


@pytest.mark.feature("F2")
def test_the_number_of_stages_is_what_torchtitan_computes():
    """It counts the embedding and the head as layers, as lists of layers here do."""
    for num_layers, layers_per_stage, num_ranks, num_stages in cases("stages"):
        if num_stages is None:
            with pytest.raises(PartitionError, match=rf"no multiple of {num_ranks} ranks"):
                count_stages(num_layers, layers_per_stage, num_ranks)
        else:
            assert count_stages(num_layers, layers_per_stage, num_ranks) == num_stages


def test_layers_per_stage_that_do_not_fit_are_refused_with_the_nearest_that_do():
    with pytest.raises(PartitionError, match=r"^4 layers per stage make 3 stages of 10 layers, .* ranks; use 3 or 5$"):
        count_stages(10, 4, 2)
    with pytest.raises(PartitionError, match=r"no multiple of 4 ranks; use fewer ranks or more layers$"):
        count_stages(3, 1, 4)


@pytest.mark.feature("X15")
def test_weights_shift_the_split():
    assert split_layers(4, 2, weights=[3, 1, 1, 1]) == (range(0, 1), range(1, 4))


@pytest.mark.feature("X15", "X28")
def test_a_given_split_is_taken_as_it_is():
    assert split_layers(6, 3, split=[1, 4, 1], weights=[1] * 6) == (range(0, 1), range(1, 5), range(5, 6))


@pytest.mark.feature("F3", "X37")
@pytest.mark.parametrize(
    ("sizes", "weights", "message"),
    [
        ((6, 8), None, r"8 stages, but the model has only 6 layers .* at most 6 stages"),
        ((3, 0), None, "0 stages"),
        ((3, 2), [1, 1], "2 weights were given for 3 layers"),
    ],
)
def test_what_no_split_can_have_is_refused(sizes, weights, message):
    with pytest.raises(PartitionError, match=message):
        split_layers(*sizes, weights=weights)


@pytest.mark.parametrize(
    ("split", "message"),
    [
        ([3, 3], r"split \[3, 3\] names 2 stages, but the schedule has 3; give 3 numbers"),
        ([3, 0, 3], r"split \[3, 0, 3\] gives stage 1 0 layers; every stage needs 1, be it an nn.Identity"),
        ([3, 4, -1], r"split \[3, 4, -1\] gives stage 2 -1 layers"),
        ([2, 2, 1], r"adds up to 5 layers, but the model has 6; give 1 more to some stage, or leave split out"),
        ([3, 3, 1], r"adds up to 7 layers, but the model has 6; take 1 away from some stage, or leave split out"),
    ],
)
def test_a_split_that_does_not_fit_is_refused(split, message):
    with pytest.raises(PartitionError, match=message):
        split_layers(6, 3, split=split)


NAMES = ["embedding", "blocks.0", "blocks.1", "norm", "head"]


def counts(*of_stage, **ties):
    return ParameterCounts({(stage,): number for stage, number in enumerate(of_stage)}, **ties)


@pytest.mark.feature("F4")
def test_a_split_is_drawn_with_shares_and_names():
    stages = split_layers(5, 3, split=[2, 2, 1])

    assert describe_split(stages, NAMES, [0, 1, 1, 0, 2], counts(2, 2, 1)) == (
        "stage  layers  weight  parameters  names\n"
        "────────────────────────────────────────────────────────\n"
        "    0       2   25.0%           2  embedding .. blocks.0\n"
        "    1       2   25.0%           2  blocks.1 .. norm\n"
        "    2       1   50.0%           1  head\n"
        "heaviest: stage 2, 1.50 times the mean\n"
    )


@pytest.mark.parametrize("width", [20, 30, 40, 56, 250])
def test_a_split_fits_a_narrow_screen(width):
    stages = split_layers(5, 3, split=[2, 2, 1])

    lines = describe_split(
        stages, NAMES, [0, 1, 1, 0, 2], counts(2_000_000, 2_000_000, 1_000_000), Screen(width)
    ).splitlines()

    assert max(map(len, lines)) <= max(width, 27)  # a stage, its share and a part of its names need 27
    assert {"stage", "weight", "names"} <= set(lines[0].split())
    assert ("left out" in " ".join(lines)) == (width < 56)


def test_frozen_parameters_are_told_and_that_w_has_nothing_to_do_with_them():
    stages = split_layers(5, 3, split=[2, 2, 1])

    def last_lines(frozen, **options):
        drawn = describe_split(stages, NAMES, [0, 1, 1, 0, 2], counts(2000, 2000, 1000, frozen=frozen), **options)
        return drawn.splitlines()[6:]

    assert last_lines({}, splits_backwards=True) == []
    assert last_lines({(0,): 2000, (2,): 400}, splits_backwards=True) == [
        "trained, all others are frozen: 2,000 in stage 1, 600 in stage 2; none in stage 0"
    ]
    adapted = {(0,): 2000, (1,): 2000, (2,): 950}
    told = "trained, all others are frozen: 50 in stage 2; none in stages 0, 1"
    assert last_lines(adapted) == [told]
    line, advice = last_lines(adapted, splits_backwards=True)
    assert line == told
    assert advice.startswith("1.00% of the parameters are trained, so that W has next to nothing to do")
    assert advice.endswith("take a schedule that does not split backwards, such as 1f1b")


# ---- copies of the model


def test_every_route_runs_a_copy_of_the_model_that_is_cut_alike():
    halves = (range(0, 3), range(3, 5))

    assert split_over(Placement.bidirectional(2), 5) == halves * 2
    assert split_over(Placement.line(2), 5) == halves
    assert split_over(Placement.explicit([0, 1, 1, 0], [[1, 0], [2, 3]]), 5) == (halves[1], halves[0], *halves)


def test_a_split_is_given_for_one_copy():
    assert split_over(Placement.bidirectional(2), 5, split=[1, 4]) == (range(0, 1), range(1, 5)) * 2

    with pytest.raises(PartitionError, match=r"4 stages, but the schedule has 2.*one of the schedule's 2 copies"):
        split_over(Placement.bidirectional(2), 5, split=[1, 1, 2, 1])


def test_routes_of_different_length_are_refused():
    with pytest.raises(PartitionError, match=r"the routes of the schedule have \[2, 1\] stages"):
        split_over(Placement.explicit([0, 1, 0], [[0, 1], [2]]), 5)


def test_copies_of_a_stage_are_drawn_as_one_row():
    stages = split_over(Placement.bidirectional(2), 5)

    assert describe_split(stages, NAMES, [0, 1, 1, 0, 2], counts(3, 2, 3, 2)) == (
        "  stage  layers  weight  parameters  names\n"
        "──────────────────────────────────────────────────────────\n"
        "0 and 2       3   50.0%           3  embedding .. blocks.1\n"
        "1 and 3       2   50.0%           2  norm .. head\n"
        "heaviest: stage 0 and 2, 1.00 times the mean\n"
    )


def test_shares_of_weight_gradients_that_wait_have_a_column_where_they_are_known():
    stages, numbers = [range(1), range(1, 2), range(1)], counts(10, 20, 10)

    text = describe_split(stages, ["a", "b"], [1.0, 1.0], numbers, late_shares={0: 0.5, 1: 1.0, 2: 0.25})

    rows = [line.split() for line in text.splitlines()]
    assert rows[0][-4:] == ["wait", "for", "W", "names"]
    assert [row[-2] for row in rows[2:4]] == ["25%", "100%"]
    assert "wait for W" not in describe_split(stages, ["a", "b"], [1.0, 1.0], numbers)


def test_weights_that_do_not_wait_are_listed_with_the_reason():
    names = {"a.0": "small", "a.1": "cannot be told apart", "a.2": "small"}

    text = describe_split([range(1)], ["a"], [1.0], counts(1), late_shares={0: 0.5}, reasons={0: names, 1: {}})

    assert text.splitlines()[-1:] == ["do not wait for W in stage 0: a.0, a.2 (small); a.1 (cannot be told apart)"]


# ---- parameters of several stages


def last_lines(parameters, stages=((0, 1), (1, 2), (2, 3), (3, 5)), width=None):
    stages = [range(*ends) for ends in stages]
    return describe_split(stages, NAMES, [1.0] * 5, parameters, Screen(width)).split("times the mean\n")[1]


def test_parameters_that_a_rank_holds_once_count_in_one_stage_which_a_last_line_names():
    assert last_lines(counts(1000, 10, 10, 4, shared={(3, 0): 1000})) == (
        "tied on one rank: 1,000 parameters of stage 0 in stage 3, counted once\n"
    )


def test_copies_count_in_each_stage_and_last_lines_name_them_and_the_number_without():
    assert last_lines(counts(1000, 10, 1010, 1004, copied={(2, 0): 1000, (3, 0): 1000, (3, 1): 1})) == (
        "copies on other ranks: 1,000 parameters of stage 0 in stages 2, 3, counted in each\n"
        "copies on other ranks: 1 parameter of stage 1 in stage 3, counted in each\n"
        "without copies: 1,023 parameters\n"
    )


def test_copies_of_a_stage_that_share_parameters_with_one_another_are_one_row():
    halves = ((0, 3), (3, 5)) * 2
    shared = {(1, 2): 8, (3, 0): 8}

    assert last_lines(counts(10, 2, 10, 2, shared=shared, copied={(2, 0): 10, (3, 1): 2}), halves) == (
        "tied on one rank: 8 parameters of stage 0 and 2 in stage 1 and 3, counted once\n"
    )


def test_what_the_ranks_counted_is_put_together():
    first = {"of_stage": [[0, 5], [2, 1]], "shared": [[2, 0, 4]], "copied": []}
    second = {"of_stage": [[1, 7]], "shared": [], "copied": [[1, 0, 4]]}

    assert ParameterCounts.of_ranks([first, second]) == ParameterCounts(
        {(0,): 5, (2,): 1, (1,): 7}, {(2, 0): 4}, {(1, 0): 4}
    )


def test_a_split_in_a_few_words_lists_the_layers_of_few_stages():
    assert split_text((3, 4)) == "split 3,4"
    assert split_text((7,)) == "split 7"
    assert split_text((2, 3) * 16) == "split into 32 stages of 2 to 3 layers"
    assert split_text((1,) * 32) == "split into 32 stages of 1 layer"
