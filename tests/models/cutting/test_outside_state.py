"""Variables outside of modules change their fingerprints when functions change them; what is refused has its words."""

import logging
import threading

import pytest
from torch import nn

from penstock.errors import PenstockError
from penstock.models.cutting.outside_state import OutsideState, is_data, refuse_exact_types
from penstock.models.cutting.reached_code import ReachedCode
from penstock.models.cutting.state import changed_names

log, lock, table, unused = logging.getLogger(), threading.Lock(), {}, []


class Model(nn.Module):
    kinds = []  # noqa: RUF012

    def forward(self, rows):
        log.info("rows")
        with lock:
            return rows, table, self.kinds

    def other(self):
        return unused


def changes_of(model, change):
    outside = OutsideState(ReachedCode([model]))
    before = outside.state()
    change()
    return changed_names(before, outside.state())


def test_what_changes_is_named():
    assert changes_of(Model(), lambda: table.update(a=1)) == [f"the global variable {__name__}.table"]
    assert changes_of(Model(), lambda: Model.kinds.append(1)) == ["the class variable Model.kinds"]


def test_what_the_forward_does_not_use_does_not_count():
    assert changes_of(Model(), lambda: unused.append(1)) == []
    with lock:
        assert changes_of(Model(), lambda: log.setLevel(log.level)) == []


@pytest.mark.parametrize("value", [print, len, nn.Linear, nn.Linear(1, 1), logging, log, lock])
def test_code_and_what_belongs_to_threads_is_no_data(value):
    assert not is_data(value)


class Asking(nn.Module):
    def forward(self, blocks):
        return [type(block) is nn.Linear for block in blocks]


def test_a_question_for_the_very_type_names_the_function_and_the_fix():
    with pytest.raises(PenstockError, match=r"Asking\.forward\(\) asks 'type\(block\) is nn\.Linear'.*isinstance"):
        refuse_exact_types(ReachedCode([Asking()]))


class AskingForTuples(nn.Module):
    def forward(self, values):
        return [type(value) is tuple or type(value) is not dict or type(value) is None for value in values]


def test_a_question_for_a_type_that_is_no_module_is_left_alone():
    refuse_exact_types(ReachedCode([AskingForTuples()]))
