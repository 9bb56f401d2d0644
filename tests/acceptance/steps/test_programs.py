"""Programs that a caller made, read or edited run as they are, if they are proved and fit the model."""

import random
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import penstock as ps
from penstock.errors import ConfigError, DeadlineExceeded, PipelineError, ScheduleError
from penstock.ir.program import Program
from penstock.lowering import add_messages, assign_slots
from penstock.pipeline import Pipeline
from penstock.schedules import FAMILIES
from tests.proofs.machine import verdict
from tests.proofs.tables import edited, find, schedule_of
from tests.proofs.test_transports import HEAD_TO_HEAD, with_reductions
from tests.support.local_pipelines import (
    difference,
    error_of,
    float_layers,
    float_task,
    on_pipelines,
    on_ranks,
    pipeline_of,
    run_task,
    same_outcomes,
    second_step,
    step_task,
)
from tests.support.mutated_programs import REORDERINGS, mutated

FLOAT64 = torch.float64
SHAPES = [("1f1b", {}), ("zb-h1", {}), ("zbv", {}), ("interleaved-1f1b", {"stages_per_rank": 2}), ("dualpipe-v", {}),
          ("looped-bfs", {"stages_per_rank": 2})]  # fmt: skip


def late(program):
    """Receives are right before the computation that needs them, a little later than lowering puts them."""

    def move(orders):
        for order in orders:
            for row in [row for row in order if row.op.is_receive]:
                name = "F" if "RECV_F" in str(row) else "B"
                names = [f"{row.stage}{letter}{row.microbatch}" for letter in (name, "I" if name == "B" else name)]
                order.remove(row)
                order.insert(next(at for at, other in enumerate(order) if str(other) in names), row)

    return assign_slots(edited(program, move))


@pytest.mark.slow
@pytest.mark.parametrize(("name", "options"), SHAPES, ids=[name for name, _ in SHAPES])
def test_a_program_gives_the_bits_of_its_schedule(name, options, tmp_path):
    schedule = ps.build(name, ranks=2, microbatches=4, **options)
    task = float_task(8)
    expected = on_ranks(2, run_task, task, schedule, None)
    program = ps.lower(schedule)
    (tmp_path / "program.json").write_text(program.to_json())
    (tmp_path / "program.csv").write_text(program.to_csv())
    plans = [program, ps.lower(schedule, transport="coalesced"), str(tmp_path / "program.json")]
    if name in ("1f1b", "zb-h1"):
        plans.append(late(program))
        assert late(program) != program
    if name == "1f1b":
        plans.append(Path(tmp_path / "program.csv"))  # without the placement, which CSV holds only for one stage a rank

    for plan in plans:
        assert same_outcomes(on_ranks(2, run_task, task, plan, None), expected)


@pytest.mark.feature("B10")
def test_what_runs_is_the_program_itself_and_an_evaluation_plans_its_own():
    task = float_task(8)
    program = late(ps.lower(ps.build("1f1b", ranks=2, microbatches=4)))

    def run(pipeline):
        step = pipeline.step(*task.inputs, target=task.target, record=True)
        evaluation = pipeline.evaluate(*task.inputs, target=task.target)
        return pipeline.program is program, pipeline.schedule, step.loss, evaluation.loss

    for is_given, schedule, loss, evaluated in on_pipelines(2, task, run, program, None):
        assert is_given
        assert schedule == ps.build("1f1b", ranks=2, microbatches=4)
        assert torch.equal(loss, evaluated)


# ---- what is refused, before any step


def refusal(program, **options):
    """What every rank says."""
    task = float_task(8)

    def run(wires):
        return error_of(Pipeline, task.make_layers(), program, loss=task.loss, transport=wires, **options)

    errors = on_ranks(2, run)
    assert len({(type(error), str(error)) for error in errors}) <= 2  # the first rank's own, and what others say of it
    return errors[0]


def without_reductions(schedule):
    return assign_slots(add_messages(Program.from_schedule(schedule)))


def test_programs_that_do_not_fit_are_refused_in_one_message():
    schedule = ps.build("1f1b", ranks=2, microbatches=4)
    told = {
        "omits the reductions of its gradients; lower its schedule": refusal(without_reductions(schedule)),
        "is for 3 ranks, but 2 run": refusal(ps.lower(ps.build("1f1b", ranks=3, microbatches=4))),
        "microbatches: 8, but 1f1b is for 4 microbatches": refusal(ps.lower(schedule), microbatches=8),
        "reduces the tied groups ((0, 1),), but the layers tie the stages ()": refusal(
            ps.lower(schedule, tied_groups=[(0, 1)])
        ),
        "has no optimizer step, but optimizer_step or a GradScaler is given": refusal(
            ps.lower(schedule), optimizer_step=lambda: None
        ),
    }

    for words, error in told.items():
        assert isinstance(error, ConfigError)
        assert words in str(error)


@pytest.mark.feature("X1")
def test_a_program_that_cannot_run_is_refused_with_its_proof():
    program = ps.lower(ps.build("1f1b", ranks=2, microbatches=4))
    rank, at = find(program, "0SEND_F0")
    broken = edited(program, lambda orders: orders[rank].insert(len(orders[rank]) - 1, orders[rank].pop(at)))

    error = refusal(broken)

    assert isinstance(error, ScheduleError)
    assert "a channel keeps its order" in str(error)


