"""Code written for torch.distributed.pipelining runs with the import changed, and gives one process's gradients."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import microbatch as torch_microbatch

from penstock.errors import ConfigError, StepRefused
from penstock.execute.batch.microbatch import Replicate
from penstock.moving import torch_pipelining as moved
from penstock.schedules import build
from tests.moving.own_layers import assert_gradients, batch, gradients, own_stage, reference
from tests.support.local_pipelines import error_of, on_ranks, settle, square_loss, values
from tests.support.reference import reference_step

IN_ORDER = {"1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble"}


def stages_on(rank, name):
    """The stages that torch's users place on one of two ranks for a schedule of this name."""
    if name in ("1F1B", "GPipe"):
        indices = [rank]
    elif name in ("ZBVZeroBubble", "DualPipeV"):
        indices = [rank, 3 - rank]
    else:
        indices = [rank, rank + 2]
    num_stages = 2 * len(indices)
    stages = [moved.PipelineStage(own_stage(index), index, num_stages, torch.device("cpu")) for index in indices]
    return stages if len(stages) > 1 else stages[0]


def train(rank, name, steps=1, **options):
    """Write the loop of a torch user: inputs where the first stage is, target where the last one is."""
    stages = stages_on(rank, name)
    schedule = moved.Schedule(name, stages, 8, square_loss, **options)
    own = stages if isinstance(stages, list) else [stages]
    inputs, target = batch(8)
    losses = []
    for _ in range(steps):
        args = (inputs,) if any(stage.is_first for stage in own) else ()
        if any(stage.is_last for stage in own):
            output = schedule.step(*args, target=target, losses=losses)
        else:
            output = schedule.step(*args)
    found = gradients({stage.stage_index: stage.submod for stage in own})
    loss = schedule.result.loss
    schedule.close()
    return output, losses, loss, found


def check(outcomes, name, *, steps=1):
    num_stages = 2 if name in ("1F1B", "GPipe") else 4
    expected, expected_gradients = reference(num_stages, 8, steps=steps)
    tolerance = 0.0 if name in IN_ORDER else 1e-12
    assert_gradients([found for *_, found in outcomes], expected_gradients, tolerance=tolerance)
    last = 0 if name in ("ZBVZeroBubble", "DualPipeV") else 1
    for rank, (output, losses, loss, _) in enumerate(outcomes):
        assert torch.equal(loss, expected.loss)
        if rank == last:
            torch.testing.assert_close(output, torch.cat(expected.outputs), rtol=0, atol=0)
            assert losses == expected.losses
        else:
            assert output is None
            assert losses == []


@pytest.mark.parametrize("name", moved.FAMILY_OF_CLASS)
def test_every_schedule_of_torch_trains_as_one_process_does(name):
    check(on_ranks(2, lambda wires: train(wires.rank, name, transport=wires)), name)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["1F1B", "ZBVZeroBubble"])
def test_on_gloo_too(two_ranks, name):
    check(two_ranks.run(train, name), name)


@pytest.mark.slow
def test_a_group_of_its_own_is_used(two_ranks):
    assert two_ranks.run(alone_in_a_group) == [1, 1]


def alone_in_a_group(rank):
    groups = [dist.new_group([other]) for other in range(2)]
    stage = moved.PipelineStage(own_stage(0), 0, 1, "cpu", group=groups[rank])
    schedule = moved.Schedule1F1B(stage, 2, square_loss)
    inputs, target = batch(8)
    schedule.step(inputs, target=target)
    num_ranks = schedule.pipeline.transport.num_ranks
    schedule.close()
    return num_ranks


def on_schedules(body, make=moved.Schedule1F1B, module=own_stage, loss=square_loss, **options):
    """Return what `body(schedule, stage)` returned on both of two ranks, each with one stage."""

    def case(transport):
        stage = moved.PipelineStage(module(transport.rank), transport.rank, 2, "cpu")
        schedule = make(stage, 4, loss, transport=transport, **options)
        found = body(schedule, stage)
        schedule.close()
        return found

    return on_ranks(2, case)


def halves(rank, inputs, target):
    return inputs.chunk(2)[rank], target.chunk(2)[1 - rank]


def other_target(rank, inputs, target):
    return inputs, target + rank


@pytest.mark.parametrize(
    ("give", "what", "call"), [(halves, "args[0], target", "step"), (other_target, "target", "eval")]
)
def test_a_half_of_the_batch_at_either_end_is_refused_and_the_whole_batch_runs_after_it(give, what, call):
    def case(transport):
        indices = [transport.rank, 3 - transport.rank]
        stages = [moved.PipelineStage(own_stage(index % 2), index, 4) for index in indices]
        schedule = moved.Schedule("dualpipe", stages, 4, square_loss, transport=transport)
        inputs, target = give(transport.rank, *batch(8))
        error = error_of(getattr(schedule, call), inputs, target=target)
        schedule.step(batch(8)[0], target=batch(8)[1])
        loss = schedule.result.loss
        schedule.close()
        return error, loss

    for error, loss in on_ranks(2, case):
        assert type(error) is StepRefused
        assert f"rank 0 and rank 1 were given different values in {what}; pass the same batch" in str(error)
        assert loss == reference(2, 4)[0].loss


