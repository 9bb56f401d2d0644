"""Main gradients are the sums in float32 of what each microbatch's backward computes in the weights' own type."""

import copy
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.execute.parameters.gradient_store import MAIN_GRAD, GradientStore, main_type, require_main_shapes
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import (
    VOCABULARY,
    WIDTH,
    Task,
    block,
    error_of,
    on_ranks,
    settle,
    square_loss,
    token_layers,
    token_loss,
    values,
)

BFLOAT16 = torch.bfloat16
NUM_MICROBATCHES = 4


def float_task():
    return Task(
        lambda: [block(seed, BFLOAT16) for seed in range(4)],
        (values(1, 8, WIDTH, dtype=BFLOAT16),),
        values(2, 8, WIDTH, dtype=BFLOAT16),
    )


def token_task():
    tokens = torch.randint(VOCABULARY, (8, 3), generator=torch.Generator().manual_seed(3))
    return Task(lambda: token_layers(BFLOAT16), (tokens,), tokens.flip(0), token_loss)


def frozen_and_shared_task():
    """Two layers on one rank are one and the same."""

    def layers():
        made = [block(seed, BFLOAT16) for seed in range(3)]
        made[0].requires_grad_(False)
        made[1][1].weight.requires_grad_(False)
        return [*made, nn.Sequential(made[2], nn.Tanh(), made[2])]

    return replace(float_task(), make_layers=layers)


TASKS = {"blocks": float_task, "tokens": token_task, "frozen and shared": frozen_and_shared_task}


def expected_of(task, num_steps=1, tied=()):
    """Plain training on one process, whose gradients are taken away and added up after each microbatch."""
    layers = task.make_layers()
    parameters = dict(nn.Sequential(*layers).named_parameters())  # shared ones once
    for name, other in tied:
        layers[int(name[0])].weight = parameters[other]
    totals = dict.fromkeys(parameters)
    for _ in range(num_steps):
        for inputs, target in zip(*(each.chunk(NUM_MICROBATCHES) for each in (*task.inputs, task.target)), strict=True):
            (task.loss(nn.Sequential(*layers)(inputs), target) * (1 / NUM_MICROBATCHES)).backward()
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    before = totals[name]
                    totals[name] = parameter.grad.float() if before is None else before + parameter.grad.float()
                    parameter.grad = None
    return totals


def run(transport, task, schedule, num_steps=1, **options):
    layers = task.make_layers()
    pipeline = Pipeline(
        layers, schedule, NUM_MICROBATCHES, task.loss, transport=transport, main_gradients=True, **options
    )
    for _ in range(num_steps):
        pipeline.step(*task.inputs, target=task.target)
    pipeline.close()
    parameters = dict(pipeline.named_parameters())
    assert all(parameter.grad is None for parameter in parameters.values())
    return {name: parameter.main_grad for name, parameter in parameters.items()}


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, gradient in found.items():
        assert (gradient is None) == (expected[name] is None), name
        assert gradient is None or (gradient.dtype == torch.float32 and torch.equal(gradient, expected[name])), name


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
@pytest.mark.parametrize("task", TASKS)
def test_each_microbatch_of_two_steps_is_added_in_float32_bit_for_bit(task, schedule):
    task = TASKS[task]()

    first, second = on_ranks(2, run, task, schedule, 2)

    assert_equal(first | second, expected_of(task, 2))


TIED = [("4.weight", "0.weight")]


def test_tied_parameters_are_reduced_in_float32():
    task = token_task()
    first, last = on_ranks(2, lambda wires: run(wires, task, "1f1b", 2, tied=TIED))

    found, expected = first["0.weight"], expected_of(task, 2, TIED)["0.weight"]

    assert found.dtype == torch.float32
    assert torch.equal(found, last["4.weight"])
    assert torch.allclose(found, expected, rtol=0.02, atol=1e-3)  # the parts of a microbatch are in bfloat16
    assert not torch.equal(found, found.bfloat16().float())


@contextmanager
def step_of(store):
    """Run a step in here."""
    store.begin_step()
    try:
        yield
    finally:
        store.end_step()


def test_both_copies_of_a_model_with_two_routes_end_with_the_whole_in_float32():
    task = float_task()
    first, second = on_ranks(2, run, task, "dualpipe")

    assert_equal(first, second)
    for name, expected in expected_of(task).items():
        assert torch.allclose(first[name], expected, rtol=1e-5, atol=1e-7), name


def test_grad_is_the_callers_before_and_after_a_step_and_the_optimizer_finds_main_gradients():
    layer, seen = block(0, BFLOAT16), []
    weight = layer[1].weight
    weight.grad = before = torch.ones_like(weight)

    def look():
        seen.append((weight.main_grad.dtype, weight.grad))

    with Pipeline([layer], "1f1b", 2, square_loss, main_gradients=True, optimizer_step=look) as pipeline:
        pipeline.step(values(1, 4, WIDTH, dtype=BFLOAT16), target=values(2, 4, WIDTH, dtype=BFLOAT16))
        assert seen == [(torch.float32, None)]
        assert weight.grad is before
        assert torch.equal(before, torch.ones_like(before))
        found = weight.main_grad.clone()

        layer(values(1, 4, WIDTH, dtype=BFLOAT16)).sum().backward()

    assert not torch.equal(weight.grad, torch.ones_like(weight))
    assert torch.equal(weight.main_grad, found)


def test_nothing_is_left_on_a_parameter_when_the_accumulation_fails():
    weight = nn.Parameter(torch.ones(2, dtype=BFLOAT16))
    main = GradientStore(lambda: [weight, weight], MAIN_GRAD)

    def fail():
        with step_of(main):
            weight.sum().backward()
            raise ZeroDivisionError

    assert isinstance(error_of(fail), ZeroDivisionError)
    weight.sum().backward()
    assert weight.main_grad.tolist() == [1.0, 1.0]
    assert weight.grad.tolist() == [1.0, 1.0]


def test_gradients_of_sparse_tables_become_dense():
    table = settle(nn.Embedding(5, WIDTH, sparse=True), 1)
    other = copy.deepcopy(table)
    main = GradientStore(table.parameters, MAIN_GRAD)

    with step_of(main):
        for tokens in (torch.tensor([1, 2]), torch.tensor([2, 4])):
            table(tokens).sum().backward()
            other(tokens).sum().backward()

    assert torch.equal(table.weight.main_grad, other.weight.grad.to_dense())


def test_no_type_loses_bits_and_parameters_without_a_shape_are_refused():
    dtypes = [BFLOAT16, torch.float32, torch.float64]
    assert [main_type(torch.zeros(1, dtype=dtype)) for dtype in dtypes] == [torch.float32, *dtypes[1:]]

    error = error_of(require_main_shapes, [("0.weight", nn.LazyLinear(3).weight)])

    assert isinstance(error, ConfigError)
    assert "'0.weight' has no shape" in str(error)
