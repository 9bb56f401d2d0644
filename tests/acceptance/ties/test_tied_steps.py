"""Every optimizer steps a tied weight once, also where one rank holds both of its uses."""

from functools import cache, partial

import pytest
import torch
from torch import nn

from penstock.models import LayerSpec
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import error_of, named, on_ranks, token_layers, token_loss, token_task
from tests.support.reference import reference_step

FLOAT64 = torch.float64
NUM_BLOCKS = 6
PAIR = ("0.weight", f"{NUM_BLOCKS + 1}.weight")


untied_layers = partial(token_layers, FLOAT64, NUM_BLOCKS)


def tied_layers():
    layers = untied_layers()
    layers[-1].weight = layers[0].weight
    return layers


def tied_specs():
    """The same model, layer by layer; the tie is declared by the head."""
    last = NUM_BLOCKS + 1
    build = lambda index: lambda: untied_layers()[index]  # noqa: E731
    return [
        LayerSpec(str(index), build(index), tied=(("weight", "0.weight"),) if index == last else ())
        for index in range(last + 1)
    ]


WAYS = {"one object": (tied_layers, ()), "pairs": (untied_layers, [PAIR]), "specs": (tied_specs, ())}
SHAPES = {
    "one rank": ("1f1b", 1, {}),
    "two ranks": ("1f1b", 2, {}),
    "zbv": ("zbv", 2, {}),
    "v-half": ("v-half", 2, {}),
    "interleaved": ("interleaved-1f1b", 2, {"stages_per_rank": 2}),
    "interleaved, odd": ("interleaved-1f1b", 3, {"stages_per_rank": 2}),
    "hanayo": ("hanayo", 2, {"stages_per_rank": 2}),
    "dualpipe": ("dualpipe", 2, {}),
}
OPTIMIZERS = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adagrad": partial(torch.optim.Adagrad, lr=0.05),
}
TASKS = [token_task(8, FLOAT64), token_task(12, FLOAT64)]


def learn(parameters, make_optimizer, step):
    """Take three optimizer steps, each on the gradients of two batches."""
    optimizer = make_optimizer(parameters)
    for _ in range(3):
        for task in TASKS:
            step(task)
        optimizer.step()
        optimizer.zero_grad()


def learn_on_rank(wires, shape, way, make_optimizer):
    (schedule, _, options), (make_layers, tied) = SHAPES[shape], WAYS[way]
    pipeline = Pipeline(
        make_layers(), schedule, 4, token_loss, transport=wires, tied=tied, **options, **TASKS[0].options
    )
    learn(pipeline.parameters(), make_optimizer, lambda task: pipeline.step(*task.inputs, target=task.target))
    return {name: parameter.detach() for name, parameter in pipeline.named_parameters()}


@cache
def learn_alone(make_optimizer):
    """The weights by name; the head has its tied weight."""
    layers = tied_layers()

    def step(task):
        reference_step(layers, task.inputs, {}, task.target, loss=token_loss, num_microbatches=4, **task.options)

    learn(nn.ModuleList(layers).parameters(), make_optimizer, step)
    weights = {name: parameter.detach() for name, parameter in named(layers)}
    return weights | {PAIR[1]: weights[PAIR[0]]}


@pytest.mark.feature("E7")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "way", "optimizer"),
    [
        (shape, way, list(OPTIMIZERS)[(row + column) % len(OPTIMIZERS)])
        for row, shape in enumerate(SHAPES)
        for column, way in enumerate(WAYS)
    ],
)
def test_a_tied_weight_is_stepped_once(shape, way, optimizer):
    num_ranks = SHAPES[shape][1]

    found = on_ranks(num_ranks, learn_on_rank, shape, way, OPTIMIZERS[optimizer])

    expected = learn_alone(OPTIMIZERS[optimizer])
    assert {name for weights in found for name in weights} >= expected.keys() - {PAIR[1]}
    for weights in found:
        for name, weight in weights.items():
            torch.testing.assert_close(weight, expected[name], rtol=1e-12, atol=1e-12)


def names_of_one_process():
    return [name for name, _ in nn.ModuleList(tied_layers()).named_parameters()]


@pytest.mark.parametrize("way", WAYS)
def test_one_object_has_one_name_the_first_of_the_unsplit_model(way):
    make_layers, tied = WAYS[way]

    def case(wires):
        pipeline = Pipeline(make_layers(), "zbv", 4, token_loss, transport=wires, tied=tied)
        names = [name for name, _ in pipeline.named_parameters()]
        return names, len(list(pipeline.parameters())), pipeline.copied_names

    (first, num_first, copied), (second, num_second, _) = on_ranks(2, case)

    assert PAIR[0] in first
    assert PAIR[1] not in first + second
    assert copied == {PAIR[1]}
    assert [num_first, num_second] == [len(set(first)), len(set(second))]
    assert [name for name in names_of_one_process() if name in first] == first


def test_within_no_sync_without_ties_each_rank_keeps_its_own_sum_and_steps_after_it_are_as_ever():
    task = TASKS[0]

    def run(wires):
        pipeline = Pipeline(tied_specs(), "1f1b", 4, token_loss, transport=wires)
        weight = next(parameter for name, parameter in pipeline.named_parameters() if name in PAIR)

        def gradient():
            pipeline.step(*task.inputs, target=task.target)
            return weight.grad.clone()

        with pipeline.no_sync():
            summed = gradient()
        weight.grad = None
        with pipeline.no_sync(tied=False):
            own, twice = gradient(), gradient()
        weight.grad = None
        return summed, own, twice, gradient()

    (summed, first, twice, after), (_, second, _, after_too) = on_ranks(2, run)

    torch.testing.assert_close(first + second, summed)
    assert not torch.equal(first, second)
    torch.testing.assert_close(twice, 2 * first)
    assert torch.equal(after, summed)
    assert torch.equal(after_too, summed)


def test_a_rank_alone_without_ties_is_refused_and_named():
    task = TASKS[0]

    def run(wires):
        pipeline = Pipeline(tied_specs(), "1f1b", 4, token_loss, transport=wires)
        with pipeline.no_sync(tied=wires.rank == 0):
            return error_of(pipeline.step, *task.inputs, target=task.target)

    for error in on_ranks(2, run):
        assert "disagree on no_sync: rank 0 has no_sync(), rank 1 has no_sync(tied=False). Enter no_sync() on" in str(
            error
        )


def test_dualpipe_names_a_tied_weight_alike_on_both_ranks_that_hold_it():
    def case(wires):
        pipeline = Pipeline(tied_layers(), "dualpipe", 4, token_loss, transport=wires)
        return [name for name, _ in pipeline.named_parameters()]

    first, second = on_ranks(2, case)

    assert first == second == names_of_one_process()
