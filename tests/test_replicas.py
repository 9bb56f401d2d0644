"""Replicas on a mesh are one job: losses, gradients and weights are those of one process with the rows of all."""

import threading
import warnings
from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import penstock as ps
from penstock.errors import PipelineError
from penstock.execute.control.agreement import Mode
from penstock.execute.replicas import summed
from penstock.execute.transport.protocol import Tag
from tests.local_pipelines import (
    IGNORED,
    LENGTH,
    VOCABULARY,
    WIDTH,
    block,
    count_tokens,
    error_of,
    float_layers,
    named,
    settle,
    square_loss,
    token_layers,
    token_loss,
    values,
)
from tests.mesh_pipelines import FLOAT, MICROBATCHES, Job, difference, on_mesh, pipeline_of, train, train_alone

LAYOUTS = [(1, 2), (2, 2), (1, 3), (4, 1), (3, 2), (2, 4)]


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01)


def compared(pipeline, data, job, schedule, *, steps=1, optimizer=None, seed=None, **options):
    """Train a job on a mesh and in one process, and say how the results differ."""
    if seed is not None:
        options["seed"] = seed
    ranks = on_mesh(pipeline, data, lambda places: train(places, job, schedule, steps, optimizer, **options))
    return difference(ranks, train_alone(job, steps, optimizer, seed), num_replicas=data)


@pytest.fixture(params=["packed", "in place"])
def summed_in(request, monkeypatch):
    """How gradients are summed: those of tests are small, and all are packed."""
    if request.param == "in place":
        monkeypatch.setattr(summed, "LARGE_BYTES", 0)


IN_PLACE_TOO = pytest.mark.usefixtures("summed_in")


@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv"])
@pytest.mark.parametrize(("pipeline", "data"), LAYOUTS)
def test_losses_and_weights_of_20_steps_of_adamw_are_those_of_one_process(pipeline, data, schedule):
    assert compared(pipeline, data, Job([8] * data), schedule, steps=20, optimizer=adamw) == []


@pytest.mark.full
@pytest.mark.parametrize("schedule", ["1f1b", "interleaved-1f1b", "zbv", "gpipe", "zb-h1", "hanayo"])
@pytest.mark.parametrize("data", [1, 2, 3, 4])
@pytest.mark.parametrize("pipeline", [1, 2, 3, 4])
def test_every_layout_trains_as_one_process_does(pipeline, data, schedule):
    assert compared(pipeline, data, Job([8] * data), schedule, steps=20, optimizer=adamw) == []


@pytest.mark.parametrize("schedule", ["dualpipe", "chimera"])
def test_two_routes_beside_replicas_are_those_of_one_process(schedule):
    job = Job([8, 8])

    assert compared(2, 2, job, schedule, steps=5, optimizer=adamw) == []


@IN_PLACE_TOO
@pytest.mark.parametrize("seed", range(4))
def test_messages_in_any_order_give_the_same(seed):
    job = Job([8, 8])
    ranks = on_mesh(2, 2, lambda places: train(places, job, "zbv", 2), order_seed=seed)

    assert difference(ranks, train_alone(job, 2), num_replicas=2) == []


def wide_layers():
    return [settle(nn.Sequential(nn.Linear(256, 256, dtype=FLOAT), nn.Tanh()), seed) for seed in range(4)]


def wide_values(seed, rows):
    return values(seed, rows, 256, dtype=FLOAT)


@IN_PLACE_TOO
def test_weights_that_wait_for_w_are_summed():
    job = Job([256, 256], wide_layers, *(partial(wide_values, seed) for seed in (1, 2)))

    assert compared(2, 2, job, "zb-h1", steps=2) == []


# ---- weights of losses


def test_sums_add_up_over_replicas():
    job = Job([8, 12, 4], loss=nn.MSELoss(reduction="sum"), options={"reduction": "sum"}, known={"reduction": "sum"})

    assert compared(1, 3, job, "1f1b", steps=2) == []


@IN_PLACE_TOO
def test_rows_that_replicas_do_not_share_evenly_weigh_what_they_are():
    options = {"allow_ragged": True}

    assert compared(2, 3, Job([9, 5, 14], options=options, known=options), "1f1b", steps=3, optimizer=adamw) == []


def tokens(rows):
    return torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(3))


