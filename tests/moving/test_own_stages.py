"""Every rank brings its own stages only, and the ranks agree on who brings what."""

import pytest
import torch

from penstock.errors import ConfigError, PartitionError
from penstock.lowering import lower
from penstock.moving.own_stages import PipelineMaker, RemoteStage, require_parts
from penstock.schedules import build
from tests.moving.own_layers import assert_gradients, batch, gradients, own_stage, reference, whole_model
from tests.support.local_pipelines import error_of, on_ranks, square_loss, two_routes
from tests.support.reference import reference_step


def pipeline_of(transport, schedule, stages, *, num_microbatches=4, **options):
    local = PipelineMaker.of(None, {"transport": transport, **options})
    order = local.schedule(schedule, num_microbatches, len(stages))
    return local.pipeline({stage: own_stage(stage) for stage in stages}, order, square_loss)


def test_a_foreign_stage_cannot_be_built():
    assert "stage 3 is another rank's" in str(error_of(RemoteStage(3)))


@pytest.mark.parametrize(
    ("schedule", "stages", "text"),
    [
        ("1f1b", {0: [1], 1: [0]}, r"rank 0 brings the stages \[1\], but 1f1b .* places \[0\] there.*0 \| 1"),
        ("zbv", {0: [0, 2], 1: [1, 3]}, r"rank 0 brings the stages \[0, 2\].*places \[0, 3\].*0 3 \| 1 2"),
    ],
)
def test_other_stages_than_the_schedule_places_are_refused_on_every_rank(schedule, stages, text):
    errors = on_ranks(2, lambda wires: error_of(pipeline_of, wires, schedule, stages[wires.rank]))

    assert [type(error) for error in errors] == [PartitionError] * 2
    with pytest.raises(PartitionError, match=text):
        raise errors[0]


# ---- two routes


def two_copies(rank, num_ranks, schedule, num_microbatches, *, change=None, **options):
    """Train on the modules that a rank brings, one for each direction; the second copies start with other values."""
    local = PipelineMaker.of(None, options)
    order = local.schedule(schedule, num_microbatches, 2)
    own = {rank: own_stage(rank)}
    own[2 * num_ranks - 1 - rank] = own[rank] if 2 * rank + 1 == num_ranks else own_stage(50 + rank)
    if change is not None:
        change(own)
    pipeline = local.pipeline(own, order, square_loss)
    inputs, target = batch(2 * num_microbatches)
    result = pipeline.step(inputs, target=target)
    found = gradients({stage % num_ranks: module for stage, module in own.items()})
    values = {stage: [value.clone() for value in module.state_dict().values()] for stage, module in own.items()}
    names = {name for name, _ in pipeline.named_parameters()}
    pipeline.close()
    return result, found, values, names


def check_two_copies(outcomes, num_microbatches):
    num_ranks = len(outcomes)
    result, expected_gradients = reference(num_ranks, num_microbatches, 2 * num_microbatches)
    assert_gradients([found for _, found, _, _ in outcomes], expected_gradients, tolerance=1e-12)
    for rank, (own, found, values, _) in enumerate(outcomes):
        assert own.losses == result.losses
        assert own.loss == result.loss
        _, other, other_values, _ = outcomes[num_ranks - 1 - rank]
        assert all(torch.equal(found[key], other[key]) for key in found)  # both copies, bit for bit
        copy = rank + num_ranks
        assert all(torch.equal(*pair) for pair in zip(values[rank], other_values[copy], strict=True))
        assert values[rank][0].equal(own_stage(rank).state_dict()["0.weight"])


@pytest.mark.parametrize(("schedule", "num_ranks", "num_microbatches"), [("dualpipe", 2, 4), ("chimera", 4, 6)])
def test_a_module_for_each_direction_trains_as_one_process_does(schedule, num_ranks, num_microbatches):
    outcomes = on_ranks(
        num_ranks, lambda wires: two_copies(wires.rank, num_ranks, schedule, num_microbatches, transport=wires)
    )

    check_two_copies(outcomes, num_microbatches)
    assert [{name[0] for name in names} for *_, names in outcomes] == [
        {str(rank), str(num_ranks - 1 - rank)} for rank in range(num_ranks)
    ]


def test_where_both_copies_are_on_one_rank_it_brings_one_module():
    outcomes = on_ranks(3, lambda wires: two_copies(wires.rank, 3, two_routes(3, 4), 4, transport=wires))

    check_two_copies(outcomes, 4)


def tie(own):
    """Share a weight of the two parts that a rank holds, as an embedding and a head are."""
    first, last = (own[stage] for stage in sorted(own, key=lambda stage: stage % 2))
    last[1].weight = first[1].weight


@pytest.mark.parametrize("names", [(), [("0.1.weight", "1.1.weight")]])
def test_a_parameter_that_both_parts_of_a_rank_share_is_tied(names):
    outcomes = on_ranks(
        2, lambda wires: two_copies(wires.rank, 2, "dualpipe", 4, change=tie, tied=names, transport=wires)
    )

    layers = whole_model(2)
    tie(dict(enumerate(layers)))
    inputs, target = batch(8)
    result = reference_step(layers, (inputs,), {}, target, loss=square_loss, num_microbatches=4)
    wanted = gradients(dict(enumerate(layers)))
    assert_gradients([found for _, found, _, _ in outcomes], wanted, tolerance=1e-12)
    assert [own.loss for own, *_ in outcomes] == [result.loss] * 2


# ---- the schedule


def test_stages_per_rank_follow_from_the_parts_unless_a_family_leaves_no_choice():
    local = PipelineMaker.of(None, {})

    assert [local.stages_per_rank("1f1b", 1), local.stages_per_rank("interleaved-1f1b", 3)] == [1, 3]
    assert local.stages_per_rank("dualpipe", 1) is None
    assert local.stages_per_rank(build("dualpipe", ranks=2, microbatches=4), 2) == 2


def test_a_model_of_another_number_of_parts_is_refused():
    require_parts(build("dualpipe", ranks=2, microbatches=4), 2, "parts")

    error = error_of(require_parts, build("zbv", ranks=2, microbatches=4), 2, "parts")

    assert isinstance(error, ConfigError)
    assert "parts: 2 parts of the model are given, but zbv on 2 ranks runs 4 one after another" in str(error)


def test_a_program_is_refused():
    program = lower(build("1f1b", ranks=1, microbatches=2))

    with pytest.raises(ConfigError, match=r"schedule: 1f1b is a program with communication; expected a schedule of F"):
        PipelineMaker.of(None, {}).schedule(program, 2, 1)


def test_unknown_options_are_refused_and_those_of_the_family_taken():
    def case(transport):
        def maker(**options):
            return PipelineMaker.of(None, {"transport": transport, **options})

        groups = maker(group_size=4)
        return (
            error_of(maker(warmpu="eager").schedule, "1f1b", 4, 1),
            maker(warmup="eager").schedule("1f1b", 4, 1),
            error_of(groups.schedule, "1f1b", 8, 1),
            groups.schedule("interleaved-1f1b", 8, 2),
            groups.joined.process_group,
        )

    misspelt, eager, misplaced, grouped, process_group = on_ranks(2, case)[0]

    assert "Did you mean 'warmup'" in str(misspelt)
    assert eager == build("1f1b", ranks=2, microbatches=4, warmup="eager")
    assert "neither Pipeline nor 1f1b has the option 'group_size'" in str(misplaced)
    assert grouped == build("interleaved-1f1b", ranks=2, microbatches=8, stages_per_rank=2, group_size=4)
    assert process_group is None
