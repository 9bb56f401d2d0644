"""All rows of a rank become calls in their order, with observers around them and changes around these."""

from contextlib import contextmanager
from dataclasses import replace
from functools import partial

from penstock.execute.compile.program import compile_program
from penstock.execute.observing.observer import Observer
from penstock.execute.stages.stage import Stage
from penstock.lowering import lower
from penstock.schedules import build
from tests.support.compiled import context_of, step_for
from tests.support.one_stage import passes_of

PROGRAM = lower(build("1f1b", ranks=2, microbatches=2))


def compiled(observers=(), changes=()):
    passes = {1: passes_of(Stage(1, {}))}
    return compile_program(context_of(PROGRAM, 1, passes=passes), observers, changes)


class Saying(Observer):
    """Says a word at the beginning of each call."""

    def __init__(self, word, said):
        self.word = word
        self.said = said

    def around(self, program, bound):
        return self.saying

    @contextmanager
    def saying(self, step):
        self.said.append(self.word)
        yield


def saying(word, said):
    """Return a change that does the same."""

    def call(bound, step):
        said.append(word)
        bound.call(step)

    return lambda bounds: [replace(bound, call=partial(call, bound)) for bound in bounds]


def test_each_row_becomes_one_call_or_two_with_the_wait():
    found = compiled()

    texts = [(str(PROGRAM.instruction(bound.row)), bound.awaits is not None) for bound in found.bounds]
    assert [text for text, is_wait in texts if not is_wait] == list(map(str, PROGRAM[1]))
    assert [text for text, is_wait in texts if is_wait] == ["1F0", "1F1"]
    assert found.rows == range(*PROGRAM.offsets[1:3])
    assert set(found.data_rows.values()) == {0, 1}


def test_without_changes_the_calls_are_the_plain_ones():
    found = compiled()

    assert all(bound is plain for bound, plain in zip(found.bounds, found.bounds_with([]), strict=True))


def test_observers_of_a_step_are_inside_of_those_of_every_step_and_changes_outside():
    said = []
    found = compiled([Saying("every step", said)], [saying("change", said)])

    step = step_for(context_of(PROGRAM, 1))
    found.bounds[0].call(step)
    found.bounds_with([Saying("this step", said)])[0].call(step)

    assert said == ["change", "every step", "change", "every step", "this step"]