def test_three_steps_add_up_and_refill_the_list_of_losses():
    outcomes = on_ranks(2, lambda wires: train(wires.rank, "1F1B", steps=3, transport=wires))

    check(outcomes, "1F1B", steps=3)


def test_names_are_read_in_any_case_and_ours_are_taken_too():
    def names(transport):
        made = []
        for name in ("1f1b", "SCHEDULE1F1B", "gPipe", "zb-h1"):
            schedule = moved.Schedule(name, stages_on(transport.rank, "1F1B"), 4, square_loss, transport=transport)
            made.append(schedule.pipeline.schedule.name)
        return made

    assert on_ranks(2, names)[0] == ["1f1b", "1f1b", "gpipe", "zb-h1"]
    assert moved.get_schedule_class("interleavedzerobubble") is moved.ScheduleInterleavedZeroBubble
    assert moved.get_schedule_class("zb-h2").family == "zb-h2"
    assert "Did you mean" in str(error_of(moved.get_schedule_class, "Interleaved1F1"))


def test_a_schedule_made_elsewhere_is_taken_as_it_is(tmp_path):
    order = build("zb-h1", ranks=2, microbatches=8)
    (tmp_path / "mine.csv").write_text(order.to_csv())

    for schedule in (order, tmp_path / "mine.csv", str(tmp_path / "mine.csv")):
        outcomes = on_ranks(2, lambda wires, given=schedule: train_given(wires, given))
        assert_gradients(outcomes, reference(2, 8)[1])


def train_given(transport, schedule):
    stage = stages_on(transport.rank, "1F1B")
    moving = moved.Schedule(schedule, stage, loss_fn=square_loss, transport=transport)
    inputs, target = batch(8)
    moving.step(inputs, target=target)
    moving.close()
    return gradients({stage.stage_index: stage.submod})


def test_eval_gives_outputs_and_losses_and_no_gradients():
    def case(schedule, stage):
        inputs, target = batch(8)
        losses = []
        output = schedule.eval(inputs, target=target, losses=losses)
        without_target = schedule.eval(inputs)
        return output, without_target, losses, [parameter.grad for parameter in stage.submod.parameters()]

    first, last = on_schedules(case, moved.ScheduleGPipe)
    expected, _ = reference(2, 4)

    assert first[0] is None
    assert torch.equal(last[0], torch.cat(expected.outputs))
    assert torch.equal(last[1], last[0])
    assert last[2] == first[2] == expected.losses
    assert not any(first[3] + last[3])


def test_a_schedule_without_a_loss_runs_forward_only():
    def case(schedule, stage):
        output = schedule.step(batch(8)[0])
        return output, [parameter.grad for parameter in stage.submod.parameters()]

    first, last = on_schedules(case, loss=None)

    assert torch.equal(last[0], torch.cat(reference(2, 4)[0].outputs))
    assert not any(first[1] + last[1])


class Two(nn.Module):
    """Returns two tensors, or takes two."""

    def __init__(self, returns_two, seed):
        super().__init__()
        self.linear = settle(nn.Linear(6, 6, dtype=torch.float64), seed)
        self.returns_two = returns_two

    def forward(self, features, bias=None, scale=None):
        result = self.linear(features) if bias is None else self.linear(features) + bias
        result = result if scale is None else result * scale
        return (result, features.tanh()) if self.returns_two else result


class OnOne(Two):
    """The second stage as one process runs it: fed one tuple."""

    def forward(self, pair, scale=None):
        return super().forward(*pair, scale=scale)


@pytest.mark.parametrize(("name", "indices"), [("1f1b", [(0,), (1,)]), ("chimera", [(0, 3), (1, 2)])])
def test_every_route_begins_with_several_arguments_and_a_tuple_becomes_several_of_the_next_stage(name, indices):
    inputs, target = batch(8)

    def case(transport):
        own = indices[transport.rank]
        stages = [moved.PipelineStage(Two(index in (0, 2), index % 2), index, 2 * len(own)) for index in own]
        schedule = moved.Schedule(name, stages, 4, square_loss, transport=transport)
        assert [(stage.is_first, stage.is_last) for stage in stages] == [(i % 2 == 0, i % 2 == 1) for i in own]
        output = schedule.step(inputs, target=target, scale=inputs + 2)
        schedule.close()
        assert not any(stage.submod._forward_pre_hooks for stage in stages)
        found = gradients({stage.stage_index % 2: stage.submod for stage in stages})
        return output, schedule.result.loss, found

    (nothing, *first), (output, *last) = on_ranks(2, case)

    layers = [Two(True, 0), OnOne(False, 1)]
    scale = {"scale": inputs + 2}
    expected = reference_step(layers, (inputs,), scale, target, loss=square_loss, num_microbatches=4)
    for loss, found in (first, last):
        torch.testing.assert_close(loss, expected.loss)
        if name == "chimera":  # both ranks have both modules
            assert_gradients([found], gradients(dict(enumerate(layers))), tolerance=1e-12)
    assert_gradients([first[1], last[1]], gradients(dict(enumerate(layers))), tolerance=1e-12)
    torch.testing.assert_close(output, torch.cat(expected.outputs), rtol=1e-12, atol=1e-12)
    assert nothing is None


