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
from penstock.execute.transport import LocalTransport
from penstock.execute.transport.places import Places
from tests.support.boards import boards_of_threads
from tests.support.faults import DEADLINE_S, Fault, FaultyRank, FaultyThreads, PlantedError, batch, is_right


@pytest.fixture(scope="module")
def pipeline():
    with FaultyThreads() as ranks:
        yield ranks


def test_the_rank_that_raised_keeps_its_original_error_as_the_cause(pipeline):
    inputs, target = batch()

    def step(rank):
        rank.switch.arm(Fault("raise", 1, "backward", 2, error=MemoryError))
        return rank.pipeline.step(inputs, target=target)

    errors = pipeline.each(step)

    assert (type(errors[1]), type(errors[1].__cause__)) == (PipelineError, MemoryError)
    assert (errors[1].rank, errors[1].instruction) == (1, "1B2")
    assert [type(error) for error in errors if error is not errors[1]] == [PeerLost] * 3


def test_the_rank_that_raised_says_what_where_and_where_all_were_and_the_others_who_raised_what_and_no_more(pipeline):
    endings = pipeline.step(Fault("raise", 2, "forward", 1))

    other = endings[3]
    heading, local = other.text.splitlines()
    assert heading == "rank 2 is the culprit: in 2F1, in layer 2 (Layer), it raised PlantedError: planted"
    assert local == f"rank 3, in {other.error.instruction}: waited {other.error.waited_s:.2f} s for rank 2"
    heading, empty, *table, legend = endings[2].text.splitlines()
    assert heading == "rank 2, 2F1, in layer 2 (Layer): PlantedError: planted"
    assert empty == ""
    assert table[0].split() == ["rank", "step", "state", "for", "waits", "for", "instruction"]
    assert [row.split()[0] for row in table[1:]] == ["0", "1", "2", "3"]
    assert re.fullmatch(r"failed \d+\.\d s 2F1", " ".join(table[3].split()[2:]))
    assert "the forward of stage 2 on microbatch 1" in legend


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


def reporter():
    (transport,), (board,) = LocalTransport.create(1, DEADLINE_S), boards_of_threads(1)
    return FailureReporter(Places.of(transport), board, lambda rank, row: f"row {row}")


def test_a_closed_reporter_leaves_no_thread_and_names_the_rank_alone_between_instructions():
    before = threading.active_count()
    reported = reporter()
    reported.begin(0)
    during = threading.active_count()
    error = reported.report(PlantedError("planted"))
    reported.close()

    assert (during, threading.active_count()) == (before + 1, before)
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


def test_a_reporter_notes_where_its_pipeline_was_closed_or_that_it_was_dropped():
    reported, dropped = reporter(), reporter()
    board = dropped.board
    assert departure_of(reported.board, 0) == departure_of(board, 0) == ""

    with reported._calls.entering("close"):
        reported.close()
    del dropped
    gc.collect()

    assert re.fullmatch(r"closed the pipeline \(test_failures.py:\d+\)", departure_of(reported.board, 0))
    assert departure_of(board, 0) == "closed the pipeline (by dropping it)"
