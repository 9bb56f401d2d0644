"""What ranks agree on when they save or load."""

import pytest

from penstock.checkpoints.agreement import gather_results, require_equal_on_ranks
from penstock.errors import CheckpointError, NotSaved, PipelineError
from penstock.execute.control.collectives import Control
from tests.train.local_ranks import error_of, on_ranks


def test_every_rank_gets_all_results():
    assert on_ranks(3, lambda wires: gather_results(Control(wires), lambda: wires.rank)) == [[0, 1, 2]] * 3


@pytest.mark.parametrize(("failure", "words"), [(CheckpointError("full"), "full"), (KeyError("x"), "KeyError: 'x'")])
def test_an_error_of_one_rank_is_an_error_on_all(failure, words):
    def case(wires):
        def make():
            if wires.rank == 1:
                raise failure
            return 0

        return error_of(lambda: gather_results(Control(wires), make))

    first, second = on_ranks(2, case)
    assert second is failure
    assert (type(first), str(first)) == (CheckpointError, f"rank 1: {words}")


def test_what_differs_is_named_with_the_rank():
    require_equal_on_ranks("step", [3, 3], "folder")
    with pytest.raises(CheckpointError, match="folder: rank 2 has another step than rank 0; pass the same"):
        require_equal_on_ranks("step", [3, 3, 4], "folder")


def test_every_rank_raises_the_type_that_is_asked_for():
    def case(wires):
        def make():
            raise PipelineError("it broke") if wires.rank else NotSaved("full")

        return error_of(lambda: gather_results(Control(wires), make, NotSaved))

    assert [(type(error), str(error)) for error in on_ranks(2, case)] == [(NotSaved, "full"), (NotSaved, "it broke")]
