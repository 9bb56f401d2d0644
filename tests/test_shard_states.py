"""What is done with sharded pipelines between steps, and what looks at a step: states, reports, recordings."""

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.ir.operations import Op
from tests.local_pipelines import WIDTH, error_of, float_layers, named, square_loss, values
from tests.mesh_pipelines import FLOAT, MICROBATCHES, Job, difference, on_mesh, pipeline_of, train, train_alone
from tests.sharded_pipelines import ALL, NONE, ONE, OPTIMIZER, TWO, adamw, name_of
from tests.test_replica_features import Inverse
from tests.test_replicas import norm_layers
from tests.test_shard_gradients import Rows, assert_near, whole

BOTH = pytest.mark.parametrize("setting", [ONE, OPTIMIZER], ids=name_of)


# ---- evaluation


@pytest.mark.parametrize("setting", [ONE, TWO, OPTIMIZER, ALL], ids=name_of)
@pytest.mark.parametrize("schedule", ["1f1b", "zbv", "dualpipe"])
def test_evaluations_before_and_between_steps_have_the_loss_of_all_rows_and_change_nothing(schedule, setting):
    setting = TWO if schedule == "dualpipe" and setting is ONE else setting  # it has pairs of two stages
    job = Job([8, 8])

    def case(places):
        with pipeline_of(places, job, schedule, **setting) as own:
            inputs, target = job.of(own.replica)
            found = [own.evaluate(inputs, target=target).loss]
            optimizer = adamw(own.parameters())
            many = (inputs[:2].repeat(4, 1), target[:2].repeat(4, 1))
            for _ in range(2):
                own.step(*many[:1], target=many[1])
                found.append(own.evaluate(inputs, target=target).loss)
                optimizer.step()
                optimizer.zero_grad()
            found.append(own.evaluate(inputs, target=target).loss)
            return found

    ranks = on_mesh(2, 2, case)

    layers, expected = job.make_layers(), []
    model, inputs, targets = nn.Sequential(*layers), job.inputs(sum(job.rows)), job.targets(sum(job.rows))
    optimizer = adamw([each for _, each in named(layers)])
    many = [torch.cat([job.of(replica)[column][:2].repeat(4, 1) for replica in range(2)]) for column in range(2)]
    expected.append(square_loss(model(inputs), targets))
    for _ in range(2):
        expected.append(square_loss(model(inputs), targets))
        square_loss(model(many[0]), many[1]).backward()
        optimizer.step()
        optimizer.zero_grad()
    expected.append(square_loss(model(inputs), targets))
    for own in ranks:
        torch.testing.assert_close(torch.stack(own), torch.stack(expected), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "setting"),
    [
        ("1f1b", ONE),
        ("zbv", OPTIMIZER),
        ("zbv", ONE),
    ],
    ids=name_of,
)
def test_an_evaluation_has_the_loss_of_all_rows_also_where_replicas_have_few(schedule, setting):
    job = Job([8, 3])

    def case(places):
        with pipeline_of(places, job, schedule, deadline_s=5.0, **setting) as own:
            inputs, target = job.of(own.replica)
            return own.evaluate(inputs, target=target).loss

    expected = square_loss(nn.Sequential(*job.make_layers())(job.inputs(11)), job.targets(11))

    for loss in on_mesh(2, 2, case, deadline_s=5.0):
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)


@BOTH
def test_outputs_of_an_evaluation_are_the_replicas_own(setting):
    job = Job([8, 8])

    def case(places):
        with pipeline_of(places, job, "interleaved-1f1b", **setting) as own:
            return own.evaluate(job.of(own.replica)[0], return_outputs=True).outputs

    ranks = on_mesh(2, 2, case)

    for replica in range(2):
        expected = nn.Sequential(*job.make_layers())(job.of(replica)[0])
        torch.testing.assert_close(ranks[2 * replica + 1], expected, rtol=1e-12, atol=1e-12)


# ---- states of models


@pytest.mark.parametrize("on_rank", [0, 1])
@BOTH
def test_a_state_is_gathered_as_whole_tensors_on_one_rank_of_the_first_replica(setting, on_rank):
    job = Job([8, 8, 8], norm_layers)

    def case(places):
        with pipeline_of(places, job, "interleaved-1f1b", stages_per_rank=2, **setting) as own:
            inputs, target = job.of(own.replica)
            optimizer = adamw(own.parameters())
            own.step(inputs, target=target)
            optimizer.step()
            optimizer.zero_grad()
            state = own.state_dict(on_rank=on_rank)
            own.step(inputs, target=target)  # a state changes nothing
            return state, Rows(own)

    ranks = on_mesh(2, 3, case)

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


