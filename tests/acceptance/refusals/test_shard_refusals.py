"""What sharded pipelines do not take is one message on every rank, at once; and a step after a refused one is right."""

import time

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.lowering import lower
from tests.acceptance.replicas.test_torch_gathers import placed_by_torch
from tests.support.local_pipelines import WIDTH, block, error_of, float_layers, settle, square_loss
from tests.support.mesh_pipelines import (
    FLOAT,
    MICROBATCHES,
    Job,
    Rows,
    assert_near,
    gradients_of_steps,
    on_mesh,
    pipeline_of,
    whole,
)
from tests.support.sharded_pipelines import ALL, NONE, ONE, OPTIMIZER, TWO, compared, name_of, settings, ways

DEADLINE_S = 60.0


def refused(make, kind=ps.ConfigError, pipeline=2, data=2):
    """The words with which every rank is refused at construction, all of one kind and at once."""

    def case(places):
        begin_s = time.monotonic()
        return error_of(make, places), time.monotonic() - begin_s

    ranks = on_mesh(pipeline, data, case, deadline_s=DEADLINE_S)
    for error, took_s in ranks:
        assert type(error) is kind, error
        assert took_s < DEADLINE_S / 2
    return [str(error) for error, _ in ranks]


def made(places, schedule="interleaved-1f1b", layers=None, **options):
    layers = float_layers(FLOAT, 8) if layers is None else layers
    return ps.Pipeline(layers, schedule, MICROBATCHES, square_loss, mesh=places, deadline_s=DEADLINE_S, **options)


# ---- settings


@pytest.mark.parametrize(
    ("odd", "usual"),
    [(ONE, TWO), (OPTIMIZER, ALL), (NONE, ONE), (TWO, TWO | {"look_ahead": 0}), (ALL, ONE | {"look_ahead": 1})],
    ids=name_of,
)
@pytest.mark.parametrize("bad", [pytest.param(0, marks=pytest.mark.full), 3])
def test_ranks_with_other_settings_are_refused(odd, usual, bad):
    texts = refused(lambda places: made(places, **(odd if places.index == bad else usual)), ps.PipelineError)

    for text in texts:
        assert f"the ranks disagree on shard: rank {0 if bad else 1} (" in text
        assert f", rank {bad} (" in text


def test_a_setting_that_is_wrong_on_one_rank_is_refused_by_all():
    def make(places):
        return made(places, **(TWO | ({"residency": 0} if places.index == 2 else {})))

    for text in refused(make):
        assert "residency: 0 of type int; expected 1 or more stages" in text


# ---- layers


def hook_one(layers):
    return layers[6][1].weight.register_hook(lambda gradient: gradient * 2).remove


def hook_after(layers):
    return layers[6][1].weight.register_post_accumulate_grad_hook(lambda parameter: None).remove


@settings(ONE, OPTIMIZER)
def test_lazy_parameters_are_refused(setting):
    layers = [*float_layers(FLOAT, 6), nn.Sequential(nn.LazyLinear(WIDTH, dtype=FLOAT)), block(3, FLOAT)]

    for text in refused(lambda places: made(places, layers=list(layers), **setting)):
        assert "lazy" in text.lower() or "no shape" in text


@ways("hook setting bad", (hook_one, ONE, None), (hook_after, OPTIMIZER, 3))
def test_hooks_of_parameters_are_refused(hook, setting, bad):
    def make(places):
        layers = float_layers(FLOAT, 8)
        if bad in (None, places.index):
            hook(layers)
        return made(places, "1f1b", layers=layers, **setting)

    for text in refused(make):
        assert "hook" in text
        assert "6.1.weight" in text


def between(change, setting, *, bad):
    """Errors of a step before which some ranks changed something; `change(layers)` returns what takes it back."""
    job = Job([8, 8])

    def case(places):
        layers = job.make_layers()
        with made(places, "1f1b", layers=layers, **setting) as own:
            inputs, target = job.of(own.replica)
            own.step(inputs, target=target)
            undo = change(layers) if bad in (None, places.index) else lambda: None
            begin_s = time.monotonic()
            error = error_of(own.step, inputs, target=target)
            took_s = time.monotonic() - begin_s
            undo()
            own.step(inputs, target=target)
            return error, took_s, Rows(own)

    ranks = on_mesh(2, 2, case, deadline_s=DEADLINE_S)

    assert all(took_s < DEADLINE_S / 2 for _, took_s, _ in ranks)
    assert_near(whole([rows for *_, rows in ranks], 2), gradients_of_steps(job, [1, 1]))
    return [error for error, *_ in ranks]


def replace_one(layers):
    return replaced(layers[6][1], "weight", lambda: nn.Parameter(torch.zeros(WIDTH, WIDTH, dtype=FLOAT)))


def replace_a_module(layers):
    return replaced(layers[6], "1", lambda: settle(nn.Linear(WIDTH, WIDTH, dtype=FLOAT), 1))


@ways(
    "change words bad setting",
    (replace_one, "6.1.weight", None, ONE),
    (replace_a_module, "6.1.weight", 1, OPTIMIZER),
    (hook_one, "hook", 1, ONE),
    (hook_after, "hook", None, OPTIMIZER),
)
def test_parameters_that_change_between_steps_are_refused_by_all_and_the_next_step_is_right(
    change, words, bad, setting
):
    """Stage 1 of rank 1 and 3 has the layer; the others would find nothing by themselves."""
    errors = between(change, setting, bad=bad)

    assert len({type(error) for error in errors}) == 1
    for error in errors:
        assert isinstance(error, ps.PenstockError)
        assert words in str(error), error


# ---- programs


@pytest.mark.parametrize(("schedule", "setting"), [("zbv", NONE), ("zb-h1", ONE)], ids=name_of)
def test_a_given_program_with_gathers_trains_shards_and_replicas_too(schedule, setting):
    program = lower(ps.build(schedule, ranks=2, microbatches=MICROBATCHES), **ONE)

    assert compared(2, 2, Job([8, 8]), program, **setting) == []


@ways("schedule setting", ("zbv", ONE), slow=[("interleaved-1f1b", TWO), ("looped-bfs", ALL)])
def test_a_program_with_torchs_placement_runs_as_it_is(schedule, setting):
    schedule = ps.build(schedule, ranks=2, microbatches=MICROBATCHES)
    theirs = placed_by_torch(schedule)
    job = Job([8, 8])

    def case(places):
        with pipeline_of(places, job, theirs, **setting) as own:
            return own.program.digest()

    assert set(on_mesh(2, 2, case)) == {theirs.digest()}
    assert compared(2, 2, job, theirs, **setting) == []


def replaced(container, name, make):
    """Put another one in place of what a container has under a name; return what takes it back."""
    before = getattr(container, name)
    setattr(container, name, make())
    return lambda: setattr(container, name, before)