def token_targets(rows):
    target = tokens(rows + 1)[1:]
    target[::2, 1:] = IGNORED
    target[: rows // 3] = IGNORED
    return target


def test_a_mean_over_tokens_is_that_of_all_replicas_also_where_one_has_few():
    options = {"count": count_tokens, "allow_ragged": True}
    job = Job([5, 9], lambda: token_layers(FLOAT), tokens, token_targets, token_loss, options, options)

    assert compared(2, 2, job, "1f1b", steps=3) == []


def test_replicas_whose_tokens_all_count_nothing_add_nothing():
    options = {"count": count_tokens}
    first = torch.full((8, LENGTH), IGNORED)
    job = Job(
        [8, 8],
        lambda: token_layers(FLOAT),
        tokens,
        lambda rows: torch.cat([first, tokens(8)]),
        token_loss,
        options,
        options,
    )

    assert compared(1, 2, job, "1f1b") == []
    job.targets = lambda rows: torch.cat([first, first])
    (one, _) = on_mesh(1, 2, lambda places: train(places, job, "1f1b"))
    assert one.losses[0] == 0
    assert {None} == {gradient if gradient is None else 0 for gradient in one.gradients.values()}


def test_a_loss_with_names_has_those_of_the_job():
    def loss(output, target):
        return {"square": ((output - target) ** 2).mean(), "mean": output.mean() * 0.1}

    job = Job([8, 8], loss=loss)
    ranks, alone = on_mesh(2, 2, lambda places: train(places, job, "1f1b")), train_alone(job)

    for own in ranks:
        for name, value in alone.result.named_losses.items():
            torch.testing.assert_close(own.result.named_losses[name], value, rtol=0, atol=1e-14)
            assert len(own.result.named_microbatch_losses[name]) == MICROBATCHES


class Balance(nn.Module):
    """Adds a loss beside the output, as a mixture of experts does."""

    def __init__(self):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), 9)
        self.added = ps.AuxiliaryLoss("balance", 0.5)

    def forward(self, x):
        self.added.add((x**2).mean() + self.linear.weight.abs().mean())
        return self.linear(x)


def test_losses_that_layers_add_are_weighted_by_the_rows_of_the_job():
    options = {"allow_ragged": True}
    job = Job([8, 5], lambda: [Balance(), *float_layers(FLOAT, 3)], options=options, known=options)
    ranks, alone = on_mesh(2, 2, lambda places: train(places, job, "1f1b")), train_alone(job)

    assert difference(ranks, alone, num_replicas=2) == []
    expected = alone.result.named_losses["balance"]
    assert all(abs(own.result.named_losses["balance"] - expected) < 1e-14 for own in ranks)


def test_losses_of_microbatches_and_outputs_are_the_replicas_own():
    job = Job([8, 8])

    def case(places):
        with pipeline_of(places, job, "1f1b") as pipeline:
            inputs, target = job.of(pipeline.replica)
            result = pipeline.step(inputs, target=target, return_outputs=True)
            return [each.item() for each in result.losses], result.outputs

    ranks, alone = on_mesh(2, 2, case), train_alone(job)

    for replica in range(2):
        expected = [each.item() for each in alone.own_losses[replica * MICROBATCHES : (replica + 1) * MICROBATCHES]]
        outputs = alone.result.outputs[replica * MICROBATCHES : (replica + 1) * MICROBATCHES]
        for rank in (2 * replica, 2 * replica + 1):
            assert ranks[rank][0] == expected
        torch.testing.assert_close(ranks[2 * replica + 1][1], torch.cat(outputs), rtol=0, atol=1e-14)


def test_an_evaluation_has_the_loss_of_all_rows_also_where_replicas_have_few():
    job = Job([8, 3])

    def case(places):
        with pipeline_of(places, job, "1f1b") as pipeline:
            inputs, target = job.of(pipeline.replica)
            return pipeline.evaluate(inputs, target=target)

    inputs, targets = job.inputs(11), job.targets(11)
    expected = square_loss(nn.Sequential(*job.make_layers())(inputs), targets)

    for result in on_mesh(2, 2, case):
        torch.testing.assert_close(result.loss, expected, rtol=0, atol=1e-14)
        assert len(result.losses) in (MICROBATCHES, 3)


# ---- parameters


def shared_layers():
    layers = float_layers(FLOAT, 4)
    layers[3][1].weight = layers[0][1].weight
    return layers


