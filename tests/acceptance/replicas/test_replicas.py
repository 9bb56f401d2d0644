"""Replicas on a mesh are one job, with shards or without: its numbers are those of one process with the rows of all."""

import warnings
from contextlib import nullcontext
from functools import partial

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import PipelineError
from penstock.execute.control.agreement import Mode
from penstock.execute.session import ProgramKey
from penstock.execute.transport.protocol import Tag
from tests.support.local_pipelines import (
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
    values,
    zero,
)
from tests.support.local_wires import ordered
from tests.support.mesh_pipelines import (
    FLOAT,
    MICROBATCHES,
    Job,
    assert_near,
    difference,
    gradients_after,
    gradients_of_steps,
    on_mesh,
    on_pipelines,
    one_step,
    rows_after,
    train,
    train_alone,
    two_steps,
    whole,
)
from tests.support.sharded_pipelines import (
    ALL,
    IN_PLACE,
    NONE,
    ONE,
    OPTIMIZER,
    TWO,
    compared,
    settings,
    token_job,
    token_targets,
    tokens,
    ways,
    wide_job,
)

EACH_WAY = settings(NONE, IN_PLACE, ONE, OPTIMIZER)


@pytest.mark.feature("X3")
@ways(
    "schedule setting",
    ("dualpipe", NONE),
    ("dualpipe-v", TWO),
    slow=[("dualpipe", TWO), ("dualpipe-v", ALL), ("chimera", NONE), ("chimera", ONE)],
)
def test_two_routes_and_folded_ones_train_as_in_one_process(schedule, setting):
    assert compared(2, 2, Job([8, 8]), schedule, steps=5, **setting) == []


@ways("seed setting", (0, NONE), (1, IN_PLACE), (2, ONE))
def test_messages_in_any_order_give_the_same(seed, setting):
    job = Job([8, 8])
    ranks = on_mesh(2, 2, lambda places: train(places, job, "zbv", 2, **setting), connect=ordered(seed))

    assert difference(ranks, train_alone(job, 2), num_replicas=2) == []


@ways("schedule setting", ("zb-h1", IN_PLACE), ("zbv", OPTIMIZER), slow=[("zb-h1", NONE), ("zb-h1", ONE)])
def test_weights_that_wait_for_w_are_summed(schedule, setting):
    assert compared(2, 2, wide_job(2), schedule, **setting) == []


# ---- weights of losses


class Balance(nn.Module):
    """Adds a loss beside the output, as a mixture of experts does."""

    def __init__(self):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), 9)
        self.added = ps.AuxiliaryLoss("balance", 0.5)

    def forward(self, x):
        self.added.add((x**2).mean() + self.linear.weight.abs().mean())
        return self.linear(x)


SUM, RAGGED = {"reduction": "sum"}, {"allow_ragged": True}
SHARES = {
    "sums": Job([8, 12, 4], loss=nn.MSELoss(reduction="sum"), options=SUM, known=SUM),
    "rows": Job([9, 5, 14], options=RAGGED, known=RAGGED),
    "tokens, of which one replica has few": token_job((5, 9), token_targets, count=count_tokens, **RAGGED),
    "losses of layers": Job([8, 5], lambda: [Balance(), *float_layers(FLOAT, 3)], options=RAGGED, known=RAGGED),
}


@pytest.mark.feature("E13", "X35")
@ways(
    "shares setting",
    ("sums", NONE),
    *(("rows", setting) for setting in (IN_PLACE, ONE)),
    ("tokens, of which one replica has few", ONE),
    ("losses of layers", ONE),
    slow=[(shares, setting) for shares in SHARES for setting in (NONE, ONE, OPTIMIZER)],
)
def test_replicas_weigh_by_what_they_have_of_the_batch_of_the_job(shares, setting):
    job = SHARES[shares]

    assert compared(2, len(job.rows), job, "1f1b", **setting) == []


def test_losses_that_layers_add_are_reported_for_the_rows_of_the_job():
    job = SHARES["losses of layers"]
    expected = train_alone(job).result.named_losses["balance"]

    for own in on_mesh(2, 2, lambda places: train(places, job, "1f1b", **ONE)):
        assert abs(own.result.named_losses["balance"] - expected) < 1e-14


