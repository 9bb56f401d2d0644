"""What ranks agree on when they save or load."""

import pytest

from penstock.checkpoints.agreement import failing_as, require_equal_on_ranks
from penstock.errors import CheckpointError, NotSaved, PipelineError
from penstock.execute.control.collectives import Control
from penstock.execute.transport.rank_names import RankNames
from tests.train.local_ranks import error_of, on_ranks


def errors_of(failing_rank, failure, error_type):
    """What two ranks raise where one of them fails."""

    def case(wires):
        def make():
            if wires.rank == failing_rank:
                raise failure

        return error_of(Control(wires).together, make, failing_as(error_type))

    return on_ranks(2, case)


@pytest.mark.parametrize(("failure", "words"), [(CheckpointError("full"), "full"), (KeyError("x"), "KeyError: 'x'")])
def test_an_error_of_one_rank_is_an_error_on_all(failure, words):
    first, second = errors_of(1, failure, CheckpointError)

    assert second is failure
    assert (type(first), str(first)) == (CheckpointError, f"rank 1: {words}")


@pytest.mark.parametrize("failure", [NotSaved("full"), CheckpointError("full"), PipelineError("full")])
def test_every_rank_raises_the_type_that_is_asked_for(failure):
    own, other = errors_of(0, failure, NotSaved)

    assert (type(own), str(own)) == (NotSaved, "full")
    assert (type(other), str(other)) == (NotSaved, "rank 0: full")


def test_what_differs_is_named_with_the_rank():
    names = RankNames.plain(3)
    require_equal_on_ranks("step", [3, 3, 3], "folder", names)
    with pytest.raises(CheckpointError, match="folder: rank 2 has another step than rank 0; pass the same"):
        require_equal_on_ranks("step", [3, 3, 4], "folder", names)
