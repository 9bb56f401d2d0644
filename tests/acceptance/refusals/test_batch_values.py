"""Ranks that are given different batches refuse the step, before anything ran, and say what differs."""

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from penstock.errors import PipelineError, StepRefused
from penstock.execute.batch.admission import VALUES_EVERY
from penstock.execute.batch.stream import Stream
from tests.support.local_pipelines import error_of, float_task, on_pipelines, pipeline_of

ROWS = 8
TASK = float_task(ROWS)
(INPUTS,), TARGET = TASK.inputs, TASK.target


def answers(case, num_ranks=2, **options):
    """What `case(pipeline, rank)` returned on every rank."""
    return on_pipelines(num_ranks, TASK, lambda pipeline: case(pipeline, pipeline.rank), **options)


def errors(case, num_ranks=2):
    """What each rank's call raised; nothing has run, and the next step runs."""

    def run(pipeline, rank):
        error = error_of(case, pipeline, rank)
        assert all(parameter.grad is None for _, parameter in pipeline.named_parameters())
        assert pipeline.step(INPUTS, target=TARGET).loss == TASK.reference(4)[0].loss
        return error

    return answers(run, num_ranks)


def loaded_by(rank):
    """The first batch of a loader that shuffles, each rank by a seed of its own."""
    generator = torch.Generator().manual_seed(rank)
    return next(iter(DataLoader(TensorDataset(INPUTS, TARGET), batch_size=ROWS, shuffle=True, generator=generator)))


def shuffled(pipeline, rank):
    inputs, target = loaded_by(rank)
    pipeline.step(inputs, target=target)


def one_element(pipeline, rank):
    inputs = INPUTS.clone()
    inputs[5, 3] += 1e-6 * rank
    pipeline.step(inputs, target=TARGET)


CASES = {
    "shuffled": (shuffled, "args[0], target"),
    "one element": (one_element, "args[0]"),
    "only target": (lambda own, rank: own.step(*[INPUTS][rank:], target=TARGET + rank), "target"),
    "evaluated": (lambda own, rank: own.evaluate(INPUTS + rank), "args[0]"),
    "recorded": (lambda own, rank: own.step(INPUTS + rank, target=TARGET, record=True), "args[0]"),
    "profiled": (lambda own, rank: own.profile(INPUTS + rank, target=TARGET, split_backwards=True), "args[0]"),
    "reported": (lambda own, rank: own.memory_report(INPUTS + rank, target=TARGET), "args[0]"),
}


@pytest.mark.feature("G1")
@pytest.mark.parametrize(("case", "places"), CASES.values(), ids=CASES)
def test_a_batch_that_differs_is_refused_on_all_ranks_with_its_place(case, places):
    for error in errors(case):
        assert type(error) is StepRefused
        assert f"rank 0 and rank 1 were given different values in {places}; pass the same batch" in str(error)
        assert "check_batches=False" in str(error)


def test_a_rank_is_compared_only_in_what_it_was_given():
    given = [(INPUTS,), (), ()]
    targets = [None, None, TARGET]
    found = answers(lambda pipeline, rank: pipeline.step(*given[rank], target=targets[rank]).loss, 3)

    assert found == [TASK.reference(4)[0].loss] * 3


def test_a_rank_in_the_middle_that_passes_another_batch_is_named():
    for error in errors(lambda pipeline, rank: pipeline.step(INPUTS + (rank == 1), target=TARGET), 3):
        assert "rank 0 and rank 1 were given different values in args[0];" in str(error)


def test_a_batch_that_differs_later_is_found_at_the_next_step_that_compares():
    def case(pipeline, rank):
        for number in range(3 * VALUES_EVERY):
            pipeline.evaluate(INPUTS)
            try:
                pipeline.step(INPUTS + rank * (number > 5), target=TARGET)
            except StepRefused:
                return number
        return None

    assert answers(case) == [VALUES_EVERY] * 2


def test_the_first_evaluation_compares_whatever_was_trained_before():
    def case(pipeline, rank):
        pipeline.step(INPUTS, target=TARGET)
        return error_of(pipeline.evaluate, INPUTS + rank)

    for error in answers(case):
        assert "different values in args[0]" in str(error)


def test_after_a_failed_step_the_next_one_compares_again():
    def case(pipeline, rank):
        pipeline.step(INPUTS, target=TARGET)
        pipeline.step(INPUTS + rank, target=TARGET)  # is not compared
        layer = next(iter(pipeline.stages[0].layers.values()))
        hook = layer.register_forward_pre_hook(lambda *_: 1 / 0)
        failed = error_of(pipeline.step, INPUTS, target=TARGET)
        hook.remove()
        return failed, error_of(pipeline.step, INPUTS + rank, target=TARGET)

    for failed, refused in answers(case):
        assert isinstance(failed, PipelineError)
        assert not isinstance(failed, StepRefused)
        assert "different values in args[0]" in str(refused)


def test_a_refused_step_does_not_count_as_one_that_compared():
    def case(pipeline, rank):
        uneven = error_of(pipeline.step, INPUTS[:7], target=TARGET[:7])
        first = error_of(pipeline.step, INPUTS + rank, target=TARGET)
        return uneven, first, error_of(pipeline.step, INPUTS, target=TARGET + rank)

    for uneven, first, second in answers(case):
        assert "do not divide evenly" in str(uneven)
        assert "different values in args[0]" in str(first)
        assert "different values in target" in str(second)


def test_streams_and_a_pipeline_that_was_told_so_compare_no_values():
    def streamed(pipeline, rank):
        own = zip((INPUTS + rank).chunk(4), (TARGET + rank).chunk(4), strict=True)
        return pipeline.step(Stream(list(own))).loss

    def whole(pipeline, rank):
        return pipeline.step(INPUTS + rank, target=TARGET + rank).loss

    expected = pipeline_of(None, TASK).step(INPUTS, target=TARGET + 1).loss
    assert answers(streamed) == answers(whole, check_batches=False) == [expected] * 2
