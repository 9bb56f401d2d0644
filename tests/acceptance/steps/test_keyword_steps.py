"""Keywords reach layers behind wrappers in whole steps, as they do on one process."""

import gc
import itertools
import tracemalloc
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel

from penstock.errors import PipelineError, StepRefused
from penstock.execute.transport import LocalTransport, headers
from penstock.pipeline import Pipeline
from tests.random_models.wrappers import Checkpointed
from tests.support.local_pipelines import (
    WIDTH,
    Around,
    Task,
    assert_errors,
    block,
    error_of,
    on_pipelines,
    on_ranks,
    pipeline_of,
    square_loss,
    step_task,
    values,
)

ROWS, NUM_MICROBATCHES = 8, 4
F64 = torch.float64


class Masked(Around):
    def __init__(self, seed):
        super().__init__(seed, F64)

    def forward(self, x, mask=None):
        return self.inner(x) if mask is None else self.inner(x) * mask


class Scaled(Masked):
    def forward(self, x, *, scale=1.0):
        return self.inner(x) * scale


class Attending(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.inner = Masked(seed)

    def forward(self, hidden, scale=None, **kwargs):
        kwargs.pop("ignored", None)
        return self.inner(hidden, **kwargs)


def bare_layers():
    return [Masked(0), Scaled(1), Masked(2), Masked(3), Scaled(4), block(5, F64)]


def wrapped_layers():
    masked, scaled, own, inner, compiled, plain = bare_layers()
    attending = Attending(3)
    attending.inner = inner
    compiled = torch.compile(compiled, backend="eager")
    last = Checkpointed(plain)
    return [checkpoint_wrapper(masked), Checkpointed(scaled), Checkpointed(own), attending, compiled, last]


def task_of(make_layers):
    mask = torch.rand(ROWS, 1, generator=torch.Generator().manual_seed(7), dtype=F64)
    inputs, target = (values(seed, ROWS, WIDTH, dtype=F64) for seed in (1, 2))
    return Task(make_layers, (inputs,), target, keywords={"mask": mask, "scale": 1.7})


def run(pipeline, task):
    """The outcome of a step, and the loss of an evaluation."""
    outcome = step_task(pipeline, task)
    return outcome, pipeline.evaluate(*task.inputs, target=task.target, **task.keywords).loss


def assert_as_one_process(per_rank):
    """Compare losses and gradients with those of the layers without their wrappers, which have other names."""
    result, gradients = task_of(bare_layers).reference(NUM_MICROBATCHES)
    for outcome, evaluated in per_rank:
        torch.testing.assert_close([outcome.result.loss, evaluated], [result.loss] * 2, rtol=1e-12, atol=1e-12)
    found = {name: gradient for outcome, _ in per_rank for name, gradient in outcome.gradients.items()}
    in_order = [found[name] for name in sorted(found, key=lambda name: int(name.partition(".")[0]))]
    torch.testing.assert_close(in_order, list(gradients.values()), rtol=1e-12, atol=1e-12)


@pytest.mark.feature("A4")
@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe"])
def test_keywords_reach_layers_behind_wrappers_as_on_one_process(schedule):
    task = task_of(wrapped_layers)

    assert_as_one_process(on_pipelines(2, task, lambda pipeline: run(pipeline, task), schedule))


def steps_on_gloo(rank):
    alone = [dist.new_group([member]) for member in range(2)][rank]
    own = range(3 * rank, 3 * rank + 3)
    task = task_of(
        lambda: [
            DistributedDataParallel(layer, process_group=alone) if index in own else layer
            for index, layer in enumerate(wrapped_layers())
        ]
    )
    with pipeline_of(None, task, split=[3, 3]) as pipeline:
        outcome, evaluated = run(pipeline, task)
    return outcome.result.loss, evaluated


@pytest.mark.slow
def test_keywords_reach_layers_behind_data_parallel_wrappers_on_gloo(two_ranks):
    per_rank = two_ranks.run(steps_on_gloo)

    loss = task_of(bare_layers).reference(NUM_MICROBATCHES)[0].loss
    for losses in per_rank:
        torch.testing.assert_close(losses, (loss, loss), rtol=1e-12, atol=1e-12)


class Unnamed(nn.Module):
    """Its loop hides which layers get the keywords."""

    def __init__(self, *inner):
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, x, **kwargs):
        for layer in self.inner:
            x = layer(x, **kwargs)
        return x


def masked_on_rank_1(pipeline, task):
    """The loss of a step in which rank 1 alone is given a keyword."""
    given = {"mask": task.keywords["mask"]} if pipeline.rank else {}
    return pipeline.step(*task.inputs, target=task.target, **given).loss


