"""A mistake of one rank reaches the others at once, and leaves the process group usable."""

import os
import signal
import threading

import pytest
import torch.distributed as dist
from torch import nn

import penstock as ps
from penstock.errors import ConfigError, DeadlineExceeded, PeerLost, PenstockError
from penstock.execute.control.collectives import Control
from penstock.execute.joining import join
from penstock.execute.transport import LocalTransport
from tests.execute.test_options import WRONG
from tests.support.local_pipelines import error_of, float_task, on_ranks, step_task
from tests.support.mesh_pipelines import on_mesh
from tests.support.ranks import run_ranks

TASK = float_task(8)
LONGEST_S = 100.0
DEADLINE_S = 10 * LONGEST_S
"""No wait of a test comes to it, so whoever hears of a mistake hears of it at once."""

MISTAKES = {key: {key: values[0]} for key, values in WRONG.items()} | {
    "layers": {"layers": [1, 2]},
    "layers that cannot be built": {"layers": [lambda: 1 / 0] * 5},
    "schedule": {"schedule": "1f1bb"},
    "microbatches": {"microbatches": 0},
    "loss": {"loss": "mse"},
    "stages_per_rank": {"stages_per_rank": 3},
    "split": {"split": [9]},
    "process_group": {"process_group": "pipeline"},
    "group": {"group": "pipeline"},
    "ranks": {"ranks": 3},
    "ranks that are no number": {"ranks": "all"},
    "unknown": {"deadlin_s": 3},
    "deadline_s without an end": {"deadline_s": 1e15},
    "weights": {"weights": [1]},
    "reduction": {"reduction": "average"},
    "scale_loss": {"scale_loss": 0},
    "compile": {"compile": "nonesuch"},
    "costs": {"costs": "x"},
    "observers": {"observers": [1]},
    "slices": {"slices": 0},
    "memory_limit": {"memory_limit": 0},
    "frees_other_stages": {"frees_other_stages": "x"},
    "layers without a shape": {"layers": [nn.LazyLinear(6) for _ in range(5)]},
}


def make(mistake=None, **options):
    given = {"layers": TASK.make_layers(), "schedule": "1f1b", "microbatches": 2, "loss": TASK.loss, **options}
    given |= MISTAKES[mistake] if mistake else {}
    return ps.Pipeline(given.pop("layers"), given.pop("schedule"), **given)


def with_mistakes_of_one_rank(rank, wrong_rank, mistakes):
    found = {}
    for mistake in mistakes:
        error = error_of(make, mistake if rank == wrong_rank else None, deadline_s=DEADLINE_S, main_gradients=True)
        found[mistake] = type(error), str(error)
    return found, step_task(make(deadline_s=DEADLINE_S), TASK).result.loss.item()


@pytest.mark.feature("0.2")
@pytest.mark.slow
@pytest.mark.parametrize("wrong_rank", [0, 1])
def test_each_argument_wrong_on_one_rank_is_told_on_both_and_the_next_pipeline_works(wrong_rank):
    outcomes = run_ranks(2, with_mistakes_of_one_rank, wrong_rank, list(MISTAKES), timeout_s=LONGEST_S)

    (own, loss), (other, other_loss) = outcomes[wrong_rank], outcomes[1 - wrong_rank]
    for mistake in MISTAKES:
        (kind, text), (other_kind, other_text) = own[mistake], other[mistake]
        assert issubclass(kind, PenstockError) or mistake == "layers that cannot be built", mistake
        assert other_kind is ConfigError, (mistake, other_text)
        assert other_text.startswith(f"rank {wrong_rank}: "), mistake
        assert text in other_text, mistake
    assert loss == other_loss == TASK.reference(2)[0].loss.item()


def comes_too_late(rank):
    """The second rank fails before it makes its first two pipelines."""
    errors = [] if rank else [type(error_of(make, deadline_s=0.5)) for _ in range(2)]
    dist.barrier()
    for _ in range(2):
        pipeline = make(deadline_s=DEADLINE_S)
        loss = step_task(pipeline, TASK).result.loss.item()
        pipeline.close()
    return errors, loss