@BOTH
@pytest.mark.parametrize("from_rank", [None, 0, 1])
def test_a_whole_state_is_loaded_by_all_and_the_next_step_uses_it(from_rank, setting):
    job = Job([8, 8, 8])
    state = other_state(job)

    def case(places):
        with pipeline_of(places, job, "interleaved-1f1b", **setting) as own:
            before = dict(own.named_parameters())
            inputs, target = job.of(own.replica)
            own.step(inputs, target=target)
            if from_rank is None:
                own.load_state_dict(state)
            else:
                own.load_state_dict(state if places.index == from_rank else None, from_rank=from_rank)
            assert all(before[name] is each for name, each in own.named_parameters())
            for each in own.parameters():
                each.grad = None
            loss = own.step(inputs, target=target).loss
            return loss, Rows(own)

    ranks = on_mesh(2, 3, case)

    layers = nn.Sequential(*job.make_layers())
    layers.load_state_dict(state)
    expected = square_loss(layers(job.inputs(24)), job.targets(24))
    expected.backward()
    rows = [each for _, each in ranks]
    assert_near(whole(rows, 3, "weights"), state)
    assert_near(whole(rows, 3), {name: each.grad for name, each in named(layers)})
    for loss, _ in ranks:
        torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=1e-12)


@BOTH
def test_a_state_with_a_wrong_shape_is_one_error_on_all_and_changes_nothing(setting):
    job = Job([8, 8])
    state = other_state(job)
    state["3.1.weight"] = torch.zeros(WIDTH + 1, WIDTH, dtype=FLOAT)

    def case(places):
        with pipeline_of(places, job, "1f1b", **setting) as own:
            before = Rows(own).weights
            error = error_of(own.load_state_dict, state if places.index == 0 else None, from_rank=0)
            after = Rows(own).weights
            assert all(torch.equal(before[name].rows, after[name].rows) for name in before)
            inputs, target = job.of(own.replica)
            return str(error), own.step(inputs, target=target).loss

    for text, loss in on_mesh(2, 2, case):
        assert "3.1.weight" in text
        torch.testing.assert_close(loss, train_alone(job).losses[0], rtol=1e-12, atol=1e-12)


# ---- what looks at a step


@BOTH
@pytest.mark.parametrize("level", ["messages", "values"])
def test_debug_levels_find_nothing_wrong(level, setting):
    job = Job([8, 8])
    ranks = on_mesh(2, 2, lambda places: train(places, job, "zbv", 2, debug=level, **setting))

    assert difference(ranks, train_alone(job, 2), num_replicas=2) == []


@BOTH
def test_a_value_that_is_not_finite_in_one_replica_is_named_on_all_ranks(setting):
    rows = values(1, 16, WIDTH, dtype=FLOAT)
    rows[13, 0] = 7
    job = Job([8, 8], lambda: [Inverse(), *float_layers(FLOAT, 3)], inputs=lambda _: rows)

    def case(places):
        with pipeline_of(places, job, "1f1b", **setting) as own:
            inputs, target = job.of(own.replica)
            return own.find_not_finite(inputs, target=target)

    found = on_mesh(2, 2, case)

    assert len(set(found)) == 1
    assert found[0].startswith("rank 2 (pipeline 0, data 1), ")
    assert "0F2" in found[0]


def poisoned(own):
    """Make one value of one row of one shard infinite."""
    with torch.no_grad():
        for name, each in own.named_parameters():
            if name == "6.1.weight" and own.replica == 1:
                each.to_local()[0, 0] = float("inf")


@BOTH
def test_a_weight_that_is_not_finite_in_one_shard_is_found(setting):
    job = Job([8, 8])

    def case(places):
        with pipeline_of(places, job, "1f1b", **setting) as own:
            poisoned(own)
            inputs, target = job.of(own.replica)
            return own.find_not_finite(inputs, target=target)

    found = on_mesh(2, 2, case)

    assert len(set(found)) == 1
    assert "1F0" in found[0] or "6.1.weight" in found[0]


@BOTH
def test_a_profile_a_report_of_memory_and_a_recorded_step_are_of_the_replica(setting):
    job = Job([8, 8])

    def case(places):
        with pipeline_of(places, job, "interleaved-1f1b", **setting) as own:
            inputs, target = job.of(own.replica)
            found = [own.step(inputs, target=target, record=True).loss]
            recorded = own.timeline
            profiled = own.profile(inputs, target=target)
            report = own.memory_report(inputs, target=target)
            for each in own.parameters():
                each.grad = None
            found.append(own.step(inputs, target=target).loss)
            return found, recorded, profiled, len(report.ranks)

    ranks, expected = on_mesh(2, 2, case), train_alone(job).losses[0]

    for losses, recorded, profiled, num_ranks in ranks:
        assert num_ranks == 2
        for timeline in (recorded, profiled):
            assert timeline.program.num_ranks == 2
            for op in (Op.UNSHARD, Op.RESHARD, Op.REDUCE_GRADIENT):
                assert (timeline.program.op == op).sum() >= 4
            assert timeline.makespan_s > 0
        for loss in losses:
            torch.testing.assert_close(loss, expected, rtol=1e-12, atol=1e-12)


def test_programs_of_sharded_pipelines_are_those_that_lower_makes():
    job = Job([8, 8])

    def case(places):
        with pipeline_of(places, job, "zbv", **ONE) as own:
            return own.program.digest(), own.schedule

    (digest, schedule), *others = on_mesh(2, 2, case)

    assert digest == ps.lower(schedule, **ONE).digest() != ps.lower(schedule, **NONE).digest()
    assert {each for each, _ in others} == {digest}
    assert schedule.num_microbatches == MICROBATCHES
