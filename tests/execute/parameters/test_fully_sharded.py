"""Layers in `fully_shard` reduce once per stage and step, and get the gradients of one process."""

from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from penstock.execute.parameters.fully_sharded import FullySharded, WholeGradientStore
from penstock.execute.parameters.gradient_store import GradientStore
from penstock.execute.parameters.layout import ParameterLayout
from penstock.execute.undocumented_modules import unsharded_parameters
from penstock.execute.values.tensors import memory_of
from tests.support.local_pipelines import error_of, settle, square_loss
from tests.support.replicas import (
    FLOAT,
    MICROBATCHES,
    NUM_LAYERS,
    NUM_REPLICAS,
    WIDTH,
    assert_gradients,
    batch,
    expected_gradients,
    full,
    gradients_of,
    layers,
    mesh,
    own_rows,
    pipeline_of,
)


def block(seed):
    return settle(nn.Sequential(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), nn.Tanh()), seed)


def sharded_layers(own_mesh, **options):
    return [fully_shard(layer, mesh=own_mesh["replica"], **options) for layer in layers()]


class Reductions:
    """Counts the reductions of a rank's layers: torch calls the hooks of a shard when its gradient was reduced."""

    def __init__(self, pipeline):
        self.counts = {}
        for name, shard in pipeline.named_parameters():
            self.counts[name] = 0
            shard.register_post_accumulate_grad_hook(lambda shard, name=name: self.add(name))

    def add(self, name):
        self.counts[name] += 1

    def take(self):
        counts, self.counts = self.counts, dict.fromkeys(self.counts, 0)
        return set(counts.values())


def train(rank, schedule, no_sync):
    own_mesh = mesh()
    pipeline = pipeline_of(sharded_layers(own_mesh), schedule, own_mesh)
    reductions, counts = Reductions(pipeline), []
    for seed in (1, 2):
        inputs, target = own_rows(own_mesh, seed)
        with pipeline.no_sync() if no_sync and seed == 1 else nullcontext():
            pipeline.step(inputs, target=target)
        counts.append(reductions.take())
    return gradients_of(pipeline), counts


@pytest.mark.feature("E4")
@pytest.mark.parametrize(("schedule", "no_sync"), [("1f1b", False), ("interleaved-1f1b", True)])
def test_every_module_reduces_once_per_step(four_ranks, schedule, no_sync):
    results = four_ranks.run(train, schedule, no_sync)

    assert_gradients([gradients for gradients, _ in results], expected_gradients(seeds=(1, 2)))
    assert all(counts == [{1}, {1}] for _, counts in results)


def train_beside(rank, options):
    """A stage has a layer in `fully_shard` and one in DistributedDataParallel; a function finds whole gradients."""
    own_mesh, found = mesh(), []
    model = layers()
    for index in (0, 2):
        fully_shard(model[index], mesh=own_mesh["replica"])
        model[index + 1] = DistributedDataParallel(model[index + 1], process_group=own_mesh.get_group("replica"))

    def look(stage):
        found.append([full(parameter.grad) for parameter in pipeline.parameters()])

    pipeline = pipeline_of(model, "1f1b", own_mesh, reduce_stage=look, **options)
    inputs, target = own_rows(own_mesh)
    pipeline.step(inputs, target=target)
    gradients = gradients_of(pipeline)
    return gradients, all(map(torch.equal, found[0], gradients.values()))


@pytest.mark.parametrize("options", [{}, {"recompute": True}], ids=str)
def test_layers_beside_those_in_ddp_are_reduced_too_and_before_the_callers_function(four_ranks, options):
    results = four_ranks.run(train_beside, options)

    assert_gradients([gradients for gradients, _ in results], expected_gradients())
    assert all(is_whole for _, is_whole in results)


def train_copies(rank):
    """Every rank is a pipeline of its own; its shards lie over two ranks, and two ranks hold copies of them."""
    own_mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("copy", "shard", "pipeline"))
    model = [fully_shard(layer, mesh=own_mesh["copy", "shard"]) for layer in layers()]
    pipeline = pipeline_of(model, "sequential", own_mesh)
    reductions = Reductions(pipeline)
    inputs, target = (tensor.chunk(4)[rank] for tensor in batch())
    pipeline.step(inputs, target=target)
    return gradients_of(pipeline), reductions.take()


def test_shards_with_copies_are_reduced_over_both_once(four_ranks):
    results = four_ranks.run(train_copies)

    assert_gradients([gradients for gradients, _ in results], expected_gradients())
    assert all(counts == {1} for _, counts in results)


# ---- what a step may bring


