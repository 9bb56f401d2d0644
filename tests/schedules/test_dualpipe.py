"""`dualpipe`: what it refuses."""

import pytest

from penstock.errors import ConfigError
from penstock.schedules import build


@pytest.mark.parametrize(
    ("ranks", "microbatches", "told"),
    [
        (3, 8, "ranks: dualpipe folds two directions onto an even number of ranks, got 3; use 4, or dualpipe-v"),
        (4, 9, "microbatches: dualpipe sends half of the microbatches each way, got 9; use 10"),
        (4, 6, "microbatches: dualpipe needs .* got 6 on 4 ranks; use 8 or more, or chimera"),
    ],
)
def test_what_does_not_fold_is_refused_with_a_fix(ranks, microbatches, told):
    with pytest.raises(ConfigError, match=told):
        build("dualpipe", ranks=ranks, microbatches=microbatches)
