"""Keywords reach layers behind wrappers in whole steps, as they do on one process."""

import copy
import gc
import inspect
import itertools
import tracemalloc

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from penstock.errors import PipelineError, StepRefused
from penstock.execute.transport import LocalTransport, messages
from penstock.pipeline import Pipeline
from tests.local_pipelines import WIDTH, block, error_of, gradients_of, on_ranks, square_loss, values

ROWS, NUM_MICROBATCHES = 8, 4
F64 = torch.float64


class Masked(nn.Module):
    def __init__(self, seed):
        super().__init__()
        self.block = block(seed, F64)

    def forward(self, x, mask=None):
        return self.block(x) if mask is None else self.block(x) * mask


class Scaled(Masked):
    def forward(self, x, *, scale=1.0):
        return self.block(x) * scale


class Checkpointed(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, *args, **kwargs):
        return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)


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


def batch():
    mask = torch.rand(ROWS, 1, generator=torch.Generator().manual_seed(7), dtype=F64)
    return (values(1, ROWS, WIDTH, dtype=F64),), {"mask": mask, "scale": 1.7}, values(2, ROWS, WIDTH, dtype=F64)


def one_process():
    """Loss and gradients of the layers without their wrappers, each called with what it names."""
    layers = bare_layers()
    (inputs,), keywords, target = batch()
    names = ["mask", "scale", "mask", "mask", "scale", None]
    total = 0.0
    for rows in torch.arange(ROWS).split(ROWS // NUM_MICROBATCHES):
        hidden = inputs[rows]
        own = {"mask": keywords["mask"][rows], "scale": keywords["scale"]}
        for layer, name in zip(layers, names, strict=True):
            hidden = layer(hidden, **({name: own[name]} if name else {}))
        loss = square_loss(hidden, target[rows]) / NUM_MICROBATCHES
        loss.backward()
        total += loss.detach()
    return total, [parameter.grad for layer in layers for parameter in layer.parameters()]


def run(wires, layers, schedule, **options):
    pipeline = Pipeline(layers, schedule, NUM_MICROBATCHES, square_loss, transport=wires, **options)
    args, keywords, target = batch()
    loss = pipeline.step(*args, target=target, **keywords).loss
    evaluated = pipeline.evaluate(*args, target=target, **keywords).loss
    found = gradients_of(pipeline.named_parameters())
    pipeline.close()
    return loss, evaluated, found


def in_order(per_rank):
    found = {int(name.partition(".")[0]): [] for _, _, gradients in per_rank for name in gradients}
    for index in sorted(found):
        holder = next(each for _, _, each in per_rank if any(name.startswith(f"{index}.") for name in each))
        found[index] = [gradient for name, gradient in holder.items() if name.startswith(f"{index}.")]
    return [gradient for index in sorted(found) for gradient in found[index]]


def assert_as_one_process(per_rank):
    loss, gradients = one_process()
    for found, evaluated, _ in per_rank:
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(evaluated, loss, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(in_order(per_rank), gradients, rtol=1e-12, atol=1e-12)


@pytest.mark.feature("A4")
@pytest.mark.parametrize("schedule", ["sequential", "gpipe", "1f1b", "interleaved-1f1b", "zb-h1", "zbv", "dualpipe"])
def test_keywords_reach_layers_behind_wrappers_as_on_one_process(schedule):
    per_rank = on_ranks(2, lambda wires: run(wires, wrapped_layers(), schedule))

    assert_as_one_process(per_rank)


def steps_on_gloo(rank):
    alone = [dist.new_group([member]) for member in range(2)][rank]
    layers = wrapped_layers()
    own = range(3 * rank, 3 * rank + 3)
    layers = [
        DistributedDataParallel(layer, process_group=alone) if index in own else layer
        for index, layer in enumerate(layers)
    ]
    return run(None, layers, "1f1b", split=[3, 3])


@pytest.mark.slow
def test_keywords_reach_layers_behind_data_parallel_wrappers_on_gloo(two_ranks):
    per_rank = two_ranks.run(steps_on_gloo)

    loss, _ = one_process()
    for found, evaluated, _ in per_rank:
        torch.testing.assert_close([found, evaluated], [loss, loss], rtol=1e-12, atol=1e-12)


def test_signatures_are_looked_at_when_the_pipeline_is_made_and_not_in_steps(monkeypatch):
    looked = []
    signature = inspect.signature

    def count(*args, **kwargs):
        looked.append(args)
        return signature(*args, **kwargs)

    pipeline = Pipeline([Masked(0), Checkpointed(Scaled(1))], "1f1b", NUM_MICROBATCHES, square_loss)
    args, keywords, target = batch()
    monkeypatch.setattr(inspect, "signature", count)
    pipeline.step(*args, target=target, **keywords)

    # `checkpoint` looks at signatures of its own.
    assert not [args for args in looked if isinstance(getattr(args[0], "__self__", None), nn.Module)]
    pipeline.close()


class Unnamed(nn.Module):
    """Its loop hides which layers get the keywords."""

    def __init__(self, *inner):
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, x, **kwargs):
        for layer in self.inner:
            x = layer(x, **kwargs)
        return x


def test_a_layer_that_passes_on_a_keyword_too_many_is_named_on_every_rank():
    layers = [Unnamed(Masked(0)), Scaled(1)]

    for error in on_ranks(2, lambda wires: error_of(run, wires, copy.deepcopy(layers), "1f1b")):
        assert isinstance(error, PipelineError)
        assert "layer 0 (Unnamed)" in str(error)
        assert "was given every keyword of the batch that is not filled by position: ['mask', 'scale']" in str(error)


def test_a_rank_whose_layers_may_take_any_keyword_must_get_them_where_another_does():
    def case(wires):
        pipeline = Pipeline([Unnamed(Masked(0)), Masked(1)], "1f1b", 4, square_loss, transport=wires)
        args, keywords, target = batch()
        given = {"mask": keywords["mask"]} if wires.rank else {}
        error = error_of(pipeline.step, *args, target=target, **given)
        pipeline.close()
        return error

    for error in on_ranks(2, case):
        assert type(error) is StepRefused
        assert "rank 1 was given keyword arguments, rank 0 was not" in str(error)


def test_a_rank_without_layers_that_take_keywords_needs_none():
    def case(wires):
        pipeline = Pipeline(
            [Checkpointed(block(0, F64)), Checkpointed(Masked(1))], "1f1b", 4, square_loss, transport=wires
        )
        args, keywords, target = batch()
        given = {"mask": keywords["mask"]} if wires.rank else {}
        loss = pipeline.step(*args, target=target, **given).loss
        pipeline.close()
        return loss

    first, second = on_ranks(2, case)

    (inputs,), keywords, target = batch()
    expected = square_loss(Masked(1)(block(0, F64)(inputs), keywords["mask"]), target)
    torch.testing.assert_close([first, second], [expected.detach()] * 2, rtol=1e-12, atol=1e-12)


# ---- scalars that change from step to step


class Shifted(nn.Module):
    """Hands the number on beside its output."""

    def __init__(self, seed):
        super().__init__()
        self.block = block(seed, F64)

    def forward(self, state, position=0, rate=1.0):
        x = state[0] if isinstance(state, tuple) else state
        return self.block(x) * rate + position, position


class Last(Shifted):
    def forward(self, state):
        x, position = state
        return self.block(x) + position


def soak(wires, num_steps, numbers_of):
    pipeline = Pipeline([Shifted(0), Shifted(1), Last(2)], "1f1b", NUM_MICROBATCHES, square_loss, transport=wires)
    args, _, target = batch()
    losses = [float(pipeline.step(*args, target=target, **numbers_of(index)).loss) for index in range(num_steps)]
    pipeline.close()
    return losses


def counted_soak(monkeypatch, numbers_of, num_steps=200):
    """The losses, how many headers and messages were sent, and how many bytes Python holds more after 40 steps."""
    headers, sends, held = [], itertools.count(), {}
    encode, post_send = messages.encode_layout, LocalTransport.post_send

    def count_headers(tree):
        headers.append(tree)
        return encode(tree)

    def count_sends(transport, peer, tensor, *tag):
        next(sends)
        return post_send(transport, peer, tensor, *tag)

    monkeypatch.setattr(messages, "encode_layout", count_headers)
    monkeypatch.setattr(LocalTransport, "post_send", count_sends)

    def numbers(index):
        if index % 40 == 39:
            gc.collect()  # a step's cycles wait for the collector, which comes at another step in every run
            held[index] = tracemalloc.get_traced_memory()[0]
        return numbers_of(index)

    tracemalloc.start()
    try:
        losses, _ = on_ranks(2, lambda wires: soak(wires, num_steps, numbers))
    finally:
        tracemalloc.stop()
    growths = [after - before for before, after in itertools.pairwise(held.values())]
    return losses, len(headers), next(sends), min(growths)  # caches grow now and then, what each step leaves always


@pytest.mark.slow
def test_numbers_that_change_at_every_step_cost_what_fixed_ones_do(monkeypatch):
    fixed, num_headers, num_sends, usual = counted_soak(monkeypatch, lambda index: {"position": 2, "rate": 0.5})
    losses, headers, sends, growth = counted_soak(
        monkeypatch, lambda index: {"position": index, "rate": 1 / (1 + index)}
    )

    assert (headers, sends) == (num_headers, num_sends)
    assert num_headers == NUM_MICROBATCHES  # those of the first step
    assert growth < usual + 10_000  # to keep the numbers of each step and rank would take 20 kB
    assert len(set(fixed)) == 1
    assert len(set(losses)) == 200


@pytest.mark.parametrize("check_batches", [True, False])
def test_a_whole_number_that_differs_between_ranks_is_found_at_every_step_that_compares(check_batches):
    def case(wires):
        layers = [Shifted(0), Last(1)]
        pipeline = Pipeline(layers, "1f1b", NUM_MICROBATCHES, square_loss, transport=wires, check_batches=check_batches)
        args, _, target = batch()
        for index in range(3):
            pipeline.step(*args, target=target, position=index)
        if not check_batches:
            return str(pipeline.step(*args, target=target, position=wires.rank).loss)
        return str(error_of(pipeline.step, *args, target=target, position=wires.rank))

    for text in on_ranks(2, case):
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