@IN_PLACE_TOO
@pytest.mark.parametrize("schedule", ["1f1b", "zbv"])
def test_what_is_tied_over_ranks_or_over_stages_of_one_rank_counts_once(schedule):
    # zbv has layers 0 and 3 on one rank, 1f1b on two.
    job = Job([8, 8], shared_layers)

    ranks = on_mesh(2, 2, lambda places: train(places, job, schedule, 3))
    alone = train_alone(job, 3)
    alone.weights |= {"3.1.weight": alone.weights["0.1.weight"]}
    alone.gradients |= {"3.1.weight": alone.gradients["0.1.weight"]}
    names = {name for own in ranks for name in own.weights}
    alone.weights = {name: value for name, value in alone.weights.items() if name in names}

    assert difference(ranks, alone, num_replicas=2) == []


@IN_PLACE_TOO
def test_gradients_of_earlier_steps_count_once_with_and_without_no_sync():
    job = Job([8, 8], shared_layers)
    plan = [True, True, False, False, True, False, True]

    def case(places):
        with pipeline_of(places, job, "1f1b") as pipeline:
            inputs, target = job.of(pipeline.replica)
            for number, is_synced in enumerate(plan):
                if is_synced:
                    pipeline.step(inputs * (number + 1), target=target)
                else:
                    with pipeline.no_sync():
                        pipeline.step(inputs * (number + 1), target=target)
            return {name: each.grad.clone() for name, each in pipeline.named_parameters()}

    ranks = on_mesh(2, 2, case)
    expected = gradients_of_steps(job, [number + 1 for number in range(len(plan))])
    for own in ranks:
        for name, gradient in own.items():
            torch.testing.assert_close(
                gradient, expected[name.replace("3.1.weight", "0.1.weight")], rtol=1e-12, atol=1e-12
            )
    for name in ranks[0]:
        assert torch.equal(ranks[0][name], ranks[2][name])


def gradients_of_steps(job, factors):
    layers = job.make_layers()
    inputs, target = job.inputs(sum(job.rows)), job.targets(sum(job.rows))
    for factor in factors:
        square_loss(nn.Sequential(*layers)(inputs * factor), target).backward()
    return {name: each.grad for name, each in named(layers)}


@IN_PLACE_TOO
@pytest.mark.parametrize("to_none", [False, True])
def test_gradients_that_are_zeroed_in_between_are_gone(to_none):
    job = Job([8, 8])

    def case(places):
        with pipeline_of(places, job, "1f1b") as pipeline:
            inputs, target = job.of(pipeline.replica)
            optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1)
            pipeline.step(inputs * 3, target=target)
            with pipeline.no_sync():
                pipeline.step(inputs * 2, target=target)
            optimizer.zero_grad(set_to_none=to_none)
            with pipeline.no_sync():
                pipeline.step(inputs * 5, target=target)
            pipeline.step(inputs, target=target)
            return {name: each.grad.clone() for name, each in pipeline.named_parameters()}

    expected = gradients_of_steps(job, [5, 1])
    for own in on_mesh(2, 2, case):
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)


def test_within_no_sync_nothing_is_summed_but_what_is_tied():
    job = Job([8, 8])

    def case(places):
        with pipeline_of(places, job, "1f1b") as pipeline, pipeline.no_sync():
            inputs, target = job.of(pipeline.replica)
            pipeline.step(inputs, target=target)
            return {name: each.grad.clone() for name, each in pipeline.named_parameters()}

    ranks = on_mesh(1, 2, case)

    layers = job.make_layers()
    inputs, target = job.of(1)
    (square_loss(nn.Sequential(*layers)(inputs), target) / 2).backward()
    for name, each in named(layers):
        torch.testing.assert_close(ranks[1][name], each.grad, rtol=1e-12, atol=1e-12)
    assert not torch.equal(ranks[0]["0.1.weight"], ranks[1]["0.1.weight"])


class Branches(nn.Module):
    """Which of its products runs depends on the sign of the first value of the input."""

    def __init__(self):
        super().__init__()
        self.products = nn.ModuleList(settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), seed) for seed in range(3))

    def forward(self, x):
        return self.products[int(x[0, 0] > 0)](x)


