"""Failures in a pipeline whose ranks are threads: the message, the original error, and the step after it."""

import gc
import os
import re
import sys
import threading
import weakref

import pytest
import torch

from penstock.errors import DeadlineExceeded, PeerLost, PipelineError
from penstock.execute.control.failures import FailureReporter, _note_end
from penstock.execute.control.positions import departure_of
from penstock.execute.lost_device import living_instances
from penstock.execute.stages.passes import SavedForward
from penstock.execute.transport import LocalTransport
from penstock.execute.transport.places import Places
from tests.support.boards import boards_of_threads
from tests.support.faults import DEADLINE_S, NUM_RANKS, Fault, FaultyRank, FaultyThreads, PlantedError, batch, is_right


@pytest.fixture(scope="module")
def pipeline():
    with FaultyThreads() as ranks:
        yield ranks


def test_a_failed_step_keeps_no_activation_alive(pipeline):
    pipeline.step(Fault("raise", 2, "backward", 1))
    gc.collect()

    assert not living_instances(SavedForward)


def test_the_rank_that_raised_keeps_its_original_error_as_the_cause(pipeline):
    inputs, target = batch()
    fault = Fault("raise", 1, "backward", 2, error=MemoryError)

    def step(rank):
        rank.switch.arm(fault)
        return rank.pipeline.step(inputs, target=target)

    errors = pipeline.each(step)

    assert type(errors[1]) is PipelineError
    assert type(errors[1].__cause__) is MemoryError
    assert (errors[1].rank, errors[1].instruction) == (1, "1B2")
    assert str(errors[1]).splitlines()[0] == "rank 1, 1B2: MemoryError: planted"
    assert [type(error) for error in errors if error is not errors[1]] == [PeerLost] * 3


def test_the_rank_that_raised_says_in_which_layer_and_where_all_ranks_were(pipeline):
    ending = pipeline.step(Fault("raise", 2, "forward", 1))[2]

    heading, empty, *table, legend = ending.text.splitlines()
    assert heading == "rank 2, 2F1, in layer 2 (Layer): PlantedError: planted"
    assert empty == ""
    assert table[0].split() == ["rank", "step", "state", "for", "waits", "for", "instruction"]
    assert [row.split()[0] for row in table[1:]] == ["0", "1", "2", "3"]
    assert re.fullmatch(r"failed \d+\.\d s 2F1", " ".join(table[3].split()[2:]))
    assert "the forward of stage 2 on microbatch 1" in legend


def test_the_other_ranks_are_told_who_raised_what_and_no_more(pipeline):
    ending = pipeline.step(Fault("raise", 2, "forward", 1))[3]

    heading, own = ending.text.splitlines()
    assert heading == "rank 2 is the culprit: in 2F1, in layer 2 (Layer), it raised PlantedError: planted"
    assert own == f"rank 3, in {ending.error.instruction}: waited {ending.error.waited_s:.2f} s for rank 2"


class WordyError(Exception):
    def __init__(self, text):
        super().__init__(f"{text}\n  with a second line\n")


def test_of_an_error_with_many_lines_the_first_is_the_reason(pipeline):
    ending = pipeline.step(Fault("raise", 2, "forward", error=WordyError))[0]

    heading = ending.text.splitlines()[0]
    assert heading == "rank 2 is the culprit: in 2F0, in layer 2 (Layer), it raised WordyError: planted"


@pytest.mark.parametrize("error", [PeerLost, DeadlineExceeded])
def test_a_lost_peer_of_a_layers_own_pipeline_is_an_error_of_that_layer(pipeline, error):
    ends = pipeline.step(Fault("raise", 2, "forward", error=error))

    assert type(ends[2].error) is PipelineError
    assert ends[2].text.splitlines()[0] == f"rank 2, 2F0, in layer 2 (Layer): {error.__name__}: planted"
    heading = f"rank 2 is the culprit: in 2F0, in layer 2 (Layer), it raised {error.__name__}: planted"
    assert [end.text.splitlines()[0] for end in ends if end is not ends[2]] == [heading] * 3
    assert is_right(pipeline.step())


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", [Fault("hang", 1, "forward", 2), Fault("hang", 1, "optimizer")], ids=lambda f: f.place
)
def test_a_rank_that_hangs_is_shown_with_its_stack_and_the_step_after_it_woke_is_right(pipeline, fault):
    endings = pipeline.step(fault)
    clean = pipeline.step()

    for rank in (0, 2, 3):
        assert isinstance(endings[rank].error, DeadlineExceeded | PeerLost)
        assert re.match(rf"rank 1 is the culprit: it has been in {fault.instruction} for \d+\.\d s", endings[rank].text)
        assert "in hang_here" in endings[rank].text.partition("rank 1 was here:")[2]
    assert endings[1].text.splitlines()[1].endswith("went on when the others had given up")
    assert is_right(clean)


