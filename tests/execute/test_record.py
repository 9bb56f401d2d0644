"""What a recorder measures: every row, on one clock, in an order that the dependencies allow."""

import time

import numpy as np

from penstock.execute.record import Recorder
from penstock.ir.deps import NONE, predecessors
from penstock.ir.instruction import Op
from penstock.pipeline import Pipeline
from tests.local_pipelines import float_task, on_ranks, step_task


def test_a_call_is_measured_from_its_start_to_its_end():
    recorder = Recorder(2)
    during = []

    before = time.monotonic()
    recorder.timed(1, lambda: during.append(time.monotonic()))()
    after = time.monotonic()

    assert before <= recorder.start_s[1] <= during[0] <= recorder.end_s[1] <= after
    assert recorder.start_s[0] == recorder.end_s[0] == 0.0


def test_an_arrival_moves_the_end_of_its_receive_only():
    recorder = Recorder(1)
    recorder.timed(0, lambda: None)()
    posted = float(recorder.start_s[0])

    recorder.timed_arrival(0, lambda: None)()

    assert recorder.start_s[0] == posted
    assert recorder.end_s[0] >= posted


def test_measured_rows_end_after_they_start_and_keep_every_dependency():
    task = float_task(8)

    def case(wires):
        pipeline = Pipeline(task.make_layers(), "1f1b", 4, task.loss, transport=wires)
        step_task(pipeline, task)
        return step_task(pipeline, task, record=True).timeline

    timeline = on_ranks(3, case)[1]

    program, start_s, end_s = timeline.program, timeline.start_s, timeline.end_s
    assert len(start_s) == program.num_instructions
    assert start_s.min() == 0.0
    assert (end_s >= start_s).all()
    for rank in range(program.num_ranks):
        rows = timeline.compute_rows(rank)
        assert (np.diff(start_s[rows]) >= 0).all()
        assert (start_s[rows][1:] >= end_s[rows][:-1]).all()
    before = predecessors(program)
    for row in np.flatnonzero(program.is_compute):
        for source in before[row][before[row] != NONE]:
            assert start_s[row] >= end_s[source]
            if Op(int(program.op[source])).is_receive:
                producer = before[before[source, 0], 0]
                assert end_s[source] >= end_s[producer]
