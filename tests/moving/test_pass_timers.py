"""Timers in Megatron-LM's form are started and stopped around every pass, and change nothing."""

import pytest

from penstock.errors import PipelineError
from penstock.moving.megatron import get_forward_backward_func
from tests.moving.megatron_model import Part, forward_step, microbatches, one_process
from tests.moving.own_layers import assert_gradients, gradients
from tests.moving.test_megatron import mean_squares, run
from tests.support.local_pipelines import error_of, on_ranks


class Timers:
    """Notes starts and stops, and refuses a second start as Megatron-LM's timers do."""

    def __init__(self):
        self.log = []
        self.running = set()

    def __call__(self, name, log_level):
        assert log_level == 2
        return Timer(self, name)

    def count(self, name):
        assert not self.running
        return self.log.count(f"start {name}")


class Timer:
    def __init__(self, timers, name):
        self._timers, self._name = timers, name

    def start(self):
        assert self._name not in self._timers.running
        self._timers.running.add(self._name)
        self._timers.log.append(f"start {self._name}")

    def stop(self):
        self._timers.running.remove(self._name)
        self._timers.log.append(f"stop {self._name}")


def timed(schedule, timers, *, step=forward_step, num_parts=1, **options):
    """Return what two ranks with timers of their own come to: gradients, and the error if the step fails."""

    def case(transport):
        call = get_forward_backward_func(schedule, transport=transport, **options)
        parts = {stage: Part(stage, 2 * num_parts) for stage in range(transport.rank, 2 * num_parts, 2)}
        items = microbatches(4)
        given = {"model": list(parts.values()), "data_iterator": [iter(items) for _ in parts]}
        given |= {"forward_step_func": step, "num_microbatches": 4, "timers": timers[transport.rank]}
        error = error_of(call, **given) if step is not forward_step else call(**given)
        call.close()
        return gradients(parts), error

    return on_ranks(2, case)


@pytest.mark.feature("A12", "H11")
@pytest.mark.parametrize(
    ("schedule", "num_parts", "options", "num_forwards", "num_backwards"),
    [
        ("1f1b", 1, {}, 4, 4),
        ("zb-h1", 1, {}, 4, 8),
        ("interleaved-1f1b", 2, {}, 8, 8),
        ("1f1b", 1, {"messages": "coalesced"}, 4, 4),
    ],
)
def test_every_pass_is_timed_and_no_wait(schedule, num_parts, options, num_forwards, num_backwards):
    timers = [Timers(), Timers()]

    outcomes = timed(schedule, timers, num_parts=num_parts, **options)

    for own in timers:
        assert own.count("forward-compute") == num_forwards
        assert own.count("backward-compute") == num_backwards
        assert [line.replace("stop", "start") for line in own.log[1::2]] == own.log[::2]
    expected = one_process(2 * num_parts, microbatches(4), mean_squares, [0.25] * 4)[1]
    assert_gradients([found for found, _ in outcomes], expected)


def test_timers_of_one_call_time_no_other():
    def case(transport):
        call, timers = get_forward_backward_func(transport=transport), Timers()
        part = Part(transport.rank, 2)
        for given in ({"timers": timers}, {}, {"timers": timers, "forward_only": True}, {"timers": None}):
            run(call, part, microbatches(4), **given)
        call.close()
        return timers.count("forward-compute"), timers.count("backward-compute")

    assert on_ranks(2, case) == [(8, 4), (8, 4)]


def test_a_forward_that_fails_is_stopped_too():
    def failing(data_iterator, model):
        if model.post_process:
            raise ValueError("nothing here")
        return forward_step(data_iterator, model)

    timers = [Timers(), Timers()]
    for _, error in timed("1f1b", timers, step=failing):
        assert isinstance(error, PipelineError)
    assert timers[1].log == ["start forward-compute", "stop forward-compute"]
    assert not timers[0].running


def test_timers_of_the_first_releases_take_a_name_alone():
    class OldTimers(Timers):
        def __call__(self, name):
            return super().__call__(name, log_level=2)

    timers = [OldTimers(), OldTimers()]
    timed("1f1b", timers)

    assert [own.count("forward-compute") for own in timers] == [4, 4]
