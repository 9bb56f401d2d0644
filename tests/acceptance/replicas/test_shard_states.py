"""What is done with pipelines of a mesh between steps, and what looks at a step: states, reports, recordings."""

import copy

import torch
from torch import nn

import penstock as ps
from penstock.ir.operations import Op
from tests.support.local_pipelines import WIDTH, error_of, float_layers, settle, square_loss, values, zero
from tests.support.mesh_pipelines import (
    FLOAT,
    MICROBATCHES,
    Job,
    Rows,
    assert_near,
    gradients_of_steps,
    index_of,
    on_mesh,
    on_pipelines,
    pipeline_of,
    train_alone,
    whole,
)
from tests.support.sharded_pipelines import ALL, NONE, ONE, OPTIMIZER, TWO, adamw, compared, norm_layers, settings, ways

BOTH = settings(ONE, OPTIMIZER)


def assert_loss_of_one_process(losses, job):
    """The losses of all ranks are that of a first step of one process."""
    expected = train_alone(job).losses[0]
    for loss in losses:
        torch.testing.assert_close(loss, expected, rtol=0, atol=1e-14)


# ---- evaluation


@ways(
    "schedule setting",
    ("1f1b", ONE),
    ("zbv", OPTIMIZER),
    slow=[("1f1b", TWO), ("zbv", ALL), ("dualpipe", TWO), ("dualpipe", OPTIMIZER)],
)
def test_evaluations_before_and_between_steps_have_the_loss_of_all_rows_and_change_nothing(schedule, setting):
    job = Job([8, 8])

    def losses(evaluate, step, parameters):
        found = [evaluate()]
        optimizer = adamw(parameters)
        for _ in range(2):
            step()
            found.append(evaluate())
            optimizer.step()
            optimizer.zero_grad()
        return torch.stack([*found, evaluate()])

    def many(tensor):
        return tensor[:2].repeat(4, 1)

    def of_pipelines(own, inputs, target):
        evaluate = lambda: own.evaluate(inputs, target=target).loss  # noqa: E731
        return losses(evaluate, lambda: own.step(many(inputs), target=many(target)), own.parameters())

    model = nn.Sequential(*job.make_layers())
    batch = [torch.cat([many(job.of(replica)[column]) for replica in range(2)]) for column in range(2)]
    expected = losses(
        lambda: square_loss(model(job.all_inputs), job.all_targets).detach(),
        lambda: square_loss(model(batch[0]), batch[1]).backward(),
        model.parameters(),
    )
    for found in on_pipelines(job, schedule, of_pipelines, **setting):
        torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


# ---- states of models


@ways("on_rank setting", (0, NONE), (1, ONE), slow=[(0, OPTIMIZER)])
def test_a_state_is_gathered_as_whole_tensors_on_one_rank_of_the_first_replica(setting, on_rank):
    job = Job([8, 8, 8], norm_layers)

    def gathered(own, inputs, target):
        optimizer = adamw(own.parameters())
        own.step(inputs, target=target)
        optimizer.step()
        optimizer.zero_grad()
        state = own.state_dict(on_rank=on_rank)
        own.step(inputs, target=target)  # a state changes nothing
        return state, Rows(own)

    ranks = on_pipelines(job, "interleaved-1f1b", gathered, stages_per_rank=2, **setting)

    expected = nn.Sequential(*job.make_layers()).state_dict()
    weights = whole([rows for _, rows in ranks], 3, "weights")
    state = ranks[on_rank][0]
    assert state.keys() == expected.keys()
    assert all(not hasattr(each, "placements") for each in state.values())
    assert all(torch.equal(state[name], weights[name]) for name in weights)
    assert all(state[name].shape == expected[name].shape for name in expected)
    assert [own for own, _ in ranks].count({}) == 5


def other_state(job):
    return {name: value * 3 + 1 for name, value in nn.Sequential(*job.make_layers()).state_dict().items()}


@ways("from_rank setting", (None, ONE), (0, OPTIMIZER), (1, NONE))
def test_a_whole_state_is_loaded_by_all_and_the_next_step_uses_it(from_rank, setting):
    job = Job([8, 8, 8])
    state = other_state(job)

    def loaded(own, inputs, target):
        before = dict(own.named_parameters())
        own.step(inputs, target=target)
        if from_rank is None:
            own.load_state_dict(state)
        else:
            own.load_state_dict(state if index_of(own) == from_rank else None, from_rank=from_rank)
        assert all(before[name] is each for name, each in own.named_parameters())
        zero(own)
        return own.step(inputs, target=target).loss, Rows(own)

    ranks = on_pipelines(job, "interleaved-1f1b", loaded, **setting)

    layers = job.make_layers()
    nn.Sequential(*layers).load_state_dict(state)
    there = Job(job.rows, lambda: layers)
    rows = [each for _, each in ranks]
    assert_near(whole(rows, 3, "weights"), state, tolerance=0)
    assert_near(whole(rows, 3), gradients_of_steps(there, [1]))
    expected = square_loss(nn.Sequential(*layers)(job.all_inputs), job.all_targets).detach()
    for loss, _ in ranks:
        torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)


# ---- what looks at a step


@ways("level setting", ("messages", ONE), slow=[("values", NONE), ("values", OPTIMIZER)])
def test_debug_levels_find_nothing_wrong(level, setting):
    assert compared(2, 2, Job([8, 8]), "zbv", steps=2, debug=level, **setting) == []


class Inverse(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), 3)

    def forward(self, x):
        return self.linear(x) / (x[:, :1] != 7)


def not_finite(own, inputs, target):
    return own.find_not_finite(inputs, target=target)