@IN_PLACE_TOO
def test_a_parameter_that_one_replica_used_has_a_gradient_on_all_and_an_unused_one_on_none():
    job = Job([8, 8], lambda: [Branches(), *float_layers(FLOAT, 3)])
    rows = values(1, 16, WIDTH, dtype=FLOAT)
    rows[:, 0] = rows[:, 0].abs()
    rows[:8, 0] *= -1
    job.inputs = lambda _: rows
    ranks, alone = on_mesh(2, 2, lambda places: train(places, job, "1f1b")), train_alone(job)

    assert difference(ranks, alone, num_replicas=2) == []
    assert ranks[2].gradients["0.products.0.weight"] is not None
    assert ranks[2].gradients["0.products.2.weight"] is None


def test_frozen_layers_stay_and_others_train():
    def layers():
        found = float_layers(FLOAT, 4)
        for frozen in (found[0], found[2][1]):
            frozen.requires_grad_(False)
        return found

    ranks, alone = (
        on_mesh(2, 2, lambda places: train(places, Job([8, 8], layers), "1f1b", 3)),
        train_alone(Job([8, 8], layers), 3),
    )

    assert difference(ranks, alone, num_replicas=2) == []


@IN_PLACE_TOO
def test_main_gradients_are_summed_in_float32():
    def layers():
        return [settle(nn.Linear(WIDTH, WIDTH, dtype=torch.bfloat16), seed) for seed in range(4)]

    job = Job(
        [8, 8], layers, lambda rows: values(1, rows, WIDTH, dtype=torch.bfloat16), lambda rows: values(2, rows, WIDTH)
    )
    job.loss = lambda output, target: ((output.float() - target) ** 2).mean()
    ranks = on_mesh(2, 2, lambda places: train(places, job, "1f1b", main_gradients=True))
    alone = on_mesh(1, 1, lambda places: train_whole(places, job))[0]

    for own in ranks:
        for name, gradient in own.gradients.items():
            assert gradient.dtype == torch.float32
            torch.testing.assert_close(gradient, alone[name], rtol=1e-5, atol=1e-6)


def train_whole(places, job):
    pipeline = ps.Pipeline(job.make_layers(), "1f1b", 2 * MICROBATCHES, job.loss, mesh=places, main_gradients=True)
    pipeline.step(job.inputs(16), target=job.targets(16))
    return {name: each.main_grad.clone() for name, each in pipeline.named_parameters()}


def test_dropout_with_a_seed_draws_as_one_process_with_the_microbatches_of_all():
    def layers():
        return [nn.Sequential(block(seed, FLOAT), nn.Dropout(0.5)) for seed in range(4)]

    assert compared(2, 2, Job([8, 8], layers), "1f1b", steps=3, seed=7) == []


def test_slices_and_recomputation_are_summed_too():
    job = Job([8, 8], lambda: token_layers(FLOAT), tokens, lambda rows: tokens(rows + 1)[1:], token_loss)

    assert compared(2, 2, job, "1f1b", steps=2, recompute=True) == []
    assert compared(2, 2, job, "seq1f1b", steps=2, slices=LENGTH) == []


@IN_PLACE_TOO
def test_sparse_gradients_become_dense_ones_of_the_same_values():
    def layers():
        table = settle(nn.Embedding(VOCABULARY, WIDTH, sparse=True, dtype=FLOAT), 100)
        return [table, *token_layers(FLOAT)[1:]]

    job = Job([8, 8], layers, tokens, lambda rows: tokens(rows + 1)[1:], token_loss)
    ranks, alone = on_mesh(2, 2, lambda places: train(places, job, "1f1b", 2)), train_alone(job, 2)
    alone.gradients["0.weight"] = alone.gradients["0.weight"].to_dense()

    assert difference(ranks, alone, num_replicas=2) == []


@IN_PLACE_TOO
def test_a_gradient_stays_in_the_memory_that_its_caller_gave_it():
    job = Job([8, 8])

    def case(places):
        with pipeline_of(places, job, "1f1b") as pipeline:
            inputs, target = job.of(pipeline.replica)
            views = {}
            for name, each in pipeline.named_parameters():
                views[name] = each.grad = torch.zeros_like(each)
            for _ in range(2):
                pipeline.step(inputs, target=target)
            assert all(views[name] is each.grad for name, each in pipeline.named_parameters())
            return views

    expected = gradients_of_steps(job, [1, 1])
    for own in on_mesh(2, 2, case):
        for name, gradient in own.items():
            torch.testing.assert_close(gradient, expected[name], rtol=1e-12, atol=1e-12)


# ---- what all take from the first replica


def norm_layers():
    return [nn.Sequential(block(seed, FLOAT), nn.BatchNorm1d(WIDTH, dtype=FLOAT)) for seed in range(4)]


