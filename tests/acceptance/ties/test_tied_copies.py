"""Copies of a tied parameter that drift apart are told where it begins, and before anything of them is saved."""

import pytest
import torch

import penstock as ps
from penstock.errors import PipelineError, StepRefused
from tests.support.local_pipelines import error_of, on_pipelines, token_task
from tests.support.mesh_pipelines import FLOAT, Job, on_mesh, pipeline_of

TIED = [("0.weight", "4.weight")]
TASK = token_task(8, torch.float64)
DRIFTED = "rank 0 holds '0.weight', and rank 1 its copy '4.weight', whose values differ"


def optimizer_by(name_of, pipeline):
    """AdamW that does not decay the embedding, which it knows by its name."""
    groups = {True: [], False: []}
    for name, parameter in pipeline.named_parameters():
        groups[name_of(pipeline, name) == "0.weight"].append(parameter)
    return torch.optim.AdamW(
        [{"params": groups[True], "weight_decay": 0.0}, {"params": groups[False], "weight_decay": 0.5}], lr=0.05
    )


def train(pipeline, name_of, num_steps=3):
    optimizer = optimizer_by(name_of, pipeline)
    for _ in range(num_steps):
        pipeline.step(*TASK.inputs, target=TASK.target)
        optimizer.step()
        optimizer.zero_grad()


def by_its_name(pipeline, name):
    return name


def by_its_owner(pipeline, name):
    return pipeline.owner_names.get(name, name)


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_groups_chosen_by_the_name_of_a_copy_are_refused_in_the_second_step(schedule):
    errors = on_pipelines(2, TASK, lambda own: error_of(train, own, by_its_name), schedule, tied=TIED)

    for error in errors:
        assert isinstance(error, StepRefused)
        assert DRIFTED in str(error)
        assert "choose by pipeline.owner_names.get(name, name)" in str(error)


def test_groups_chosen_by_the_name_of_the_owner_train_and_are_saved():
    def case(pipeline):
        train(pipeline, by_its_owner)
        return pipeline.state_dict(on_rank=0)

    state, _ = on_pipelines(2, TASK, case, tied=TIED)

    assert torch.equal(state["0.weight"], state["4.weight"])


def test_what_drifts_before_the_first_step_or_later_is_told_at_the_first_and_each_100th():
    def case(pipeline):
        def step():
            pipeline.step(*TASK.inputs, target=TASK.target)

        changed = dict(pipeline.named_parameters()).get("4.weight")
        moments = []
        for number in range(102):
            if changed is not None and number in (0, 2):
                with torch.no_grad():
                    changed[3, 1] += 1.0
            try:
                step()
            except StepRefused:
                moments.append(number)
                if changed is not None:
                    with torch.no_grad():
                        changed[3, 1] -= 1.0
                step()
        return moments

    # The refused first step is tried again, so that step 99 of the loop is the 100th that runs after the first.
    assert on_pipelines(2, TASK, case, tied=TIED) == [[0, 100]] * 2


def test_without_check_batches_steps_compare_nothing_and_saving_does(tmp_path):
    def case(pipeline):
        train(pipeline, by_its_name)
        return error_of(pipeline.state_dict, on_rank=0), error_of(ps.save_checkpoint, tmp_path, pipeline, step=3)

    for errors in on_pipelines(2, TASK, case, tied=TIED, check_batches=False):
        for error in errors:
            assert isinstance(error, PipelineError)
            assert DRIFTED in str(error)
    assert not list(tmp_path.glob("step*"))


def test_the_two_copies_of_a_model_with_two_routes_are_compared_too():
    def case(pipeline):
        if pipeline.rank == 1:
            with torch.no_grad():
                next(iter(pipeline.parameters())).mul_(2.0)
        return error_of(pipeline.step, *TASK.inputs, target=TASK.target)

    for error in on_pipelines(2, TASK, case, "dualpipe"):
        assert isinstance(error, StepRefused)
        assert "copies of a tied parameter must stay equal" in str(error)


@pytest.mark.parametrize("shard", ["none", "full"])
def test_with_replicas_the_shards_of_each_replica_are_compared_among_themselves(shard):
    job = Job([8, 8], TASK.make_layers, lambda rows: TASK.inputs[0].repeat(2, 1), lambda rows: TASK.target.repeat(2, 1))
    job.loss, job.options = TASK.loss, TASK.options | {"tied": TIED}

    def case(places):
        with pipeline_of(places, job, "1f1b", shard=shard) as pipeline:
            pipeline.require_equal_copies()
            inputs, target = job.of(pipeline.replica)
            pipeline.step(inputs, target=target)
            if pipeline.rank == 1:
                with torch.no_grad():
                    dict(pipeline.named_parameters())["4.weight"].mul_(2.0)
            return error_of(pipeline.require_equal_copies), error_of(pipeline.step, inputs, target=target)

    assert FLOAT is torch.float64
    for errors in on_mesh(2, 2, case):
        for error in errors:
            assert "its copy '4.weight', whose values differ" in str(error)