def test_specs_of_torch_say_how_to_split_and_merge():
    inputs, target = batch(8)
    scale = values(5, 1, 6, dtype=torch.float64)
    spec = torch_microbatch.TensorChunkSpec

    def case(schedule, stage):
        output = schedule.step(inputs.t(), target=target, scale=scale)
        return output, gradients({stage.stage_index: stage.submod})

    (_, first), (output, last) = on_schedules(
        case,
        module=Turned,
        args_chunk_spec=spec.from_tuple((1,)),
        kwargs_chunk_spec={"scale": Replicate()},
        output_merge_spec=spec(0),
    )

    layers = [Turned(0), Turned(1)]
    whole = layers[1](layers[0](inputs.t(), scale), scale)
    square_loss(whole, target).backward()
    torch.testing.assert_close(output, whole)
    assert_gradients([first, last], gradients(dict(enumerate(layers))), tolerance=1e-12)


class Turned(nn.Module):
    """The first stage takes columns instead of rows."""

    def __init__(self, stage):
        super().__init__()
        self.stage = stage
        self.inner = own_stage(stage)

    def forward(self, features, scale):
        return self.inner((features if self.stage else features.t()) * scale)


@pytest.mark.parametrize("scale_grads", [True, False])
def test_scale_grads_divides_by_the_microbatches_or_not(scale_grads):
    outcomes = on_ranks(2, lambda wires: train(wires.rank, "1F1B", scale_grads=scale_grads, transport=wires))

    expected = reference(2, 8, reduction="mean" if scale_grads else "sum")[1]
    assert_gradients([found for *_, found in outcomes], expected)


def test_keywords_for_the_loss_reach_it():
    def weighted(output, target, *, factor):
        return factor * square_loss(output, target)

    def case(schedule, stage):
        inputs, target = batch(8)
        schedule.step(inputs, target=target, loss_kwargs={"factor": 3.0})
        return schedule.result.loss

    assert on_schedules(case, loss=weighted)[0] == reference(2, 4, loss=lambda o, t: 3.0 * square_loss(o, t))[0].loss


def test_what_torch_needs_to_learn_shapes_is_taken():
    moved.PipelineStage(nn.Identity(), 0, 1, "cpu", input_args=(torch.ones(1),), output_args=None, get_mesh=None)

    assert "Did you mean 'input_args' or" in str(error_of(moved.PipelineStage, nn.Identity(), 0, 1, input_arg=1))


@pytest.mark.parametrize(
    ("call", "given", "loss", "text"),
    [
        ("step", [], square_loss, "rank 1 computes the losses and was given no target"),
        ("step", ["target"], None, "target: is given, but the schedule was made without"),
        ("eval", ["target"], None, "target: is given, but the schedule was made without"),
        ("step", ["losses"], None, "losses: is given, but the schedule was made without"),
    ],
)
def test_a_forgotten_target_or_loss_is_told_on_all_ranks_before_anything_runs(call, given, loss, text):
    def case(schedule, stage):
        inputs, target = batch(8)
        keywords = {"target": target, "losses": []}
        return error_of(getattr(schedule, call), inputs, **{name: keywords[name] for name in given})

    for error in on_schedules(case, loss=loss):
        assert type(error) is StepRefused
        assert text in str(error)


def test_stages_that_do_not_fit_each_other_or_the_schedule_are_refused():
    def stage(index, num_stages):
        return moved.PipelineStage(nn.Identity(), index, num_stages)

    wrong = {
        "brings no stage": lambda rank: [],
        "2 by stage 0, 3 by stage 1": lambda rank: [stage(0, 2), stage(1, 3)],
        "bring each stage once": lambda rank: [stage(0, 2), stage(0, 2)],
        "num_stages: 4 stages are given, but 1f1b on 2 ranks": lambda rank: stage(rank, 4),
        "stage_index: 2; expected 0 to 1 of 2": lambda rank: stage(2 * rank, 2),
    }

    def errors(transport):
        return [
            error_of(moved.Schedule, "1F1B", stages(transport.rank), 4, square_loss, transport=transport)
            for stages in wrong.values()
        ]

    for told, error in zip(wrong, on_ranks(2, errors)[1], strict=True):
        assert isinstance(error, ConfigError)
        assert told in str(error)


def test_a_wrong_list_of_stages_on_one_rank_reaches_the_other_at_once():
    def case(transport):
        given = own_stage(1) if transport.rank else moved.PipelineStage(own_stage(0), 0, 2)
        return error_of(moved.Schedule, "1F1B", given, 4, square_loss, transport=transport)

    first, second = on_ranks(2, case, deadline_s=60.0)

    assert isinstance(first, ConfigError)
    assert str(first) == f"rank 1: {second}"
    assert "expected a PipelineStage, or a list of them" in str(second)