def test_all_begin_with_the_first_replicas_parameters_and_buffers_and_end_with_its_buffers():
    job = Job([8, 8], norm_layers)

    def case(places):
        own = job.make_layers()
        for layer in own:
            settle(layer, 50 + places.index)
            layer[1].running_mean += places.index
        with ps.Pipeline(own, "1f1b", MICROBATCHES, square_loss, mesh=places) as pipeline:
            begin = {name: each.clone() for name, each in pipeline.state_dict().items()}
            inputs, target = job.of(pipeline.replica)
            pipeline.step(inputs, target=target)
            with pipeline.no_sync():
                pass
            return begin, {name: each.clone() for name, each in pipeline.state_dict().items()}

    ranks = on_mesh(2, 2, case)

    for place in range(2):
        (begin, end), (other_begin, other_end) = ranks[place], ranks[2 + place]
        assert all(torch.equal(begin[name], other_begin[name]) for name in begin)
        names = [name for name in end if "running" in name or "tracked" in name]
        assert names
        assert all(torch.equal(end[name], other_end[name]) for name in names)
        assert not any(torch.equal(end[name], begin[name]) for name in names)
        layer = norm_layers()[place]
        settle(layer, 50 + place)
        assert torch.equal(begin[f"{2 * place}.0.1.weight"], settle(norm_layers()[0], 50 + place)[0][1].weight)


def test_a_state_is_gathered_from_the_first_replica_and_loaded_by_all():
    job = Job([8, 8])
    other = {name: value * 3 for name, value in nn.Sequential(*job.make_layers()).state_dict().items()}

    def case(places):
        with pipeline_of(places, job, "1f1b") as pipeline:
            is_source = places.index == 1
            pipeline.load_state_dict(other if is_source else None, from_rank=1)
            return pipeline.state_dict(on_rank=1), {name: each.clone() for name, each in pipeline.state_dict().items()}

    ranks = on_mesh(2, 2, case)

    whole = ranks[1][0]
    assert whole.keys() == other.keys()
    assert all(torch.equal(whole[name], other[name]) for name in other)
    assert [found for found, _ in ranks].count({}) == 3
    for _, own in ranks:
        assert all(torch.equal(own[name], other[name]) for name in own)


# ---- warnings and refusals


def test_equal_batches_on_all_replicas_are_warned_of_once():
    job = Job([8, 8])

    def case(places, differs):
        with pipeline_of(places, job, "1f1b") as pipeline:
            inputs, target = job.of(places.replica if differs else 0)
            for _ in range(2):
                pipeline.step(inputs, target=target)

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        on_mesh(2, 2, case, False)
        assert ["one and the same batch" in str(each.message) for each in found].count(True) == 1
        found.clear()
        on_mesh(2, 2, case, True)
        assert not any("one and the same batch" in str(each.message) for each in found)


def on_replicas(change):
    """Run one step by `change(pipeline, inputs, target)` and return each rank's error; the next step must be right."""
    job = Job([8, 8])

    def case(places):
        with pipeline_of(places, job, "1f1b", deadline_s=5.0) as pipeline:
            inputs, target = job.of(pipeline.replica)
            error = error_of(change, pipeline, inputs, target)
            pipeline.train()
            for each in pipeline.parameters():
                each.grad = None
                each.requires_grad_()
            found = pipeline.step(inputs, target=target)
            gradients = {name: each.grad.clone() for name, each in pipeline.named_parameters()}
            return error, found.loss, gradients

    ranks, alone = on_mesh(2, 2, case), train_alone(job)
    for _, loss, gradients in ranks:
        torch.testing.assert_close(loss, alone.losses[0], rtol=0, atol=1e-14)
        for name, gradient in gradients.items():
            torch.testing.assert_close(gradient, alone.gradients[name], rtol=1e-12, atol=1e-12)
    return [error for error, *_ in ranks]


def only_in(replica, odd, usual=lambda pipeline, inputs, target: pipeline.step(inputs, target=target)):
    return lambda pipeline, *batch: (odd if pipeline.replica == replica else usual)(pipeline, *batch)


def freeze(pipeline, inputs, target):
    next(iter(pipeline.parameters())).requires_grad_(False)
    pipeline.step(inputs, target=target)


