"""Ranks that are killed at random instants cost nothing but time; `make test-faults` kills more of them."""

import pytest

from tests import kills


@pytest.fixture(scope="module")
def weights(tmp_path_factory):
    return kills.undisturbed(tmp_path_factory.mktemp("kills") / "whole")


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_run_whose_ranks_are_killed_comes_to_the_same_weights(tmp_path, weights, seed):
    problem, num_kills = kills.case(tmp_path / "case", seed, weights)

    assert problem == ""
    assert num_kills > 0
