"""A hook may run the two computations of a pair in any order, or at once: every bit stays the same."""

import runpy
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from penstock.errors import PipelineError
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.execute.test_run import PAIRS
from tests.house.source import ROOT
from tests.support.local_pipelines import (
    Task,
    difference,
    error_of,
    float_layers,
    float_task,
    on_ranks,
    run_task,
    same_outcomes,
    step_task,
)

FAMILIES = {
    "drawn": PAIRS,
    "dualpipe": build("dualpipe", ranks=2, microbatches=8),
    "dualpipe-v": build("dualpipe-v", ranks=2, microbatches=6),
}


def backward_first(first, second):
    second()
    first()


class InTwoThreads:
    """Runs both at once, and sees to it that both are under way before either goes on."""

    def __init__(self):
        self.num_pairs = 0
        self._threads = ThreadPoolExecutor(2)

    def __call__(self, first, second):
        self.num_pairs += 1
        begun = Barrier(2, timeout=20.0)
        futures = [self._threads.submit(lambda run=run: (begun.wait(), run())) for run in (first, second)]
        for future in futures:
            future.result()


def outcomes_of(schedule, make_overlap, *, steps=2, record=False):
    task = float_task(2 * schedule.num_microbatches)
    task = Task(lambda: float_layers(num_layers=schedule.num_stages + 1), task.inputs, task.target)

    def case(wires):
        overlap = make_overlap()
        pipeline = Pipeline(task.make_layers(), schedule, loss=task.loss, transport=wires, overlap=overlap)
        for _ in range(steps):
            for _, parameter in pipeline.named_parameters():
                parameter.grad = None
            outcome = step_task(pipeline, task, record=record)
        pipeline.close()
        return outcome, overlap

    results = on_ranks(schedule.num_ranks, case)
    return [outcome for outcome, _ in results], [overlap for _, overlap in results], task


@pytest.mark.feature("X19")
@pytest.mark.slow
@pytest.mark.parametrize("make_overlap", [lambda: backward_first, InTwoThreads], ids=["backward first", "two threads"])
@pytest.mark.parametrize("schedule", FAMILIES.values(), ids=FAMILIES)
def test_a_hook_changes_no_bit(schedule, make_overlap):
    expected, _, _ = outcomes_of(schedule, lambda: None)

    outcomes, _, task = outcomes_of(schedule, make_overlap)

    assert same_outcomes(outcomes, expected)
    assert difference(outcomes, task.reference(schedule.num_microbatches), tolerance=1e-5, loss_tolerance=1e-5) == []


def test_the_hook_is_called_once_per_pair_which_starts_in_a_recording_when_the_inputs_of_both_are_there():
    _, overlaps, _ = outcomes_of(PAIRS, InTwoThreads, steps=1)
    assert [overlap.num_pairs for overlap in overlaps] == [1, 2]

    outcomes, _, _ = outcomes_of(PAIRS, lambda: backward_first, record=True)
    timeline = outcomes[0].timeline

    rows = {str(timeline.program.instruction(row)): row for row in range(timeline.program.num_instructions)}
    arrived_s = timeline.end_s[rows["0RECV_B0"]]
    start_s, end_s = timeline.start_s, timeline.end_s
    assert arrived_s <= start_s[rows["0B0"]] < end_s[rows["0B0"]] <= start_s[rows["0F2"]] < end_s[rows["0F2"]]


def test_autocast_and_grad_mode_reach_the_threads_of_a_hook():
    seen = []

    class Layer(torch.nn.Linear):
        def forward(self, x):
            seen.append((torch.is_grad_enabled(), torch.is_autocast_enabled("cpu"), torch.get_autocast_dtype("cpu")))
            return super().forward(x).float()

    def case(wires):
        pipeline = Pipeline([Layer(6, 6), Layer(6, 6)], PAIRS, loss=task.loss, transport=wires, overlap=InTwoThreads())
        with torch.autocast("cpu", dtype=torch.bfloat16):
            step_task(pipeline, task)
        pipeline.close()

    task = float_task(6)
    on_ranks(2, case)

    assert len(seen) == 6
    assert set(seen) == {(True, True, torch.bfloat16)}


def test_a_hook_must_run_both_computations():
    task, hooks = float_task(6), [None, lambda first, second: first()]

    error = error_of(on_ranks, 2, lambda wires: run_task(wires, task, PAIRS, None, overlap=hooks[wires.rank]))

    assert isinstance(error, PipelineError)
    problem = "the overlap hook ran 1B0 0 times; call both of its arguments once"
    assert f"rank 1, 1F1: PipelineError: {problem}" in str(error)


@pytest.mark.parametrize("make_overlap", [lambda: backward_first, InTwoThreads], ids=["backward first", "two threads"])
def test_an_error_within_a_pair_names_its_own_computation(make_overlap):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            raise ValueError("no gradient today")

    class Layer(torch.nn.Linear):
        def forward(self, x):
            return Fails.apply(super().forward(x))

    def case(wires):
        task = float_task(6)
        layers = [torch.nn.Linear(6, 6), Layer(6, 6)]
        pipeline = Pipeline(layers, PAIRS, loss=task.loss, transport=wires, overlap=make_overlap())
        step_task(pipeline, task)

    error = error_of(on_ranks, 2, case)

    assert "rank 1, 1B0: ValueError: no gradient today" in str(error)


@pytest.mark.parametrize(
    "hook", [pytest.param("", marks=pytest.mark.slow), pytest.param("OnTwoStreams on cuda", marks=pytest.mark.gpu)]
)
def test_the_example_computes_the_same_bits_with_its_hook_which_uses_two_streams_on_a_gpu(capsys, hook):
    runpy.run_path(str(ROOT / "examples" / "overlapped_pairs.py"), run_name="__main__")

    printed = capsys.readouterr().out
    assert printed.startswith(hook)
    assert printed.endswith(": gradients equal bit for bit\n")