def within_no_sync(pipeline, inputs, target):
    with pipeline.no_sync():
        pipeline.step(inputs, target=target)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (lambda pipeline, inputs, target: pipeline.evaluate(inputs, target=target), "runs evaluate"),
        (within_no_sync, "is within no_sync()"),
        (freeze, "train other parameters"),
        (lambda pipeline, inputs, target: pipeline.step(inputs[:7], target=target[:7]), "7"),
        (lambda pipeline, inputs, target: pipeline.step(inputs, target=target[:4]), "rows"),
        (lambda pipeline, inputs, target: pipeline.profile(inputs, target=target), "recording"),
        (lambda pipeline, *_: pipeline.refuse(PipelineError("planted")), "planted"),
        (lambda pipeline, *_: pipeline.step(ps.Stream(iter([]))), "at an end"),
    ],
)
def test_a_step_that_one_replica_cannot_run_is_refused_by_all_and_the_next_one_is_right(odd, words):
    errors = on_replicas(only_in(1, odd))

    assert {type(error).__name__ for error in errors} <= {"StepRefused", "EndOfData"}
    assert len({type(error) for error in errors}) == 1
    assert len({error.rank for error in errors}) == 1
    assert all(words in str(error) for error in errors)


def test_an_evaluation_with_a_target_on_one_replica_alone_is_refused():
    errors = on_replicas(
        only_in(
            1,
            lambda pipeline, inputs, target: pipeline.evaluate(inputs),
            lambda pipeline, inputs, target: pipeline.evaluate(inputs, target=target),
        )
    )

    assert all("only one was given a target" in str(error) for error in errors)


class Planted(nn.Module):
    """Fails where it is told to."""

    def __init__(self):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), 3)
        self.fails = False

    def forward(self, x):
        if self.fails:
            raise ValueError("planted in a layer")
        return F.relu(self.linear(x))


@pytest.mark.parametrize("bad", range(4))
def test_an_error_in_one_replica_is_one_error_on_all_ranks_and_the_next_step_is_right(bad):
    job = Job([8, 8], lambda: [Planted() for _ in range(4)])

    def case(places):
        layers = job.make_layers()
        with ps.Pipeline(layers, "1f1b", MICROBATCHES, square_loss, mesh=places, deadline_s=10.0) as pipeline:
            inputs, target = job.of(pipeline.replica)
            for layer in layers:
                layer.fails = places.index == bad
            error = error_of(pipeline.step, inputs, target=target)
            for layer in layers:
                layer.fails = False
            for each in pipeline.parameters():
                each.grad = None
            loss = pipeline.step(inputs, target=target).loss
            return error, loss, {name: each.grad.clone() for name, each in pipeline.named_parameters()}

    ranks, alone = on_mesh(2, 2, case), train_alone(job)

    name = f"rank {bad} (pipeline {bad % 2}, data {bad // 2})"
    for rank, (error, loss, gradients) in enumerate(ranks):
        assert error.rank == bad
        assert "ValueError: planted in a layer" in str(error)
        assert name in str(error)
        if rank != bad:
            assert f"{name} is the culprit" in str(error)
            assert error.waited_s < 5.0
        torch.testing.assert_close(loss, alone.losses[0], rtol=0, atol=1e-14)
        for key, gradient in gradients.items():
            torch.testing.assert_close(gradient, alone.gradients[key], rtol=1e-12, atol=1e-12)


# ---- what it costs


class Counting:
    """Counts what a rank sends along one dimension."""

    def __init__(self, transport):
        self._transport, self._post = transport, transport.post_send
        self.control, self.data = 0, []
        transport.post_send = self.post_send

    def post_send(self, peer, tensor, tag=Tag.DATA):
        if tag is Tag.CONTROL:
            self.control += 1
        else:
            self.data.append(tensor.nbytes)
        return self._post(peer, tensor, tag)


@pytest.mark.parametrize(("pipeline", "data"), [(2, 2), (2, 4), (1, 3)])
def test_a_step_has_one_exchange_per_reduction_and_two_gathers_along_each_dimension(pipeline, data):
    job = Job([64] * data, wide_layers, *(partial(wide_values, seed) for seed in (1, 2)))

    def case(places):
        with pipeline_of(places, job, "interleaved-1f1b", stages_per_rank=2) as own:
            inputs, target = job.of(own.replica)
            own.step(inputs, target=target)  # in which the ranks describe the shapes of messages, and tied parameters
            counted = [Counting(transport) for transport in places.transports]
            own.step(inputs, target=target)
            num_bytes = [sum(each.nbytes for each in stage.parameters()) for stage in own.stages]
            return [each.control for each in counted], counted[1].data, num_bytes

    for (along_pipeline, along_data), sent, num_bytes in on_mesh(pipeline, data, case):
        assert along_pipeline == 2 * (pipeline - 1)
        assert along_data == 2 * (data - 1)
        assert len(sent) == 2 * (data - 1) * len(num_bytes)
        assert sum(sent) <= 1.02 * 2 * (data - 1) / data * sum(num_bytes)