@settings(NONE, ONE)
def test_a_value_that_is_not_finite_in_one_replica_is_named_on_all_ranks(setting):
    rows = values(1, 16, WIDTH, dtype=FLOAT)
    rows[13, 0] = 7
    job = Job([8, 8], lambda: [Inverse(), *float_layers(FLOAT, 3)], inputs=lambda _: rows)

    found = on_pipelines(job, "1f1b", not_finite, **setting)

    assert len(set(found)) == 1
    assert found[0].startswith("rank 2 (pipeline 0, data 1), ")
    assert "0F2" in found[0]


@BOTH
def test_a_weight_that_is_not_finite_in_one_shard_is_found(setting):
    def poisoned(own, *batch):
        with torch.no_grad():
            for name, each in own.named_parameters():
                if name == "6.1.weight" and own.replica == 1:
                    each.to_local()[0, 0] = float("inf")
        return not_finite(own, *batch)

    found = on_pipelines(Job([8, 8]), "1f1b", poisoned, **setting)

    assert len(set(found)) == 1
    assert "1F0" in found[0] or "6.1.weight" in found[0]


@ways("setting", (ONE,), slow=[(NONE,), (OPTIMIZER,)])
def test_a_profile_a_report_of_memory_and_a_recorded_step_are_of_the_replica(setting):
    job = Job([8, 8])
    operations = (Op.REDUCE_GRADIENT,) if setting is NONE else (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRADIENT)

    def looked_at(own, inputs, target):
        first = own.step(inputs, target=target, record=True).loss
        recorded = own.timeline
        profiled = own.profile(inputs, target=target)
        report = own.memory_report(inputs, target=target)
        zero(own)
        return (first, own.step(inputs, target=target).loss), (recorded, profiled), len(report.ranks)

    ranks = on_pipelines(job, "interleaved-1f1b", looked_at, **setting)

    for losses, timelines, num_ranks in ranks:
        assert num_ranks == 2
        for timeline in timelines:
            assert timeline.program.num_ranks == 2
            assert all((timeline.program.op == op).sum() >= 4 for op in operations)
            assert timeline.makespan_s > 0
        assert_loss_of_one_process(losses, job)
    profiled_s = [profiled.makespan_s for _, (_, profiled), _ in ranks]
    assert profiled_s[0] == profiled_s[1] != profiled_s[2] == profiled_s[3]


def test_buffers_of_sums_are_in_the_predicted_memory():
    """They are as large as gradients that are not summed in place, and kept from step to step."""

    def report(own, inputs, target):
        return own.memory_report(inputs, target=target)

    alone, own = (on_pipelines(Job([8] * data), "1f1b", report)[0] for data in (1, 2))

    gradients = [sum(stage.gradient_bytes for stage in rank.stages) for rank in own.ranks]
    more = [with_sums - without for with_sums, without in zip(own.predicted_bytes, alone.predicted_bytes, strict=True)]
    assert more == [rank.kept_bytes for rank in own.ranks]
    assert all(0 < size < kept < 1.1 * size for size, kept in zip(gradients, more, strict=True))


def test_programs_of_sharded_pipelines_are_those_that_lower_makes():
    ranks = on_pipelines(Job([8, 8]), "zbv", lambda own, *_: (own.program.digest(), own.schedule), **ONE)

    (digest, schedule), *others = ranks
    assert digest == ps.lower(schedule, **ONE).digest() != ps.lower(schedule, **NONE).digest()
    assert {each for each, _ in others} == {digest}
    assert schedule.num_microbatches == MICROBATCHES


# ---- streams and counts


def test_streams_are_read_by_each_replica_and_end_together():
    job = Job([8, 8])

    def streamed(own, inputs, target):
        parts = list(zip(inputs.split(2), target.split(2), strict=True)) * (2 if own.replica == 0 else 1)
        stream = ps.Stream(iter(parts))
        return own.step(stream).loss, error_of(own.step, stream)

    losses, errors = zip(*on_pipelines(job, "1f1b", streamed), strict=True)

    assert_loss_of_one_process(losses, job)
    for error in errors:
        assert isinstance(error, ps.EndOfData)
        assert error.rank in (2, 3)


def test_an_empty_batch_that_is_spent_is_kept_where_another_replica_refuses():
    job = Job([8, 8])

    def refused(own, *batch):
        inputs, target = (ps.PreSplit(list(each.split(2)), is_consumed=True) for each in batch)
        error = error_of(own.step, batch[0][:3] if own.replica else inputs, target=batch[1] if own.replica else target)
        return type(error), own.step(inputs, target=target).loss, len(inputs.parts)

    kinds, losses, num_left = zip(*on_pipelines(job, "1f1b", refused), strict=True)

    assert set(kinds) == {ps.StepRefused}
    assert set(num_left) == {0}
    assert_loss_of_one_process(losses, job)


def test_two_pipelines_on_one_mesh_train_side_by_side():
    job = Job([8, 8])

    def case(places):
        others = copy.copy(places)
        with pipeline_of(places, job, "1f1b", **ONE) as one, pipeline_of(others, job, "zbv", **OPTIMIZER) as two:
            inputs, target = job.of(one.replica)
            optimizer = adamw([*one.parameters(), *two.parameters()])
            losses = []
            for _ in range(2):
                losses.append([each.step(inputs, target=target).loss for each in (one, two)])
                optimizer.step()
            return losses, Rows(one), Rows(two)

    ranks = on_mesh(2, 2, case)

    one, two = (whole([found[index] for found in ranks], 2, "weights") for index in (1, 2))
    assert_near(one, two)
    for losses, *_ in ranks:
        for pair in losses:
            torch.testing.assert_close(*pair, rtol=0, atol=1e-14)
