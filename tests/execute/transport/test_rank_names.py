"""Ranks have names that say where they are on a mesh."""

import pytest
import torch

from penstock.execute.transport import LocalTransport
from penstock.execute.transport.rank_names import RankNames, rank_names
from tests.support.local_pipelines import error_of

NAMES = RankNames.on_mesh([4, 6], [{"pipeline": 0, "data": 2}, {"pipeline": 1, "data": 2}])


@pytest.mark.feature("X48")
def test_a_rank_of_a_mesh_is_named_by_its_number_and_its_places():
    assert [*NAMES.texts] == ["rank 4 (pipeline 0, data 2)", "rank 6 (pipeline 1, data 2)"]
    assert NAMES.select([1]).texts == ["rank 6 (pipeline 1, data 2)"]
    assert NAMES.of_number(6) == NAMES[1]
    assert NAMES.of_number(5) == "rank 5"


def test_a_rank_without_a_mesh_is_named_by_its_index():
    (transport, _) = LocalTransport.create(2)

    assert rank_names(transport)[1] == "rank 1"
    assert rank_names(object()).texts == []


def test_errors_of_a_transport_have_the_numbers_and_names():
    first, other = LocalTransport.create(2, names=NAMES)
    other.abort()

    error = error_of(first.post_send, 1, torch.zeros(1))

    assert (error.rank, error.peer) == (6, 6)
    assert str(error).startswith("rank 4 (pipeline 0, data 2): lost rank 6 (pipeline 1, data 2) while it")