class Fragile(nn.Module):
    """A block that raises in a forward or a backward when its turn comes."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.failing, self.turn = "", 0

    def forward(self, features):
        if self.failing == "forward":
            self._take_turn()
        outputs = self.inner(features)
        if self.failing == "backward" and outputs.requires_grad:
            outputs.register_hook(lambda gradient: self._take_turn())
        return outputs

    def _take_turn(self):
        self.turn -= 1
        if self.turn == 0:
            raise RuntimeError("planted")


def fail(pipeline, layer, place, turn, inputs, target):
    """Let a step fail on both replicas alike, and drop its gradients; return the text of the error."""
    layer.failing, layer.turn = place, turn
    error = error_of(pipeline.step, inputs, target=target)
    layer.failing = ""
    for parameter in pipeline.parameters():
        parameter.grad = None
    return str(error)


def without_inner(gradients):
    return {name.replace("inner.", ""): gradient for name, gradient in gradients.items()}


def fail_and_step(rank, place):
    own_mesh = mesh()
    model = [fully_shard(Fragile(layer), mesh=own_mesh["replica"]) for layer in sharded_layers(own_mesh)]
    pipeline = pipeline_of(model, "1f1b", own_mesh)
    inputs, target = own_rows(own_mesh)
    pipeline.step(inputs, target=target)
    error = fail(pipeline, model[1], place, 3, inputs, target)
    pipeline.evaluate(inputs, target=target)
    reductions = Reductions(pipeline)
    pipeline.step(inputs, target=target)
    return error, without_inner(gradients_of(pipeline)), reductions.take()


@pytest.mark.feature("E4")
@pytest.mark.parametrize("place", ["forward", "backward"])
def test_a_failed_step_leaves_nothing_to_the_next_one(four_ranks, place):
    results = four_ranks.run(fail_and_step, place)

    for error, _, counts in results:
        assert "planted" in error
        assert counts == {1}
    assert_gradients([gradients for _, gradients, _ in results], expected_gradients())


def evaluate_between(rank):
    """The caller lets two steps reduce once; an evaluation between them fails."""
    own_mesh = mesh()
    model = [fully_shard(Fragile(layer), mesh=own_mesh["replica"]) for layer in layers()]
    pipeline = pipeline_of(model, "1f1b", own_mesh)
    for seed in (1, 2):
        for layer in model:
            layer.set_requires_gradient_sync(seed == 2)
        inputs, target = own_rows(own_mesh, seed)
        pipeline.step(inputs, target=target)
        if seed == 1:
            model[1].failing, model[1].turn = "forward", 2
            error_of(pipeline.evaluate, inputs, target=target)
            model[1].failing = ""
    return without_inner(gradients_of(pipeline))


@pytest.mark.feature("E4")
def test_a_failed_evaluation_leaves_gradients_that_are_not_reduced_yet(four_ranks):
    assert_gradients(four_ranks.run(evaluate_between), expected_gradients(seeds=(1, 2)))


class Choosing(nn.Module):
    """Uses its second block in one microbatch of a step alone."""

    def __init__(self, seed, turn):
        super().__init__()
        self.always, self.once = block(seed), block(seed + 10)
        self.turn, self.num_calls = turn, 0

    def forward(self, features):
        outputs = self.always(features)
        self.num_calls += 1
        return outputs + self.once(features) if self.num_calls % MICROBATCHES == self.turn else outputs


def side_by_side(own_mesh):
    """The second block is in no module of `fully_shard` that the last backward comes to."""
    model = [Choosing(seed, turn=1) for seed in range(NUM_LAYERS)]
    for layer in model:
        fully_shard(layer.always, mesh=own_mesh["replica"])
        fully_shard(layer.once, mesh=own_mesh["replica"])
    return model


def one_in_another(own_mesh):
    """Backwards end before the second block is gathered for the first time, and sums may have a type of their own."""
    options = {"mesh": own_mesh["replica"], "mp_policy": MixedPrecisionPolicy(reduce_dtype=FLOAT)}
    model = [Choosing(seed, turn=0) for seed in range(NUM_LAYERS)]
    for layer in model:
        fully_shard(layer.once, **options)
        fully_shard(layer, **options)
    return model


def train_choosing(rank, make):
    own_mesh = mesh()
    pipeline = pipeline_of(make(own_mesh), "1f1b", own_mesh)
    reductions, counts = Reductions(pipeline), []
    for seed in (1, 2):
        inputs, target = own_rows(own_mesh, seed)
        pipeline.step(inputs, target=target)
        counts.append(reductions.take())
    return gradients_of(pipeline), counts


@pytest.mark.parametrize(
    ("make", "turn", "num_in_first_step"), [(side_by_side, 1, {1}), (one_in_another, 0, {1, MICROBATCHES})]
)
def test_modules_that_backwards_pass_by_are_reduced(four_ranks, make, turn, num_in_first_step):
    results = four_ranks.run(train_choosing, make)

    model = nn.Sequential(*(Choosing(seed, turn) for seed in range(NUM_LAYERS)))
    for seed in (1, 2):
        for rows in zip(*(tensor.chunk(NUM_REPLICAS) for tensor in batch(seed)), strict=True):
            for inputs, target in zip(*(tensor.chunk(MICROBATCHES) for tensor in rows), strict=True):
                (square_loss(model(inputs), target) / (NUM_REPLICAS * MICROBATCHES)).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert_gradients([gradients for gradients, _ in results], expected)
    assert all(counts == [num_in_first_step, {1}] for _, counts in results)


POLICIES = {
    "sums have the precision of the shards": ({"param_dtype": torch.float32, "reduce_dtype": FLOAT}, 1),
    "sums would lose precision": ({"param_dtype": torch.float32}, MICROBATCHES),
}


def train_mixed(rank, policy):
    """A step that gathers for the first time, one that fails, and one that counts."""
    own_mesh = mesh()
    policy = MixedPrecisionPolicy(output_dtype=FLOAT, **policy)
    model = [fully_shard(Fragile(layer), mesh=own_mesh["replica"], mp_policy=policy) for layer in layers()]
    pipeline = pipeline_of(model, "1f1b", own_mesh)
    inputs, target = own_rows(own_mesh)
    pipeline.step(inputs, target=target)
    fail(pipeline, model[3], "backward", 3, inputs, target)
    reductions = Reductions(pipeline)
    pipeline.step(inputs, target=target)
    return without_inner(gradients_of(pipeline)), reductions.take()


@pytest.mark.parametrize("case", POLICIES)
def test_gradients_that_would_add_up_in_low_precision_are_reduced_in_every_backward(four_ranks, case):
    policy, num_reductions = POLICIES[case]

    results = four_ranks.run(train_mixed, policy)

    expected = expected_gradients()
    for gradients, counts in results:
        assert counts == {num_reductions}
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, expected[name], rtol=0, atol=1e-6)


def train_accumulating(rank):
    """Callers of torch's own setting reduce once for two steps; clip, and go on with an optimizer."""
    own_mesh = mesh()
    model = sharded_layers(own_mesh)
    pipeline = pipeline_of(model, "1f1b", own_mesh)
    reductions = Reductions(pipeline)
    optimizer = torch.optim.AdamW(pipeline.parameters(), lr=0.1)
    norms = []
    for seed in range(4):
        for layer in model:
            layer.set_requires_gradient_sync(seed % 2 == 1)
        inputs, target = own_rows(own_mesh, seed)
        pipeline.step(inputs, target=target)
        pipeline.evaluate(inputs, target=target)
        if seed % 2 == 1:
            norms.append(float(pipeline.clip_grad_norm_(0.05)))
            optimizer.step()
            optimizer.zero_grad()
    weights = {name: full(parameter) for name, parameter in pipeline.named_parameters()}
    return weights, norms, reductions.take()


