"""What a recorder measures: every row, on one clock, in an order that the dependencies allow."""

import time
from functools import partial

import numpy as np
import torch

from penstock.execute.observing.clock import Clock
from penstock.execute.observing.record import Recorder
from penstock.ir.deps import NONE, predecessors
from penstock.ir.instruction import Op
from penstock.pipeline import Pipeline
from tests.local_pipelines import WIDTH, float_task, on_ranks, step_task

FAR_S = 1000.0


def test_a_call_is_measured_from_its_start_to_its_end():
    times = iter([1.0, 2.0, 4.0])
    recorder = Recorder(2, Clock(lambda: next(times)))
    during = []

    recorder.timed(1, lambda step: during.append(next(times)))(None)

    assert (recorder.start_s.tolist(), during, recorder.end_s.tolist()) == ([0.0, 1.0], [2.0], [0.0, 4.0])


def test_an_arrival_moves_the_end_of_its_receive_only():
    times = iter([1.0, 2.0, 5.0])
    recorder = Recorder(1, Clock(lambda: next(times)))
    recorder.timed(0, lambda step: None)(None)

    recorder.timed_arrival(0, lambda step: None)(None)

    assert (recorder.start_s[0], recorder.end_s[0]) == (1.0, 5.0)


def record(wires, clocks=None):
    """Return the second, recorded step, which knows all shapes; a clock per rank, if any."""
    task = float_task(8)
    clock = {} if clocks is None else {"clock": clocks[wires.rank]}
    pipeline = Pipeline(task.make_layers(), "1f1b", 4, task.loss, transport=wires, **clock)
    step_task(pipeline, task)
    step_task(pipeline, task, record=True)
    return pipeline.recording


def assert_in_order(timeline, *, apart_s=0.0):
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
                assert end_s[source] >= end_s[producer] - apart_s


def test_measured_rows_end_after_they_start_and_keep_every_dependency():
    recordings = on_ranks(3, record)

    assert_in_order(recordings[1].timeline)
    assert recordings[1].timeline.clock_uncertainty_s == 0.0
    assert all((r.timeline.start_s == recordings[0].timeline.start_s).all() for r in recordings)


def test_ranks_whose_clocks_are_far_apart_are_laid_on_one_scale_and_the_rest_is_told():
    def clock(rank):
        return Clock(lambda: FAR_S * rank + (1 + 1e-4 * rank) * time.monotonic(), f"host {rank}")

    timeline = on_ranks(3, record, [clock(rank) for rank in range(3)])[2].timeline

    assert 0 < timeline.clock_uncertainty_s < 1.0
    assert timeline.makespan_s < FAR_S / 10
    assert_in_order(timeline, apart_s=timeline.clock_uncertainty_s)


def test_a_moment_on_the_own_clock_is_found_on_the_timeline():
    recordings = on_ranks(2, record)

    now = time.monotonic()

    found = [recording.from_own_clock(now) for recording in recordings]
    assert found == [now - recordings[0].origin_s] * 2
    assert found[0] > recordings[0].timeline.makespan_s


def test_the_bytes_of_messages_are_those_of_the_outputs():
    """Batches of 8 in 4 microbatches: 2 rows of floats; the last stage sends none on."""
    assert [recording.message_bytes for recording in on_ranks(3, record)] == [(2 * WIDTH * 4, 2 * WIDTH * 4, 0)] * 3


def gradients(wires, *, split_backwards):
    task = float_task(8)
    pipeline = Pipeline(task.make_layers(), "1f1b", 4, task.loss, transport=wires)
    timeline = pipeline.profile(*task.inputs, target=task.target, split_backwards=split_backwards)
    after = pipeline.profile(*task.inputs, target=task.target)
    ops = [set(each.program.op[each.program.is_compute].tolist()) for each in (timeline, after)]
    return ops, [parameter.grad for _, parameter in pipeline.named_parameters()]


def test_a_profile_may_run_backwards_in_two_parts_and_gives_the_same_gradients():
    whole, split = (
        on_ranks(2, partial(gradients, split_backwards=False)),
        on_ranks(2, partial(gradients, split_backwards=True)),
    )

    for (ops, expected), (ops_of_parts, found) in zip(whole, split, strict=True):
        assert (ops, ops_of_parts) == ([{0, 1}, {0, 1}], [{0, 2, 3}, {0, 1}])
        assert all(map(torch.equal, found, expected))


def test_a_step_that_is_not_recorded_leaves_the_recording_as_it_was():
    task = float_task(8)

    def case(wires):
        pipeline = Pipeline(task.make_layers(), "1f1b", 4, task.loss, transport=wires)
        assert pipeline.timeline is None
        step_task(pipeline, task, record=True)
        first = pipeline.recording
        step_task(pipeline, task)
        return pipeline.recording is first and pipeline.timeline is first.timeline

    assert on_ranks(2, case) == [True, True]