def test_backwards_run_while_a_reduction_is_under_way():
    """What it has launched is waited for at the end of the program."""
    job = Job([8, 8])

    def case(places):
        with pipeline_of(places, job, "interleaved-1f1b", stages_per_rank=2) as own:
            inputs, target = job.of(own.replica)
            own.step(inputs, target=target)
            bounds = own._runner._programs.of(Mode.TRAIN, MICROBATCHES).bounds
            return [(str(own.program.instruction(bound.row)), bound.awaits is None) for bound in bounds]

    calls = on_mesh(2, 2, case)[1]
    first = next(index for index, (row, _) in enumerate(calls) if "REDUCE_GRAD" in row)
    assert any("B" in row and "_" not in row for row, _ in calls[first:])
    reductions = [row for row, is_own in calls if "REDUCE_GRAD" in row and is_own]
    assert len(reductions) == len(set(reductions)) == 2
    assert [is_own for _, is_own in calls[-3:]] == [True, False, False]


# ---- checkpoints


def training(places, folder, *, save_at=None, load=False, end=4):
    """Train up to step `end`, and save or load on the way; return the loss of the last step and the weights."""
    job = Job([8, 8])
    is_alone = places.num_replicas == 1
    microbatches = 2 * MICROBATCHES if is_alone else MICROBATCHES
    with ps.Pipeline(job.make_layers(), "1f1b", microbatches, square_loss, mesh=places) as pipeline:
        optimizer = adamw(pipeline.parameters())
        begin = ps.load_checkpoint(folder, pipeline, optimizer)["at"] if load else 0
        inputs, target = (job.inputs(16), job.targets(16)) if is_alone else job.of(pipeline.replica)
        for step in range(begin, end):
            result = pipeline.step(inputs * (step + 1), target=target)
            optimizer.step()
            optimizer.zero_grad()
            if step + 1 == save_at:
                ps.save_checkpoint(folder, pipeline, optimizer, step=save_at, extra={"at": save_at})
        return result.loss, {name: each.detach().clone() for name, each in pipeline.named_parameters()}


def test_a_checkpoint_of_replicas_continues_on_them_and_on_other_layouts(tmp_path):
    whole = on_mesh(2, 2, training, tmp_path)
    on_mesh(2, 2, lambda places: training(places, tmp_path, save_at=2, end=2))

    files = [path.name for path in (tmp_path / "step-2").iterdir()]
    assert any("of-00004" in name for name in files)
    again = on_mesh(2, 2, lambda places: training(places, tmp_path, load=True))
    for (loss, weights), (expected, expected_weights) in zip(again, whole, strict=True):
        assert torch.equal(loss, expected)
        assert all(torch.equal(weights[name], value) for name, value in expected_weights.items())
    every = {name: value for _, weights in whole for name, value in weights.items()}
    for pipeline, data in ((1, 1), (4, 1), (1, 2)):
        for loss, weights in on_mesh(pipeline, data, lambda places: training(places, tmp_path, load=True)):
            torch.testing.assert_close(loss, whole[0][0], rtol=1e-12, atol=1e-12)
            for name, value in weights.items():
                torch.testing.assert_close(value, every[name], rtol=1e-12, atol=1e-12)


def test_random_numbers_continue_on_each_rank_of_every_replica(tmp_path, monkeypatch):
    own, found = threading.local(), []
    monkeypatch.setattr("penstock.checkpoints.writer.random_state", lambda device: {"of": own.index})
    monkeypatch.setattr(
        "penstock.checkpoints.loading.random_state_restorer",
        lambda state, device: found.append((own.index, state["of"])) or (lambda: None),
    )

    def case(places, **options):
        own.index = places.index
        training(places, tmp_path, **options)

    on_mesh(2, 2, lambda places: case(places, save_at=1, end=1))
    on_mesh(2, 2, lambda places: case(places, load=True, end=2))

    assert sorted(found) == [(rank, rank) for rank in range(4)]