def test_training_with_clipping_over_steps_that_the_caller_reduces_once(four_ranks):
    results = four_ranks.run(train_accumulating)

    model = nn.Sequential(*layers())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    expected_norms = []
    for seed in range(4):
        inputs, target = batch(seed)
        square_loss(model(inputs), target).backward()
        if seed % 2 == 1:
            expected_norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.05)))
            optimizer.step()
            optimizer.zero_grad()
    for weights, norms, counts in results:
        assert counts == {2}
        assert norms == pytest.approx(expected_norms, abs=1e-12)
        for name, weight in weights.items():
            torch.testing.assert_close(weight, model.get_parameter(name).detach(), rtol=0, atol=1e-12)


# ---- whole gradients


class Sum(nn.Module):
    """Its gradient is that of its output, in the same memory."""

    def __init__(self):
        super().__init__()
        self.offset = nn.Parameter(torch.zeros(2, 3))

    def forward(self, features):
        return features + self.offset.view(2, 3)


@pytest.fixture
def module(world):
    module = fully_shard(Sum(), mesh=init_device_mesh("cpu", (1,)))
    module.set_requires_gradient_sync(False)
    return module


def test_a_first_gradient_gets_memory_of_its_own_where_another_tensor_holds_it(module):
    store, sent_gradient = WholeGradientStore(module.parameters, "grad", [module]), torch.ones(2, 3)
    outputs = module(torch.zeros(2, 3, requires_grad=True))
    store.begin_step()

    store.begin_backward()
    torch.autograd.backward(outputs, sent_gradient)
    [whole] = unsharded_parameters(module)
    assert memory_of(whole.grad) == memory_of(sent_gradient)  # to which the next microbatch would add
    store.end_backward((), [sent_gradient])

    assert memory_of(whole.grad) != memory_of(sent_gradient)
    assert torch.equal(whole.grad, sent_gradient)


def test_whole_gradients_are_held_until_they_are_reduced(module):
    layout = FullySharded({0: [module]}, GradientStore(module.parameters), ParameterLayout())
    module.set_requires_gradient_sync(True)
    layout.begin_step(is_synced=True, sums_tied=True, is_training=True)

    module(torch.zeros(2, 3, requires_grad=True)).sum().backward()
    [whole] = unsharded_parameters(module)
    _, [held] = layout.held()
    assert held is whole.grad
    layout.begin_last_backward(0)
    module(torch.zeros(2, 3, requires_grad=True)).sum().backward()

    assert layout.held() == ((), [])
    assert torch.equal(module.offset.grad.full_tensor(), torch.full((2, 3), 2.0))