def test_a_rank_whose_layers_may_take_any_keyword_must_get_them_where_another_does():
    task = task_of(lambda: [Unnamed(Masked(0)), Masked(1)])

    errors = on_pipelines(2, task, lambda pipeline: error_of(masked_on_rank_1, pipeline, task))

    assert_errors(errors, StepRefused, "rank 1 was given keyword arguments, rank 0 was not")


def test_a_rank_without_layers_that_take_keywords_needs_none():
    task = task_of(lambda: [Checkpointed(block(0, F64)), Checkpointed(Masked(1))])

    losses = on_pipelines(2, task, lambda pipeline: masked_on_rank_1(pipeline, task))

    expected = square_loss(Masked(1)(block(0, F64)(*task.inputs), task.keywords["mask"]), task.target)
    torch.testing.assert_close(losses, [expected.detach()] * 2, rtol=1e-12, atol=1e-12)


# ---- scalars that change from step to step


class Shifted(Masked):
    """Hands the number on beside its output."""

    def forward(self, state, position=0, rate=1.0):
        x = state[0] if isinstance(state, tuple) else state
        return self.inner(x) * rate + position, position


class Last(Shifted):
    def forward(self, state):
        x, position = state
        return self.inner(x) + position


def counted_soak(monkeypatch, numbers_of, num_steps=120):
    """The losses, how many headers and messages were sent, and how many bytes Python holds more after 40 steps."""
    trees, sends, held = [], itertools.count(), {}
    encode, post_send = headers.encode_layout, LocalTransport.post_send

    def count_headers(tree):
        trees.append(tree)
        return encode(tree)

    def count_sends(transport, peer, tensor, *tag):
        next(sends)
        return post_send(transport, peer, tensor, *tag)

    monkeypatch.setattr(headers, "encode_layout", count_headers)
    monkeypatch.setattr(LocalTransport, "post_send", count_sends)

    def numbers(index):
        if index % 40 == 39:
            gc.collect()  # a step's cycles wait for the collector, which comes at another step in every run
            held[index] = tracemalloc.get_traced_memory()[0]
        return numbers_of(index)

    def soak(pipeline):
        return [
            float(pipeline.step(*task.inputs, target=task.target, **numbers(index)).loss) for index in range(num_steps)
        ]

    task = task_of(lambda: [Shifted(0), Shifted(1), Last(2)])
    tracemalloc.start()
    try:
        losses, _ = on_pipelines(2, task, soak)
    finally:
        tracemalloc.stop()
    growths = [after - before for before, after in itertools.pairwise(held.values())]
    return losses, len(trees), next(sends), min(growths)  # caches grow now and then, what each step leaves always


@pytest.mark.slow
def test_numbers_that_change_at_every_step_cost_what_fixed_ones_do(monkeypatch):
    fixed, num_headers, num_sends, usual = counted_soak(monkeypatch, lambda index: {"position": 2, "rate": 0.5})
    losses, headers, sends, growth = counted_soak(
        monkeypatch, lambda index: {"position": index, "rate": 1 / (1 + index)}
    )

    assert (headers, sends) == (num_headers, num_sends)
    assert num_headers == NUM_MICROBATCHES  # those of the first step
    assert growth < max(usual, 0) + 10_000  # to keep the numbers of each step and rank would take 20 kB
    assert len(set(fixed)) == 1
    assert len(set(losses)) == 120


@pytest.mark.parametrize("check_batches", [True, False])
def test_a_whole_number_that_differs_between_ranks_is_found_at_every_step_that_compares(check_batches):
    task = task_of(lambda: [Shifted(0), Last(1)])

    def case(pipeline):
        step = partial(pipeline.step, *task.inputs, target=task.target)
        for index in range(3):
            step(position=index)
        if not check_batches:
            return str(step(position=pipeline.rank).loss)
        return str(error_of(step, position=pipeline.rank))

    for text in on_pipelines(2, task, case, check_batches=check_batches):
        assert ("rank 0 and rank 1 were given different values in kwargs['position'];" in text) is check_batches


def test_a_number_that_decides_a_shape_is_named_with_the_way_out():
    class Repeating(nn.Module):
        def forward(self, x, times=1):
            return x.repeat(1, times)

    def case(wires, **options):
        pipeline = Pipeline([Repeating(), nn.Identity()], "1f1b", 2, transport=wires, **options)
        return [pipeline.evaluate(torch.ones(2, 3), times=times, return_outputs=True).outputs for times in (1, 2)]

    assert [tuple(each.shape) for each in on_ranks(2, lambda wires: case(wires, variable_shapes=True))[1]] == [
        (2, 3),
        (2, 6),
    ]
    with pytest.raises(PipelineError, match=r"whatever the numbers in them.*variable_shapes=True"):
        on_ranks(2, case)