def test_what_both_transports_run_is_not_held_to_other_models():
    """Both ranks send before either receives: posting never blocks here."""
    program = replace(HEAD_TO_HEAD, omits_reductions=True)
    whole = ps.lower(schedule_of("0F0 0F1 0B0 0B1\n1F0 1B0 1F1 1B1"))
    orders = [[*program[rank], whole[rank][-1]] for rank in range(2)]
    task = float_task(4)

    outcomes = on_ranks(
        2, run_task, task, assign_slots(edited(whole, lambda old: old.__setitem__(slice(None), orders))), None
    )

    assert difference(outcomes, task.reference(2), tolerance=1e-6, loss_tolerance=1e-6) == []


def test_a_program_that_is_edited_on_one_rank_only_is_refused_at_once():
    program = ps.lower(ps.build("1f1b", ranks=2, microbatches=4))
    task = float_task(8)

    def run(wires):
        return error_of(pipeline_of, wires, task, late(program) if wires.rank else program, None)

    begin_s = time.monotonic()
    errors = on_ranks(2, run, deadline_s=60.0)

    assert time.monotonic() - begin_s < 30  # no wait runs into its deadline
    assert {type(error) for error in errors} == {PipelineError}
    assert all("the ranks disagree on schedule: rank 0 has Program('1f1b'" in str(error) for error in errors)


# ---- tied stages exchange their gradients on the channels of the pipeline


def tied_layers(*, pair, num_layers=4):
    """Layers of which two share a weight."""
    layers = float_layers(FLOAT64, num_layers)
    one, other = pair
    layers[other][1].weight = layers[one][1].weight
    return layers


@pytest.mark.parametrize(("first", "second"), [("2B0", "3SEND_B0"), ("2SEND_B0", "1RECV_B0"), ("0B0", "1SEND_B0")])
def test_a_tied_reduction_between_messages_gets_its_own_values(first, second):
    """Also in the first step, in which messages are taken from their channel only when they are needed."""
    task = replace(float_task(2, FLOAT64), make_layers=partial(tied_layers, pair=(2, 3)))
    program = with_reductions(first, second)

    outcomes = on_pipelines(2, task, lambda pipeline: second_step(pipeline, task), program, None)

    assert wrong_gradients(outcomes, task.reference(1)) == []


def wrong_gradients(outcomes, expected):
    _, gradients = expected
    return [
        (rank, name)
        for rank, outcome in enumerate(outcomes)
        for name, found in outcome.gradients.items()
        if not torch.allclose(found, gradients[name], rtol=1e-12, atol=1e-12)
    ]


# ---- changed programs do on ranks what the proof says


def random_training(chance):
    """A task, the number of its ranks, and the program of a random family for it."""
    while True:
        family = chance.choice([family for family in FAMILIES.values() if family.name != "forward-only"])
        num_ranks, num_microbatches = chance.choice([2, 2, 3]), chance.randint(1, 4)
        try:
            schedule = ps.build(
                family.name,
                ranks=num_ranks,
                microbatches=num_microbatches,
                stages_per_rank=chance.choice([None, *(count or 2 for count in family.stages_per_rank)]),
            )
        except ConfigError:
            continue
        num_layers = max(len(route) for route in schedule.placement.routes)
        pair = sorted(chance.sample(range(num_layers), 2)) if num_layers > 1 and chance.random() < 0.5 else (0, 0)
        make_layers = partial(tied_layers, pair=pair, num_layers=num_layers)
        task = replace(float_task(2 * num_microbatches, FLOAT64), make_layers=make_layers)
        return task, num_ranks, schedule


def hung(wires, task, good, program):
    """What a step says in which a program runs that no pipeline would take, so it is put in by hand."""
    pipeline = Pipeline(task.make_layers(), good, loss=task.loss, transport=wires)
    programs = SimpleNamespace(of=lambda key, is_planned=False: program, planned=tuple)
    session = replace(pipeline._runner.session, programs=programs)
    pipeline._runner._programs._session = session
    wires.deadline_s = 0.4
    return error_of(step_task, pipeline, task)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_changed_programs_train_or_hang_as_the_proof_says(seed, is_full):
    """500 of them in `make test-full`."""
    chance, counts = random.Random(seed), Counter()
    while counts.total() < (50 if is_full else 3):
        task, num_ranks, schedule = random_training(chance)
        good = on_pipelines(num_ranks, task, lambda pipeline: pipeline.program, schedule, None)[0]
        program = mutated(good, chance, REORDERINGS).program
        judged = verdict(program, "posted")
        if judged == "ends":
            outcomes = on_ranks(num_ranks, run_task, task, program, None)
            assert wrong_gradients(outcomes, task.reference(schedule.num_microbatches)) == [], program.to_csv()
        elif judged == "hangs":
            assert not passes_posted(program)
            errors = on_ranks(num_ranks, hung, task, good, program)
            assert any(isinstance(error, DeadlineExceeded) for error in errors), f"{errors}\n{program.to_csv()}"
        counts[judged] += judged != "wrong"


def passes_posted(program):
    try:
        ps.check(program)
    except ScheduleError:
        return False
    return True