@settings(NONE, ONE)
def test_replicas_whose_tokens_all_count_nothing_add_nothing(setting):
    nothing = torch.full((8, LENGTH), IGNORED)
    job = token_job(targets=lambda rows: torch.cat([nothing, tokens(8)]), count=count_tokens)

    assert compared(1, 2, job, "1f1b", **setting) == []
    job.targets = lambda rows: torch.cat([nothing, nothing])
    for own in on_mesh(1 if setting is NONE else 2, 2, lambda places: train(places, job, "1f1b", **setting)):
        assert own.losses[0] == 0
        found = [each for each in own.gradients.values() if each is not None]
        # A shard may have no rows of a parameter.
        assert setting is not NONE or len(found) == len(own.gradients)
        assert not any(getattr(each, "rows", each).any() for each in found)


def test_a_loss_with_names_has_those_of_the_job():
    def loss(output, target):
        return {"square": ((output - target) ** 2).mean(), "mean": output.mean() * 0.1}

    job = Job([8, 8], loss=loss)
    ranks, alone = on_mesh(2, 2, lambda places: train(places, job, "1f1b")), train_alone(job)

    for own in ranks:
        for name, value in alone.result.named_losses.items():
            torch.testing.assert_close(own.result.named_losses[name], value, rtol=0, atol=1e-14)
            assert len(own.result.named_microbatch_losses[name]) == MICROBATCHES


@settings(NONE, ONE)
def test_losses_of_microbatches_and_outputs_are_the_replicas_own(setting):
    job = Job([8, 8])

    def outputs(own, inputs, target):
        result = own.step(inputs, target=target, return_outputs=True)
        return result.losses, result.outputs, own.evaluate(inputs, return_outputs=True).outputs

    ranks, alone = on_pipelines(job, "interleaved-1f1b", outputs, **setting), train_alone(job)

    for rank, (losses, *outputs) in enumerate(ranks):
        replica = slice(rank // 2 * MICROBATCHES, (rank // 2 + 1) * MICROBATCHES)
        assert losses == alone.result.losses[replica]
        for found in outputs if rank % 2 else ():
            torch.testing.assert_close(found, torch.cat(alone.result.outputs[replica]), rtol=0, atol=1e-14)


@ways("schedule setting", ("1f1b", NONE), ("zbv", ONE))
def test_an_evaluation_has_the_loss_of_all_rows_also_where_replicas_have_few(schedule, setting):
    job = Job([8, 3])
    expected = square_loss(nn.Sequential(*job.make_layers())(job.all_inputs), job.all_targets)

    def evaluated(own, inputs, target):
        return own.evaluate(inputs, target=target)

    for result in on_pipelines(job, schedule, evaluated, max_wait_s=5.0, deadline_s=5.0, **setting):
        torch.testing.assert_close(result.loss, expected, rtol=0, atol=1e-14)
        assert len(result.losses) in (MICROBATCHES, 3)


# ---- parameters


class Branches(nn.Module):
    """Which of its products runs depends on the sign of the first value of the input."""

    def __init__(self):
        super().__init__()
        self.products = nn.ModuleList(settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), seed) for seed in range(3))

    def forward(self, x):
        return self.products[int(x[0, 0] > 0)](x)


@EACH_WAY
def test_a_parameter_that_one_replica_used_has_a_gradient_on_all_and_an_unused_one_on_none(setting):
    rows = values(1, 16, WIDTH, dtype=FLOAT)
    rows[:, 0] = rows[:, 0].abs()
    rows[:8, 0] *= -1
    job = Job([8, 8], lambda: [Branches(), *float_layers(FLOAT, 3)], inputs=lambda _: rows)
    ranks, alone = on_mesh(2, 2, lambda places: train(places, job, "1f1b", **setting)), train_alone(job)

    assert difference(ranks, alone, num_replicas=2) == []
    assert ranks[2].gradients["0.products.0.weight"] is not None
    assert ranks[2].gradients["0.products.2.weight"] is None


@ways("schedule setting", ("zbv", ONE), slow=[("1f1b", NONE)])
def test_dropout_with_a_seed_draws_as_one_process_with_the_microbatches_of_all(schedule, setting):
    job = Job([8, 8], lambda: [nn.Sequential(block(seed, FLOAT), nn.Dropout(0.5)) for seed in range(4)])

    assert compared(2, 2, job, schedule, seed=7, **setting) == []


@ways(
    "schedule options setting",
    ("1f1b", {"recompute": True}, ONE),
    ("seq1f1b", {"slices": LENGTH}, NONE),
    slow=[("zb-h1", {"recompute": True}, NONE), ("seq1f1b", {"slices": LENGTH}, OPTIMIZER)],
)
def test_slices_and_recomputation_are_summed_too(schedule, options, setting):
    assert compared(2, 2, token_job(), schedule, steps=2, **options, **setting) == []


