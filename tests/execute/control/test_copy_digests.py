"""Ranks whose copies of a tied parameter have different digests are named, the owner first."""

import pytest

from penstock.errors import PipelineError, StepRefused
from penstock.execute.control.copy_digests import require_equal_digests
from penstock.execute.transport.rank_names import RankNames
from tests.support.local_pipelines import error_of

NAMES = RankNames.plain(3)


def test_equal_digests_pass_and_so_do_parameters_that_one_rank_holds():
    require_equal_digests([[(0, 0, "embedding.weight", 7)], [], [(0, 0, "head.weight", 7), (1, 0, "norm", 5)]], NAMES)


@pytest.mark.parametrize("error_type", [PipelineError, StepRefused])
def test_the_first_copy_that_differs_is_named_by_its_rank_and_both_names(error_type):
    digests = [[(0, 0, "a", 1), (0, 1, "embedding.weight", 7)], [(0, 0, "a", 1)], [(0, 1, "head.weight", -7)]]

    error = error_of(require_equal_digests, digests, NAMES, error_type)

    assert type(error) is error_type
    assert error.rank == 2
    assert str(error).startswith(
        "rank 0 holds 'embedding.weight', and rank 2 its copy 'head.weight', whose values differ"
    )