@pytest.mark.slow
def test_a_rank_that_missed_a_construction_meets_the_others_in_the_next():
    (errors, loss), (none, other_loss) = run_ranks(2, comes_too_late)

    assert (errors, none) == ([DeadlineExceeded] * 2, [])
    assert loss == other_loss == TASK.reference(2)[0].loss.item()


def joins_another_group(rank):
    group = dist.new_group([0, 1])
    return type(error_of(make, process_group="pipeline" if rank else group, deadline_s=2.0))


@pytest.mark.slow
def test_a_rank_with_a_wrong_group_hears_what_is_wrong_though_the_others_met_in_theirs():
    assert run_ranks(2, joins_another_group) == [DeadlineExceeded, ConfigError]


def is_interrupted_at_first(rank):
    """Ctrl-C comes to rank 0 in its first construction, to which rank 1 comes later."""
    error = None
    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run in the background
        try:
            threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
            make(deadline_s=DEADLINE_S)
        except KeyboardInterrupt as raised:
            error = raised
    dist.barrier()
    pipeline = make(deadline_s=DEADLINE_S)
    return type(error), step_task(pipeline, TASK).result.loss.item()


@pytest.mark.slow
def test_ctrl_c_ends_a_construction_at_once_and_the_next_one_works():
    (kind, loss), (_, other_loss) = run_ranks(2, is_interrupted_at_first, timeout_s=LONGEST_S)

    assert kind is KeyboardInterrupt
    assert loss == other_loss == TASK.reference(2)[0].loss.item()


def test_wrong_options_give_way_to_the_defaults_until_all_ranks_have_heard_of_them():
    wires = LocalTransport.create(1, 1.0)[0]

    joined = join("x", {"transport": wires, "seed": -1, "warmup": 3, "messages": "coalesced"})

    assert joined.transport is wires
    assert joined.options.seed is None
    assert joined.options.coalesces  # as the other ranks, with which it could not connect a device otherwise
    assert isinstance(error_of(joined.together, list), ConfigError)
    assert str(error_of(make, ranks=2)) == (
        "ranks: 2, but the pipeline has 1 rank here; start them with torchrun --nproc-per-node 2, or leave it out"
    )


def test_a_mesh_goes_without_what_says_otherwise_which_ranks_there_are():
    def case(places):
        return error_of(make, mesh=places, transport=LocalTransport.create(1, 1.0)[0], reduce_stage=reduce_nothing)

    for error in on_mesh(1, 2, case):
        assert type(error) is ConfigError
        assert "mesh: it goes without a transport and reduce_stage: the mesh says which ranks there are" in str(error)


def test_an_error_of_one_rank_alone_ends_the_waits_of_the_others():
    def case(wires):
        joined = join(None, {"transport": wires})
        with joined.leaving_on_failure():
            if wires.rank:
                raise ZeroDivisionError
            Control(wires).all_gather_object("here")

    first, second = on_ranks(2, lambda wires: error_of(case, wires), deadline_s=DEADLINE_S)

    assert isinstance(first, PeerLost)  # not DeadlineExceeded
    assert isinstance(second, ZeroDivisionError)


def reduce_nothing(stage):
    """Stand for an average over replicas."""


def make_alone(rank, options):
    groups = [dist.new_group([each]) for each in range(2)]
    try:
        with make(process_group=groups[rank], **options) as pipeline:
            has_loss = options.get("loss", True) is not None
            return pipeline.transport.num_ranks, step_task(pipeline, TASK).result.loss.item() if has_loss else None
    except ConfigError as error:
        return str(error)


@pytest.mark.slow
def test_separate_models_are_refused_unless_they_are_asked_for_or_averaged():
    advice = "Pass process_group=None for one pipeline of all ranks, or ranks=1 if separate models are what you want"
    alone = f"process_group: it has this rank alone, so each of the 2 ranks would train a separate model. {advice}"
    loss = TASK.reference(2)[0].loss.item()

    averaged = {"reduce_stage": reduce_nothing}
    cases = [({}, alone), ({"ranks": 1}, (1, loss)), (averaged, (1, loss)), ({"loss": None}, (1, None))]
    for options, expected in cases:
        assert run_ranks(2, make_alone, options) == [expected] * 2
