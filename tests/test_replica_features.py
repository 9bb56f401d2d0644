"""What looks at a step, scales its losses or ends it works on replicas as on a pipeline alone."""

import copy
import time

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import DeadlineExceeded
from tests.local_pipelines import WIDTH, error_of, float_layers, settle, square_loss, values
from tests.mesh_pipelines import FLOAT, MICROBATCHES, Job, difference, on_mesh, pipeline_of, train, train_alone


def test_a_profile_and_a_memory_report_are_of_the_replica():
    job = Job([8, 8])

    def case(places):
        with pipeline_of(places, job, "1f1b") as pipeline:
            inputs, target = job.of(pipeline.replica)
            timeline = pipeline.profile(inputs, target=target)
            report = pipeline.memory_report(inputs, target=target)
            return timeline.program.num_ranks, timeline.makespan_s, len(report.ranks)

    ranks = on_mesh(2, 2, case)

    assert {(num_ranks, num_reported) for num_ranks, _, num_reported in ranks} == {(2, 2)}
    assert ranks[0][1] == ranks[1][1] != ranks[2][1] == ranks[3][1]


def test_buffers_of_sums_are_in_the_predicted_memory():
    """They are as large as gradients that are not summed in place, and kept from step to step."""
    job = Job([8, 8])

    def case(places):
        with pipeline_of(places, job, "1f1b") as pipeline:
            inputs, target = job.of(pipeline.replica)
            return pipeline.memory_report(inputs, target=target)

    alone, own = on_mesh(2, 1, case)[0], on_mesh(2, 2, case)[0]

    gradients = [sum(stage.gradient_bytes for stage in rank.stages) for rank in own.ranks]
    more = [with_sums - without for with_sums, without in zip(own.predicted_bytes, alone.predicted_bytes, strict=True)]
    assert more == [rank.kept_bytes for rank in own.ranks]
    assert all(0 < size < kept < 1.1 * size for size, kept in zip(gradients, more, strict=True))


@pytest.mark.parametrize("level", ["messages", "values"])
def test_debug_levels_find_nothing_wrong(level):
    job = Job([8, 8])
    ranks = on_mesh(2, 2, lambda places: train(places, job, "zbv", 2, debug=level))

    assert difference(ranks, train_alone(job, 2), num_replicas=2) == []


class Inverse(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), 3)

    def forward(self, x):
        return self.linear(x) / (x[:, :1] != 7)


def test_a_value_that_is_not_finite_in_one_replica_is_named_on_all_ranks():
    job = Job([8, 8], lambda: [Inverse(), *float_layers(FLOAT, 3)])
    rows = values(1, 16, WIDTH, dtype=FLOAT)
    rows[13, 0] = 7
    job.inputs = lambda _: rows

    def case(places):
        with pipeline_of(places, job, "1f1b") as pipeline:
            inputs, target = job.of(pipeline.replica)
            return pipeline.find_not_finite(inputs, target=target)

    found = on_mesh(2, 2, case)

    assert len(set(found)) == 1
    assert found[0].startswith("rank 2 (pipeline 0, data 1), ")
    assert "0F2" in found[0]


def scaled_training(places, job, microbatches=MICROBATCHES, whole=False):
    """Train with a GradScaler whose scale overflows now and then; return losses, scales and weights."""
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
    with ps.Pipeline(
        job.make_layers(), "1f1b", microbatches, square_loss, mesh=places, scale_loss=scaler.scale
    ) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.05)
        batch = (job.inputs(16), job.targets(16)) if whole else job.of(pipeline.replica)
        found = []
        for _ in range(8):
            loss = pipeline.step(batch[0], target=batch[1]).loss
            scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            found.append((loss.item(), scaler.get_scale()))
        return found, {name: each.detach().clone() for name, each in pipeline.named_parameters()}


def test_scalers_of_all_replicas_take_one_decision():
    job = Job([8, 8], float_layers)
    job.inputs = lambda rows: values(1, rows, WIDTH)
    targets = values(2, 16, WIDTH)
    targets[0] *= 400  # gradients of the first replica overflow longer than those of the second
    job.targets = lambda _: targets

    ranks = on_mesh(2, 2, lambda places: scaled_training(places, job))
    (alone,) = on_mesh(1, 1, lambda places: scaled_training(places, job, 2 * MICROBATCHES, whole=True))

    for history, _ in ranks:
        assert history == ranks[0][0]
        assert [scale for _, scale in history] == [scale for _, scale in alone[0]]
    assert len({scale for _, scale in alone[0]}) > 2


