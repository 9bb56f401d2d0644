"""torch's own runtime loads the CSV that we write, runs it, and gets the gradients of one process.

Its runtime for such files is private, so this names privates of torch; nothing in src/ does.
"""

import pytest
import torch
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, _PipelineScheduleRuntime
from torch.nn.functional import mse_loss

from penstock.lowering import lower
from penstock.schedules import FAMILIES, build

WIDTH = 3
COUNTERPARTS = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zb", "zbv", "dualpipe-v")
"""The families that torch has as well."""


def fits_torch(name):
    """Whether torch has a place for it: a backward of every microbatch on every stage, so no two copies of a model."""
    schedule = build(name, ranks=2, microbatches=4)
    return not schedule.is_forward_only and len(schedule.placement.routes) == 1


def layer(stage):
    torch.manual_seed(stage)
    return torch.nn.Linear(WIDTH, WIDTH, dtype=torch.float64)


def batch(num_microbatches):
    torch.manual_seed(1000)
    return torch.randn(2, 2 * num_microbatches, WIDTH, dtype=torch.float64)


def gradients(module):
    return torch.cat([parameter.grad.flatten() for parameter in module.parameters()]).tolist()


def run_in_torch(rank, path, form, stages_of_rank, num_microbatches):
    """Load a file, run one step and return the gradients of the own stages."""
    num_stages = sum(map(len, stages_of_rank))
    modules = {stage: layer(stage) for stage in stages_of_rank[rank]}
    stages = [PipelineStage(modules[stage], stage, num_stages, torch.device("cpu")) for stage in modules]
    runtime = _PipelineScheduleRuntime(stages, n_microbatches=num_microbatches, loss_fn=mse_loss)
    runtime._load_csv(path, format=form)

    inputs, target = batch(num_microbatches)
    arguments = [inputs] if 0 in modules else []
    runtime.step(*arguments, target=target if num_stages - 1 in modules else None)
    return {stage: gradients(module) for stage, module in modules.items()}


def run_alone(num_stages, num_microbatches):
    """The same step on one process."""
    modules = [layer(stage) for stage in range(num_stages)]
    for inputs, target in zip(*(half.split(2) for half in batch(num_microbatches)), strict=True):
        (mse_loss(torch.nn.Sequential(*modules)(inputs), target) / num_microbatches).backward()
    return dict(enumerate(map(gradients, modules)))


def assert_torch_trains_it(pool, folder, schedule, form):
    table = schedule if form == "compute_only" else lower(schedule)
    path = folder / "plan.csv"
    path.write_text(table.to_csv(), newline="")

    found = pool.run(run_in_torch, str(path), form, schedule.placement.stages_of_rank, schedule.num_microbatches)

    expected = run_alone(schedule.num_stages, schedule.num_microbatches)
    assert {stage for of_rank in found for stage in of_rank} == set(expected)
    for stage, values in (item for of_rank in found for item in of_rank.items()):
        assert values == pytest.approx(expected[stage], rel=0, abs=1e-12), f"stage {stage}"


@pytest.mark.slow
@pytest.mark.parametrize("form", ["compute_only", "compute_comms"])
@pytest.mark.parametrize("name", [name for name in COUNTERPARTS if name in FAMILIES])
def test_torch_runs_the_families_that_it_has_as_well_with_its_lowering_and_with_ours(four_ranks, tmp_path, name, form):
    assert_torch_trains_it(four_ranks, tmp_path, build(name, ranks=4, microbatches=8), form)


@pytest.mark.feature("X38")
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in FAMILIES if fits_torch(name)])
def test_torch_runs_the_program_of_every_family_that_it_can_express(two_ranks, tmp_path, name):
    assert_torch_trains_it(two_ranks, tmp_path, build(name, ranks=2, microbatches=5), "compute_comms")


def test_torch_takes_a_slice_for_the_whole_microbatch():
    assert _Action.from_str("2F0.1") == _Action.from_str("2F0")