@settings(IN_PLACE, ONE)
def test_sparse_gradients_become_dense_ones_of_the_same_values(setting):
    def layers(sparse):
        return [settle(nn.Embedding(VOCABULARY, WIDTH, sparse=sparse, dtype=FLOAT), 100), *token_layers(FLOAT)[1:]]

    job, dense = token_job(), token_job()
    job.make_layers, dense.make_layers = partial(layers, True), partial(layers, False)

    assert compared(2, 2, job, "1f1b", alone=dense, **setting) == []


@EACH_WAY
def test_a_gradient_stays_in_the_memory_that_its_caller_gave_it_and_is_added_to(setting):
    job = Job([8, 8, 8])

    def steps(own, inputs, target):
        given = {}
        for name, each in own.named_parameters():
            given[name] = each.grad = torch.ones_like(each)
        two_steps(own, inputs, target)
        assert all(each.grad is given[name] for name, each in own.named_parameters())

    expected = {name: value + 1 for name, value in gradients_of_steps(job, [1, 1]).items()}
    assert_near(gradients_after(job, "zbv", steps, **setting), expected)


def test_within_no_sync_nothing_is_summed_but_what_is_tied():
    job = Job([8, 8])

    def step(own, inputs, target):
        with own.no_sync():
            own.step(inputs, target=target)

    ranks = [rows.gradients for rows in on_pipelines(job, "1f1b", rows_after(step), pipeline=1)]

    layers = job.make_layers()
    inputs, target = job.of(1)
    (square_loss(nn.Sequential(*layers)(inputs), target) / 2).backward()
    assert_near(ranks[1], {name: each.grad for name, each in named(layers)})
    assert not torch.equal(ranks[0]["0.1.weight"], ranks[1]["0.1.weight"])


def with_a_shared_weight():
    layers = float_layers(FLOAT, 8)
    layers[1][1].weight = layers[0][1].weight
    return layers


@ways("schedule setting", ("1f1b", IN_PLACE), ("zb-h1", ONE), slow=[("zb-h1", NONE), ("1f1b", OPTIMIZER)])
def test_a_weight_that_two_layers_of_one_stage_share_is_summed_once(schedule, setting):
    job = Job([8, 8], with_a_shared_weight)

    assert_near(gradients_after(job, schedule, two_steps, **setting), gradients_of_steps(job, [1, 1]))


@settings(NONE, OPTIMIZER)
@pytest.mark.parametrize(
    "steps",
    [
        [("synced", True), ("apart", False), ("synced", True)],
        [("apart", True), ("synced", False)],
        [("apart", True), ("synced", False), ("synced", True)],
    ],
    ids=["frozen within no_sync", "frozen behind no_sync", "and trained again"],
)
def test_a_weight_may_be_frozen_between_steps_that_are_summed_and_others(steps, setting):
    job, name = Job([8, 8]), "1.1.weight"

    def run(own, inputs, target):
        for kind, is_trained in steps:
            for each in [parameter for own_name, parameter in own.named_parameters() if own_name == name]:
                each.requires_grad_(is_trained)
            with own.no_sync() if kind == "apart" else nullcontext():
                own.step(inputs, target=target)

    ranks = on_pipelines(job, "1f1b", rows_after(run), **setting)
    expected = gradients_of_steps(job, [1] * len(steps))
    once = gradients_of_steps(job, [1])
    num_trained = sum(is_trained for _, is_trained in steps)
    expected[name] = num_trained * once[name]
    if setting == {"shard": "none"}:
        assert all(
            torch.equal(own.gradients[key], other.gradients[key])
            for own, other in zip(ranks[:2], ranks[2:], strict=True)
            for key in own.gradients
        )
    assert_near(whole(ranks, 2), expected)


# ---- warnings and refusals


def test_equal_batches_on_all_replicas_are_warned_of_once():
    job = Job([8, 8])

    def same_batch(own, *_):
        two_steps(own, *job.of(0))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        on_pipelines(job, "1f1b", same_batch)
        assert ["one and the same batch" in str(each.message) for each in found].count(True) == 1
        found.clear()
        on_pipelines(job, "1f1b", two_steps)
        assert not any("one and the same batch" in str(each.message) for each in found)


