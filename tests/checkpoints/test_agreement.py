"""Saving and loading together: errors of one rank, values that differ, and disks that take too long."""

import threading

import pytest

from penstock.checkpoints import agreement
from penstock.checkpoints.agreement import failing_as, longest_s, require_equal_on_ranks, run_together
from penstock.errors import CheckpointError, NotSaved, PenstockError, PipelineError
from penstock.execute.control.collectives import Control
from penstock.execute.transport.rank_names import RankNames
from tests.support.local_pipelines import error_of, on_ranks


@pytest.mark.parametrize(
    ("failing_rank", "failure", "error_type", "words"),
    [
        (1, CheckpointError("full"), CheckpointError, "full"),
        (1, KeyError("x"), CheckpointError, "KeyError: 'x'"),
        *((0, kind("full"), NotSaved, "full") for kind in (NotSaved, CheckpointError, PipelineError)),
    ],
)
def test_an_error_of_one_rank_is_one_of_the_type_that_is_asked_for_on_all(failing_rank, failure, error_type, words):
    def case(wires):
        def make():
            if wires.rank == failing_rank:
                raise failure

        return error_of(Control(wires).together, make, failing_as(error_type))

    errors = on_ranks(2, case)

    local, other = errors[failing_rank], errors[1 - failing_rank]
    assert local is failure or (type(local), str(local)) == (error_type, words)
    assert isinstance(local, (error_type, KeyError))
    assert (type(other), str(other)) == (error_type, f"rank {failing_rank}: {words}")


def test_what_differs_is_named_with_the_rank():
    names = RankNames.plain(3)
    require_equal_on_ranks("step", [3, 3, 3], "folder", names)
    with pytest.raises(CheckpointError, match="folder: rank 2 has another step than rank 0; pass the same"):
        require_equal_on_ranks("step", [3, 3, 4], "folder", names)


def test_an_error_of_one_disk_is_an_error_on_every_rank():
    def case(transport):
        def action():
            if transport.rank:
                raise PenstockError("full")

        kinds = {"num_bytes": 0, "path": "folder", "error_type": NotSaved}
        return error_of(lambda: run_together(Control(transport), action, **kinds))

    errors = on_ranks(2, case)

    assert [(type(error), str(error)) for error in errors] == [(NotSaved, "rank 1: full"), (NotSaved, "full")]


def test_a_disk_that_does_not_answer_is_an_error_on_every_rank(monkeypatch):
    monkeypatch.setattr(agreement, "STALLED_AFTER_S", 0.1)
    is_free = threading.Event()

    def case(transport):
        return error_of(lambda: run_together(Control(transport), is_free.wait, num_bytes=0, path="folder"))

    errors = on_ranks(2, case)
    is_free.set()
    assert [type(error) for error in errors] == [CheckpointError] * 2
    assert "folder: a disk took more than 0 s" in str(errors[0])


def test_more_bytes_have_more_time():
    assert longest_s(2 << 30) - longest_s(0) == pytest.approx((2 << 30) / agreement.SLOWEST_BYTES_PER_S)