def test_streams_are_read_by_each_replica_and_end_together():
    job = Job([8, 8])

    def case(places):
        inputs, target = job.of(places.replica)
        parts = list(zip(inputs.split(2), target.split(2), strict=True)) * (2 if places.replica == 0 else 1)
        stream = ps.Stream(iter(parts))
        with pipeline_of(places, job, "1f1b") as pipeline:
            loss = pipeline.step(stream).loss
            return loss, error_of(pipeline.step, stream)

    ranks = on_mesh(2, 2, case)

    for loss, error in ranks:
        torch.testing.assert_close(loss, train_alone(job).losses[0], rtol=0, atol=1e-14)
        assert isinstance(error, ps.EndOfData)
        assert error.rank in (2, 3)


def test_an_empty_batch_that_is_spent_is_kept_where_another_replica_refuses():
    job = Job([8, 8])

    def case(places):
        inputs, target = job.of(places.replica)
        parts = (
            ps.PreSplit(list(inputs.split(2)), is_consumed=True),
            ps.PreSplit(list(target.split(2)), is_consumed=True),
        )
        with pipeline_of(places, job, "1f1b") as pipeline:
            if places.replica == 1:
                error = error_of(pipeline.step, inputs[:3], target=target)
            else:
                error = error_of(pipeline.step, parts[0], target=parts[1])
            return type(error), pipeline.step(parts[0], target=parts[1]).loss, len(parts[0].parts)

    for kind, loss, num_left in on_mesh(2, 2, case):
        assert kind is ps.StepRefused
        assert num_left == 0
        torch.testing.assert_close(loss, train_alone(job).losses[0], rtol=0, atol=1e-14)


class Slow(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), 3)
        self.sleep_s = 0.0

    def forward(self, x):
        time.sleep(self.sleep_s)
        return self.linear(x)


def test_a_replica_that_lags_is_named_with_its_instruction_and_stack():
    job = Job([8, 8], lambda: [Slow() for _ in range(2)])
    deadline_s = 1.0

    def case(places):
        layers = job.make_layers()
        with ps.Pipeline(layers, "1f1b", MICROBATCHES, square_loss, mesh=places, deadline_s=deadline_s) as pipeline:
            inputs, target = job.of(pipeline.replica)
            pipeline.step(inputs, target=target)
            layers[0].sleep_s = 2.5 if places.index == 1 else 0.0
            begin_s = time.monotonic()
            error = error_of(pipeline.step, inputs, target=target)
            took_s = time.monotonic() - begin_s
            layers[0].sleep_s = 0.0
            for each in pipeline.parameters():
                each.grad = None
            time.sleep(2.0 if places.index == 0 else 0.0)
            return error, took_s, _retried(pipeline, inputs, target)

    ranks = on_mesh(1, 2, case, deadline_s=deadline_s)

    (error, took_s, loss), (other, _, other_loss) = ranks
    assert isinstance(error, DeadlineExceeded)
    assert error.rank == other.rank == 1
    assert took_s < deadline_s + 2
    assert "rank 1 (pipeline 0, data 1) is the culprit: it has been in 0F" in str(error)
    assert "time.sleep(self.sleep_s)" in str(error) or "in forward" in str(error)
    assert loss == other_loss


def _retried(pipeline, inputs, target):
    """The next step; one more try where the ranks have not come to it within one deadline."""
    for _ in range(3):
        try:
            return pipeline.step(inputs, target=target).loss.item()
        except ps.PipelineError:
            continue
    return None


def test_two_pipelines_on_one_mesh_train_side_by_side():
    job = Job([8, 8])

    def case(places):
        others = copy.copy(places)
        with pipeline_of(places, job, "1f1b") as one, pipeline_of(others, job, "gpipe") as two:
            inputs, target = job.of(one.replica)
            return one.step(inputs, target=target).loss, two.step(inputs, target=target).loss

    for one, two in on_mesh(2, 2, case):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-14)


def test_a_rank_may_be_first_to_refuse_layers_while_others_wait():
    def case(places):
        layers = float_layers(FLOAT, 4)
        options = {"seed": -1} if places.index == 3 else {}
        return error_of(ps.Pipeline, layers, "1f1b", 4, square_loss, mesh=places, **options)

    errors = on_mesh(2, 2, case)

    assert {type(error) for error in errors} == {ps.ConfigError}
    assert all("rank 3 (pipeline 1, data 1)" in str(error) for error in errors[:3])


def test_a_count_that_fails_in_one_replica_is_one_error_on_all():
    job = Job([8, 8])

    def case(places):
        def count(target):
            if places.replica == 1 and target[0, 0] == fails_at[0]:
                raise ValueError("planted in count")
            return len(target)

        inputs, target = job.of(places.replica)
        fails_at = [target[0, 0]]
        with pipeline_of(places, job, "1f1b", count=count) as pipeline:
            error = error_of(pipeline.step, inputs, target=target)
            fails_at[0] = None
            return error, pipeline.step(inputs, target=target).loss

    for error, loss in on_mesh(2, 2, case):
        assert error.rank == 3
        assert "planted in count" in str(error)
        torch.testing.assert_close(loss, train_alone(job).losses[0], rtol=0, atol=1e-14)
