"""The labels of public calls, and what is said of those that differ."""

import re

import pytest

from penstock.errors import PeerLeft, StepRefused
from penstock.execute.transport.calls import (
    PublicCalls,
    calls_of,
    collective,
    label,
    label_of_departed,
    numbered,
    require_one_call,
)
from penstock.execute.transport.local import LocalTransport
from penstock.execute.transport.rank_names import RankNames
from tests.support.local_pipelines import error_of

SAVE, STEP, OTHER_STEP = b"save\ta.py:1", b"step\ta.py:2", b"step\tb.py:3"
SECOND_STEP = STEP.replace(b"step", numbered("step", 2).encode())
CLOSED, ENDED = label_of_departed("closed the pipeline (a.py:4)"), label_of_departed("ended")
NAMES = RankNames([4, 5, 6], ["rank 4 (data 0)", "rank 5 (data 1)", "rank 6 (data 2)"])


PLACES = re.compile(r" \(\w\.py:\d\)")


def words(*labels, names=None):
    error = error_of(require_one_call, labels, names or RankNames.plain(len(labels)))
    assert type(error) is (PeerLeft if " has closed" in str(error) or " have ended" in str(error) else StepRefused)
    return str(error), error.rank


def told(*labels):
    """Return what is told of ranks without the lines of their calls, and who is to blame."""
    text, rank = words(*labels)
    ranks, _, fix = PLACES.sub("", text).partition("; every rank must call ")
    return ranks, fix, rank


@pytest.mark.parametrize(
    "labels", [[STEP], [STEP, STEP], [STEP, OTHER_STEP, STEP], [STEP, b""], [b"", b"", OTHER_STEP]]
)
def test_ranks_in_one_call_on_whichever_lines_agree(labels):
    require_one_call(labels, RankNames.plain(len(labels)))


@pytest.mark.parametrize(
    ("labels", "ranks", "fix", "rank"),
    [
        ([SAVE, STEP], "rank 0 is in save, rank 1 in step", "save", 0),
        ([STEP, SAVE], "rank 0 is in step, rank 1 in save", "save", 1),
        ([STEP, SAVE, SAVE], "rank 0 is in step, ranks 1, 2 in save", "step", 0),
        ([SAVE, SAVE, STEP], "ranks 0, 1 are in save, rank 2 in step", "step", 2),
        ([STEP, SAVE, OTHER_STEP], "rank 0 is in step, rank 1 in save, rank 2 in step", "save", 1),
        ([STEP, SECOND_STEP], "rank 0 is in step, rank 1 in step of pipeline 2 on the transport", "step", 0),
        ([SECOND_STEP, SAVE], "rank 0 is in step of pipeline 2 on the transport, rank 1 in save", "save", 1),
        ([b"", SAVE, STEP], "rank 1 is in save, rank 2 in step", "save", 1),
        ([STEP, CLOSED], "rank 1 has closed the pipeline, the others are in step", "step", 1),
        ([ENDED, STEP, ENDED, STEP], "ranks 0, 2 have ended, the others are in step", "step", 0),
        ([STEP, CLOSED, SAVE], "rank 1 has closed the pipeline, the others are in save and step", "save", 1),
    ],
)
def test_ranks_that_have_left_come_first_and_else_the_call_of_fewest_which_is_no_step(labels, ranks, fix, rank):
    assert told(*labels) == (ranks, fix, rank)


def test_what_a_replica_does_not_know_of_another_one_changes_no_word():
    assert words(STEP, STEP, CLOSED, STEP) == words(STEP, STEP, CLOSED, b"")


def test_ranks_have_the_names_and_numbers_that_they_have_elsewhere_and_calls_their_lines():
    text = "ranks 4, 5 are in step (a.py:2), rank 6 (data 2) in save (a.py:1); every rank must call save"

    assert words(STEP, STEP, SAVE, names=NAMES) == (text, 6)


def test_of_very_many_ranks_the_first_are_listed():
    assert words(SAVE, *[STEP] * 1000)[0].count(" ") < 30


def test_the_outermost_call_names_all_within_it():
    calls = PublicCalls()

    with calls.entering("outer"):
        outer = calls.current
        with calls.entering("inner"):
            assert calls.current == outer
        assert calls.current == outer
    assert calls.current == b""
    assert outer.startswith(b"outer\ttest_calls.py:")


def test_what_a_call_knew_of_others_ends_with_it_also_by_an_error():
    calls = PublicCalls()

    def fail():
        with calls.entering("step"):
            calls.of_replica = [STEP]
            raise ValueError("planted")

    assert str(error_of(fail)) == "planted"
    assert (calls.current, calls.of_replica) == (b"", ())


def test_the_place_is_the_line_of_the_user_whatever_a_file_is_called():
    code = compile("made = label('step')", "/home/a\tb\nc.py", "exec")
    variables = {"label": label, "__name__": "__main__"}
    exec(code, variables)

    assert variables["made"] == b"step\ta b c.py:1"
    exec(compile("made = label('step')", "long" * 1000 + ".py", "exec"), variables)
    assert variables["made"] == b"step\t" + ("long" * 1000 + ".py")[-100:].encode() + b":1"


class Holder:
    """Stands for a pipeline."""

    pipeline_number = 0

    def __init__(self):
        self.calls, self.control = PublicCalls(), self

    @collective
    def save(self):
        """Save."""
        return self.calls.current.partition(b"\t")[0]


@collective
def load(folder, pipeline=None):
    return "nothing" if pipeline is None else pipeline.calls.current.partition(b"\t")[0]


def test_a_marked_method_or_function_enters_the_call_of_its_pipeline():
    assert Holder().save() == b"Holder.save"
    assert load("folder", Holder()) == load("folder", pipeline=Holder()) == b"load"
    assert (Holder.save.__name__, Holder.save.__doc__) == ("save", "Save.")
    assert load("folder") == "nothing"
    assert isinstance(error_of(load), TypeError)  # a wrong argument is left to the call to refuse


def test_a_transport_has_one_account_of_calls_and_others_a_new_one():
    wires, other = LocalTransport.create(2)

    assert calls_of(wires) is calls_of(wires)
    assert calls_of(wires) is not calls_of(other)
    assert calls_of(object()) is not calls_of(object())
