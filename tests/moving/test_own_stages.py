"""Every rank brings its own stages only, and the ranks agree on who brings what."""

import pytest
from torch import nn

from penstock.errors import ConfigError, PartitionError, PipelineError
from penstock.moving.own_stages import ForeignStage, Site
from penstock.schedules import build
from tests.local_pipelines import error_of, on_ranks, square_loss
from tests.moving.own_layers import assert_gradients, batch, gradients, own_stage, reference


def pipeline_of(transport, schedule, stages, *, num_microbatches=4, **options):
    site = Site.of(None, {"transport": transport, **options})
    order = site.schedule(schedule, num_microbatches, len(stages))
    return site.pipeline({stage: own_stage(stage) for stage in stages}, order, square_loss)


def stepped(transport, schedule, stages, **options):
    pipeline = pipeline_of(transport, schedule, stages, **options)
    inputs, target = batch(8)
    result = pipeline.step(inputs, target=target)
    found = gradients({stage.index: next(iter(stage.layers.values())) for stage in pipeline.stages})
    names = [name for name, _ in pipeline.named_parameters()]
    pipeline.close()
    return result, found, names


def test_ranks_with_their_own_stages_alone_train_as_one_process_does():
    expected, expected_gradients = reference(4, 4)

    outcomes = on_ranks(2, lambda wires: stepped(wires, "interleaved-1f1b", [wires.rank, wires.rank + 2]))

    assert_gradients([found for _, found, _ in outcomes], expected_gradients)
    assert [result.loss for result, _, _ in outcomes] == [expected.loss] * 2


def test_parameters_are_named_by_their_stage():
    (_, _, names), _ = on_ranks(2, lambda wires: stepped(wires, "zbv", [[0, 3], [1, 2]][wires.rank]))

    assert names[0] == "0.0.weight"
    assert {name.split(".")[0] for name in names} == {"0", "3"}


def test_a_pair_of_tied_names_reaches_over_ranks():
    def case(transport):
        pipeline = pipeline_of(transport, "1f1b", [transport.rank], tied=[("0.1.weight", "1.1.weight")])
        inputs, target = batch(8)
        pipeline.step(inputs, target=target)
        (weight,) = [parameter for name, parameter in pipeline.named_parameters() if name.endswith("1.weight")]
        pipeline.close()
        return weight.detach(), weight.grad

    (first, first_gradient), (last, last_gradient) = on_ranks(2, case)

    assert first.equal(last)
    assert first_gradient.equal(last_gradient)


def test_a_foreign_stage_cannot_be_built():
    assert "stage 3 is another rank's" in str(error_of(ForeignStage(3)))


@pytest.mark.parametrize(
    ("schedule", "stages", "text"),
    [
        ("1f1b", {0: [1], 1: [0]}, r"rank 0 brings the stages \[1\], but 1f1b .* places \[0\] there.*0 \| 1"),
        ("zbv", {0: [0, 2], 1: [1, 3]}, r"rank 0 brings the stages \[0, 2\].*places \[0, 3\].*0 3 \| 1 2"),
        ("1f1b", {0: [0], 1: [0]}, r"rank 1 brings the stages \[0\].*places \[1\]"),
    ],
)
def test_other_stages_than_the_schedule_places_are_refused_on_every_rank(schedule, stages, text):
    errors = on_ranks(2, lambda wires: error_of(pipeline_of, wires, schedule, stages[wires.rank]))

    assert [type(error) for error in errors] == [PartitionError] * 2
    with pytest.raises(PartitionError, match=text):
        raise errors[0]


def test_ranks_that_name_different_schedules_hear_of_it():
    errors = on_ranks(2, lambda wires: error_of(pipeline_of, wires, ["1f1b", "gpipe"][wires.rank], [wires.rank]))

    assert [type(error) for error in errors] == [PipelineError] * 2
    assert "the ranks disagree on the schedule" in str(errors[0])


def test_two_copies_of_the_model_are_refused():
    errors = on_ranks(2, lambda wires: error_of(pipeline_of, wires, "dualpipe", [0, 1]))

    assert [type(error) for error in errors] == [ConfigError] * 2
    assert "two copies of every stage" in str(errors[0])


def test_unknown_options_are_refused_and_those_of_the_family_taken():
    def case(transport):
        error = error_of(Site.of(None, {"transport": transport, "warmpu": "eager"}).schedule, "1f1b", 4, 1)
        eager = Site.of(None, {"transport": transport, "warmup": "eager"}).schedule("1f1b", 4, 1)
        return error, eager

    error, eager = on_ranks(2, case)[0]

    assert "Did you mean 'warmup'?" in str(error)
    assert eager == build("1f1b", ranks=2, microbatches=4, warmup="eager")


def test_a_failure_of_one_rank_is_every_ranks_at_once():
    def fail(transport):
        return error_of(Site.of(None, {"transport": transport}).together, ForeignStage(1) if transport.rank else int)

    first, second = on_ranks(2, fail)

    assert isinstance(second, PartitionError)
    assert isinstance(first, ConfigError)
    assert str(first) == f"rank 1: {second}"


def test_without_wires_one_process_is_alone():
    site = Site.of(None, {})
    pipeline = site.pipeline({0: nn.Linear(2, 2)}, site.schedule("1f1b", 2, 1), square_loss)

    assert pipeline.transport.num_ranks == 1
    pipeline.close()