@pytest.mark.slow
def test_a_rank_that_does_not_come_back_after_a_failure_is_named_instead_of_the_old_culprit(pipeline):
    pipeline.step(Fault("raise", 1, "forward"))
    alone = pipeline.each(lambda rank: None if rank.switch.rank == 3 else rank.step())
    clean = pipeline.step()

    for rank, ending in enumerate(alone[:3]):
        first, second, empty, *table = ending.text.splitlines()
        assert first == "after a failed step the ranks could not start afresh"
        assert second.startswith(f"rank {rank}: waited ")
        assert "ranks [3] did not come" in second
        assert (empty, len(table), ending.error.peer) == ("", NUM_RANKS + 1, 3)
    assert is_right(clean)


def reporter():
    (transport,), (board,) = LocalTransport.create(1, DEADLINE_S), boards_of_threads(1)
    return FailureReporter(Places.of(transport), board, lambda rank, row: f"row {row}")


def test_a_closed_reporter_leaves_no_thread():
    before = threading.active_count()
    reported = reporter()
    reported.begin(0)
    during = threading.active_count()
    reported.report(ValueError("planted"))
    reported.close()

    assert (during, threading.active_count()) == (before + 1, before)


def test_an_error_between_instructions_names_the_rank_alone():
    reported = reporter()

    error = reported.report(PlantedError("planted"))

    assert (str(error), error.instruction, reported._has_failed) == ("rank 0: PlantedError: planted", "", True)


def test_one_rank_alone_fails_and_goes_on():
    rank = FaultyRank.start(LocalTransport.create(1, DEADLINE_S)[0])

    failed, clean = rank.step(Fault("raise", 0, "forward", 5)), rank.step()
    rank.pipeline.close()

    assert failed.text == "rank 0, 0F1, in layer 1 (Layer): PlantedError: planted"
    assert clean.error is None


def test_a_second_interrupt_while_the_first_is_reported_still_wakes_the_other_ranks(monkeypatch):
    ranks = LocalTransport.create(2, DEADLINE_S)
    reported = FailureReporter(Places.of(ranks[0]), boards_of_threads(2)[0], lambda rank, row: f"row {row}")

    def interrupted(*args, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("penstock.execute.control.failures.diagnose", interrupted)
    with pytest.raises(KeyboardInterrupt):
        reported.report(KeyboardInterrupt())

    with pytest.raises(PeerLost, match="rank 0 aborted"):
        ranks[1].wait(ranks[1].post_receive(0, torch.empty(1)))


def test_a_process_that_ends_in_good_order_is_noted_as_ended(monkeypatch):
    for error, pid, expected in [
        (None, os.getpid(), "ended"),
        (ValueError(), os.getpid(), ""),  # an uncaught error says more
        (None, os.getpid() + 1, ""),  # the process was forked off the rank's
    ]:
        monkeypatch.setattr(sys, "last_value", error, raising=False)
        reported = reporter()
        _note_end(weakref.ref(reported.board), pid)
        assert departure_of(reported.board, 0) == expected


def test_a_reporter_notes_where_its_pipeline_was_closed():
    reported = reporter()
    assert departure_of(reported.board, 0) == ""

    with reported._calls.entering("close"):
        reported.close()

    line = test_a_reporter_notes_where_its_pipeline_was_closed.__code__.co_firstlineno + 4
    assert departure_of(reported.board, 0) == f"closed the pipeline (test_failures.py:{line})"


def test_a_pipeline_that_is_dropped_without_close_is_noted():
    reported = reporter()
    board = reported.board
    del reported
    gc.collect()

    assert departure_of(board, 0) == "closed the pipeline (by dropping it)"
