"""Ranks that are lost at random instants cost nothing but time; `make test-faults` loses more of them."""

import pytest

from tests.support import kills
from tests.support.killed_runs import LINES, MESHES, SHARDS, Undisturbed
from tests.support.lost_replicas import FAULTS, SQUARES, Loss


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    return Undisturbed(tmp_path_factory.mktemp("kills") / "undisturbed")


def test_fifty_cases_have_lines_each_mesh_and_each_way_to_lose_a_rank_of_each_shard():
    seeds = kills.seeds_of(50, 1)
    drawn = [Loss.drawn(seed) for seed in seeds[40:]]

    assert seeds[:30] == list(range(1, 31)), "seeds of lines mean what they meant before there were meshes"
    assert [kills.layout_of(seed) for seed in seeds[:4]] == [LINES[1], LINES[0]] * 2
    assert [layout.num_processes for layout in LINES] == [4, 2]
    assert {kills.layout_of(seed) for seed in seeds[30:40]} == set(MESHES)
    assert {(mesh.ranks, mesh.replicas) for mesh in MESHES} == {(2, 2), (1, 2), (1, 4)}
    assert all(sum(f"parallel.shard={shard}" in mesh.sections for mesh in MESHES) >= 3 for shard in SHARDS)
    assert {loss.fault for loss in drawn} == set(FAULTS)
    assert {loss.layout for loss in drawn} == set(SQUARES)
    assert {loss.rank for loss in drawn if loss.fault.name == "kill"} == {0, 1, 2, 3}
    assert len(set(map(str, drawn))) == 10


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed", [3, 1002, *(pytest.param(seed, marks=pytest.mark.full) for seed in (1, 2, 1004, 1006))]
)
def test_a_run_whose_ranks_are_killed_comes_to_the_same_weights(tmp_path, undisturbed, seed):
    _, problem, num_kills = kills.case(tmp_path / "case", seed, undisturbed)

    assert problem == ""
    assert num_kills > 0


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seed", [2010, *(pytest.param(seed, marks=pytest.mark.full) for seed in (2002, 2003, 2004, 2006))]
)
def test_all_others_name_a_rank_of_a_mesh_that_is_lost_and_the_command_continues(tmp_path, undisturbed, seed):
    _, problem, _ = kills.case(tmp_path / "case", seed, undisturbed)

    assert problem == ""