def errors_of(change):
    """Return each rank's error in a step by `change(own, inputs, target)`; the next step must be right."""
    job = Job([8, 8])

    def steps(own, inputs, target):
        error = error_of(change, own, inputs, target)
        own.train()
        zero(own)
        for each in own.parameters():
            each.requires_grad_()
        loss = own.step(inputs, target=target).loss
        return error, loss, {name: each.grad.clone() for name, each in own.named_parameters()}

    ranks, alone = on_pipelines(job, "1f1b", steps, deadline_s=5.0), train_alone(job)
    for _, loss, gradients in ranks:
        torch.testing.assert_close(loss, alone.losses[0], rtol=0, atol=1e-14)
        assert_near(gradients, alone.gradients)
    return [error for error, *_ in ranks]


def evaluation(own, inputs, target):
    own.evaluate(inputs, target=target)


def freeze(own, inputs, target):
    next(iter(own.parameters())).requires_grad_(False)
    own.step(inputs, target=target)


def within_no_sync(own, inputs, target):
    with own.no_sync():
        own.step(inputs, target=target)


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (evaluation, "in evaluate (test_replicas.py:"),
        (within_no_sync, "has no_sync(). Enter"),
        (freeze, "disagree on trained"),
        (lambda own, inputs, target: own.step(inputs[:7], target=target[:7]), "7"),
        (lambda own, inputs, target: own.step(inputs, target=target[:4]), "rows"),
        (lambda own, inputs, target: own.profile(inputs, target=target), "recording"),
        (lambda own, *_: own.refuse(PipelineError("planted")), "planted"),
        (lambda own, *_: own.step(ps.Stream(iter([]))), "at an end"),
        (lambda own, inputs, target: own.evaluate(inputs), "disagree on has_target"),
    ],
)
def test_a_step_that_one_replica_cannot_run_is_refused_by_all_and_the_next_one_is_right(odd, words):
    usual = evaluation if "has_target" in words else one_step
    errors = errors_of(lambda own, *batch: (odd if own.replica == 1 else usual)(own, *batch))

    assert {type(error).__name__ for error in errors} <= {"StepRefused", "EndOfData"}
    assert len({(type(error), error.rank) for error in errors}) == 1
    assert all(words in str(error) for error in errors)


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
            self.data.append((peer, tensor.nbytes))
        return self._post(peer, tensor, tag)


@pytest.mark.feature("X23")
@pytest.mark.parametrize(("pipeline", "data"), [(2, 2), (1, 3)])
def test_a_step_has_one_exchange_per_reduction_and_two_gathers_along_each_dimension(pipeline, data):
    job = wide_job(data, rows=64)

    def case(places):
        with ps.Pipeline(
            job.make_layers(), "interleaved-1f1b", MICROBATCHES, job.loss, mesh=places, stages_per_rank=2
        ) as own:
            inputs, target = job.of(own.replica)
            own.step(inputs, target=target)  # in which the ranks describe the shapes of messages, and tied parameters
            counted = [Counting(transport) for transport in places.transports]
            own.step(inputs, target=target)
            num_bytes = [sum(each.nbytes for each in stage.parameters()) for stage in own.stages]
            return [each.control for each in counted], [size for _, size in counted[1].data], num_bytes

    for (along_pipeline, along_data), sent, num_bytes in on_mesh(pipeline, data, case):
        assert along_pipeline == 2 * (pipeline - 1)
        assert along_data == 2 * (data - 1)
        assert len(sent) == 2 * (data - 1) * len(num_bytes)
        assert sum(sent) <= 1.02 * 2 * (data - 1) / data * sum(num_bytes)


@pytest.mark.feature("X23")
def test_backwards_run_while_a_reduction_is_under_way():
    """What it has launched is waited for at the end of the program."""

    def bounds(own, inputs, target):
        own.step(inputs, target=target)
        found = own._runner._programs.of(ProgramKey(Mode.TRAIN, MICROBATCHES, MICROBATCHES)).bounds
        return [(str(own.program.instruction(bound.row)), bound.awaits is None) for bound in found]

    calls = on_pipelines(Job([8, 8]), "interleaved-1f1b", bounds, stages_per_rank=2)[1]

    first = next(index for index, (row, _) in enumerate(calls) if "REDUCE_GRAD" in row)
    assert any("B" in row and "_" not in row for row, _ in calls[first:])
    reductions = [row for row, is_own in calls if "REDUCE_GRAD" in row and is_own]
    assert len(reductions) == len(set(reductions)) == 2
    assert [is_own for _, is_own in calls[-3:]] == [True, False, False]
