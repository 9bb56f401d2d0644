"""Planning: what is wrong is said before anything runs, and a plan is proved."""

import importlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.errors import ConfigError, ScheduleError
from penstock.ir.instruction import Op
from penstock.ir.operations import IS_MESSAGE
from penstock.ir.program import Program
from penstock.lowering import Sharding, coalesce_messages, lower, post_receives_late
from penstock.planning import (
    RecentTables,
    few_microbatches,
    memory_demand,
    plan,
    predict_peaks,
    prove_and_lower,
    prove_and_lower_once,
    resolve_plan,
)
from penstock.proofs import Demand, check
from penstock.schedules import build
from penstock.simulation import Costs, LayerCosts
from tests.proofs.tables import schedule_of, without
from tests.support.strategies import feasible_schedules

COSTS = Costs.uniform(forward=1, backward_input=1, backward_weight=1)
BACKWARD_FIRST = schedule_of("0B0 0F0")


@pytest.mark.feature("0.9", "X1", "X44")
def test_a_plan_is_a_schedule_its_program_and_what_is_predicted_of_it():
    schedule = build("1f1b", ranks=4, microbatches=6)

    planned = plan(schedule, COSTS)

    assert planned.schedule is schedule
    assert planned.timeline.program is planned.program
    assert planned.timeline.source == "predicted"
    assert planned.timeline.makespan_s == pytest.approx((6 + 4 - 1) * 3)
    assert planned.timeline.peak_activations == [4, 3, 2, 1]


def test_a_schedule_that_cannot_run_or_needs_too_much_memory_is_not_planned():
    schedule = build("1f1b", ranks=4, microbatches=6)

    with pytest.raises(ScheduleError, match="0B0"):
        plan(BACKWARD_FIRST, COSTS)
    assert plan(schedule, COSTS, memory_limit="4 activations").timeline.peak_activations[0] == 4
    for limit in ("3 activations", [f"{most} activations" for most in (4, 3, 1, 1)]):
        with pytest.raises(ScheduleError):
            plan(schedule, COSTS, memory_limit=limit)


def test_costs_per_layer_are_those_of_the_layers_that_a_stage_has():
    schedule = build("1f1b", ranks=2, microbatches=2)
    layers = LayerCosts(activation_bytes=[1, 2, 4])

    demand = memory_demand("5 bytes", layers, schedule, [range(1), range(1, 3)])

    assert demand.costs.activation_bytes == (1, 6)
    with pytest.raises(ScheduleError, match="the limit of rank 1 is 5"):
        prove_and_lower(schedule, demand)
    assert memory_demand(None, None, schedule, []) == Demand()


@pytest.mark.feature("X23")
def test_tied_groups_and_the_optimizer_step_are_part_of_the_program():
    schedule = build("gpipe", ranks=2, microbatches=2)

    program = prove_and_lower(schedule, tied_groups=[(1, 0)], optimizer_step=True)
    plain = prove_and_lower(schedule)

    for rank in range(2):
        assert [instruction.op for instruction in program[rank]][-2:] == [Op.REDUCE_TIED, Op.OPTIMIZER_STEP]
        assert not {Op.REDUCE_TIED, Op.OPTIMIZER_STEP} & {instruction.op for instruction in plain[rank]}


def test_gathers_are_part_of_the_program():
    schedule = build("interleaved-1f1b", ranks=2, microbatches=4, stages_per_rank=2)
    sharding = Sharding("full", residency=1, look_ahead=0, units=((0, 2),))

    program = prove_and_lower(schedule, sharding=sharding)

    assert program == lower(schedule, shard="full", residency=1, look_ahead=0, units=[(0, 2)])
    assert plan(schedule, Costs.uniform(), shard="full", residency=1).program == lower(
        schedule, shard="full", residency=1
    )
    assert plan(schedule, Costs.uniform()).program == lower(schedule)


def test_a_lowering_with_too_many_whole_stages_is_refused(monkeypatch):
    schedule = build("interleaved-1f1b", ranks=2, microbatches=4, stages_per_rank=2)
    planning = importlib.import_module("penstock.planning")
    monkeypatch.setattr(planning, "lower", lambda table, **_: lower(table, shard="full", residency=2))

    with pytest.raises(ScheduleError, match="makes 2 stages whole at once; rank 0 may have 1"):
        prove_and_lower(schedule, sharding=Sharding("full", residency=1))
    prove_and_lower(schedule, sharding=Sharding("optimizer", residency=1))


def test_a_program_that_gathers_runs_as_it_is_and_one_that_does_not_is_refused_where_it_shall():
    schedule = build("interleaved-1f1b", ranks=2, microbatches=4, stages_per_rank=2)
    gathers, plain = lower(schedule, shard="full", residency=None), lower(schedule)
    full = Sharding("full", residency=1)

    assert prove_and_lower(gathers, sharding=full) is gathers
    assert prove_and_lower(gathers) is gathers
    with pytest.raises(ConfigError, match=r"never gathers stage 0, but shard='full' is given; lower its schedule with"):
        prove_and_lower(plain, sharding=full)
    with pytest.raises(ConfigError, match=r"gathers the stages \(\) together, but of the layers \(\(0, 2\),\) share"):
        prove_and_lower(gathers, sharding=Sharding("full", units=((0, 2),)))
    with pytest.raises(ConfigError, match="never gathers stage 0"):
        prove_and_lower(lower(schedule.forward_only()), sharding=full)


@pytest.mark.parametrize(
    ("text", "options", "words"),
    [
        (
            None,
            {"tied_groups": [(1, 0)]},
            r"reduces the tied groups \(\), but .* \(\(0, 1\),\); lower its schedule with",
        ),
        (None, {"optimizer_step": True}, "has no optimizer step, but .*; lower its schedule with optimizer_step=True"),
        ("0F0,0B0", {}, "omits the reductions of its gradients; lower its schedule with penstock.lower"),
    ],
    ids=["tied groups", "optimizer step", "reductions"],
)
def test_a_program_that_does_not_fit_the_model_is_refused_with_two_ways_out(text, options, words):
    program = lower(build("1f1b", ranks=2, microbatches=2)) if text is None else Program.from_csv(text)

    with pytest.raises(ConfigError, match=rf"schedule: the program .* {words}.*, or give the schedule itself"):
        prove_and_lower(program, **options)


@pytest.mark.feature("C1")
def test_messages_that_are_coalesced_are_in_groups_in_a_given_program_too():
    """Else the proof would take those between two computations for a group, and the step would launch each alone."""
    schedule = build("1f1b", ranks=3, microbatches=4)
    late = post_receives_late(lower(schedule, "coalesced"))
    grouped = coalesce_messages(late)

    assert prove_and_lower(late, messages="coalesced") == grouped != late
    assert prove_and_lower(grouped, messages="coalesced") is grouped
    assert prove_and_lower(late) is late


@pytest.mark.feature("H1")
@pytest.mark.parametrize("messages", ["posted", "coalesced", "rendezvous"])
def test_what_waits_on_the_host_counts_for_no_limit_and_a_program_says_it_by_itself(messages):
    schedule, limit = build("1f1b", ranks=4, microbatches=8), Demand.of("2 activations", None)

    program = prove_and_lower(schedule, limit, offload=[0, 1], messages=messages)

    assert check(program, messages).peak_activations == [2, 2, 2, 1]
    with pytest.raises(ScheduleError, match="the limit of rank 0 is 2"):
        prove_and_lower(schedule, limit, messages=messages)
    with pytest.raises(ScheduleError, match="the limit of rank 0 is 1"):
        prove_and_lower(schedule, Demand.of("1 activations", None), offload=[0, 1], messages=messages)
    with pytest.raises(ConfigError, match="says itself what waits on the host; leave it out") as error:
        prove_and_lower(program, offload=[0])
    assert error.value.key == "offload"


@pytest.mark.feature("C1")
@pytest.mark.parametrize("is_forward_only", [False, True])
def test_messages_with_gathers_between_them_are_proved_as_the_groups_that_run(is_forward_only):
    schedule = build("chimera", ranks=2, microbatches=2)
    schedule = schedule.forward_only() if is_forward_only else schedule

    program = prove_and_lower(schedule, sharding=Sharding("full", residency=1, look_ahead=0), messages="coalesced")

    assert ((program.group > 0) == IS_MESSAGE[program.op]).all()


@pytest.mark.slow
@given(schedule=feasible_schedules(), optimizer_step=st.booleans())
def test_one_plan_is_the_proofs_and_the_lowering_on_their_own(schedule, optimizer_step):
    program = prove_and_lower(schedule, optimizer_step=optimizer_step)

    assert program == lower(schedule, optimizer_step=optimizer_step)
    assert check(program).num_messages == check(schedule).num_messages


def test_a_lowering_that_goes_wrong_is_refused(monkeypatch):
    planning = importlib.import_module("penstock.planning")
    monkeypatch.setattr(planning, "lower", lambda *given, **named: without(lower(*given, **named), "0SEND_F0"))

    with pytest.raises(ScheduleError, match="1RECV_F0 has no send"):
        prove_and_lower(build("gpipe", ranks=2, microbatches=2))


def test_a_family_is_built_once_for_equal_options_and_anew_for_others():
    def resolved(name="interleaved-1f1b", microbatches=8, **options):
        return resolve_plan(name, ranks=4, microbatches=microbatches, stages_per_rank=2, options=options)

    first = resolved()

    assert resolved() is first
    others = [resolved(microbatches=4), resolved("looped-bfs"), resolved(recompute=True)]
    assert all(other != first for other in others)
    assert resolved(recompute=True) is others[-1]
    with pytest.raises(ConfigError, match="recompute"):
        resolved(recompute=[])
    with pytest.raises(ConfigError):
        resolved(recompute=1.0)  # equal to True, but not alike


def test_an_equal_plan_is_proved_once_for_an_object_that_keeps_programs_and_any_other_one_anew():
    one, equal = (build("1f1b", ranks=3, microbatches=5) for _ in range(2))
    first = prove_and_lower_once(one)

    assert prove_and_lower_once(equal) is first
    assert first == prove_and_lower(one)
    own = RecentTables()
    kept = prove_and_lower_once(one, programs=own)
    assert prove_and_lower_once(equal, programs=own) is kept is not first
    others = [
        prove_and_lower_once(build("1f1b", ranks=3, microbatches=6)),
        prove_and_lower_once(one.forward_only()),
        prove_and_lower_once(one, tied_groups=[(0, 2)]),
        prove_and_lower_once(one, optimizer_step=True),
        prove_and_lower_once(first),
    ]
    assert [other == first for other in others] == [False] * 4 + [True]
    for num_microbatches in range(1, 20):
        prove_and_lower_once(build("gpipe", ranks=2, microbatches=num_microbatches))
    assert prove_and_lower_once(equal) is not first  # only the last ones are kept
    with pytest.raises(ScheduleError):
        prove_and_lower_once(one, Demand.of("1 activations", COSTS))


def test_only_the_last_small_tables_are_kept():
    tables = [build("gpipe", ranks=2, microbatches=number) for number in (1, 2, 3, 4)]
    recent, made = RecentTables(most=2, most_rows=tables[2].num_rows), []

    def once(index):
        return recent.once((index,), lambda: made.append(index) or tables[index])

    for index in (0, 1, 0, 2, 2, 0):  # 1 was used last before 0 and 2
        assert once(index) is tables[index]
    assert made == [0, 1, 2]
    for index in (1, 3, 3):
        once(index)
    assert made == [0, 1, 2, 1, 3, 3]  # the last one is large


@pytest.mark.feature("A15")
def test_a_name_is_built_for_the_ranks_that_run_and_a_schedule_is_taken_as_it_is():
    schedule = build("gpipe", ranks=2, microbatches=4)

    eager = resolve_plan("1f1b", ranks=3, microbatches=5, options={"warmup": "eager"})
    assert eager == build("1f1b", ranks=3, microbatches=5, warmup="eager")
    assert resolve_plan("gpipe", ranks=2, options={}) == build("gpipe", ranks=2, microbatches=8)
    for shape in ({}, {"microbatches": 4}, {"stages_per_rank": 1}):
        assert resolve_plan(schedule, ranks=2, options={}, **shape) is schedule


@pytest.mark.parametrize("as_text", [True, False])
def test_a_file_is_read(tmp_path, as_text):
    schedule = build("1f1b", ranks=2, microbatches=4)
    file = tmp_path / "mine.csv"
    file.write_text(schedule.to_csv())

    found = resolve_plan(str(file) if as_text else file, ranks=2, options={})

    assert found == schedule


WHOLE = build("gpipe", ranks=2, microbatches=2)


@pytest.mark.parametrize(
    ("schedule", "given", "text"),
    [
        ("1f1", {}, "Did you mean '1f1b'"),
        ("1f1b", {"options": {"warmpu": "eager"}}, "Did you mean 'warmup'"),
        (WHOLE, {"microbatches": 4}, "microbatches: 4, but gpipe is for 2 microbatches; make them equal"),
        (WHOLE, {"ranks": 3}, "is for 2 ranks, but 3 run"),
        (WHOLE, {"options": {"backward_order": "descending"}}, "takes no options"),
        (WHOLE, {"stages_per_rank": 2}, "stages_per_rank: 2, but gpipe has 2 stages on 2 ranks; leave it out"),
        ("nowhere.csv", {}, r"nowhere\.csv"),
    ],
    ids=["name", "option", "microbatches", "ranks", "option of a whole schedule", "stages", "missing file"],
)
def test_a_wrong_schedule_is_one_clear_error(schedule, given, text):
    with pytest.raises(ConfigError, match=text):
        resolve_plan(schedule, **{"ranks": 2, "microbatches": 2, "options": {}} | given)


@pytest.mark.feature("B22")
def test_fewer_microbatches_than_stages_are_told_with_the_bubble_that_they_cost():
    advice = few_microbatches(prove_and_lower(build("1f1b", ranks=4, microbatches=2)))

    assert advice.startswith("2 microbatches for 4 stages leave ranks idle for 60% of a step")
    assert advice.endswith("use 4 or more")


ENOUGH = {
    "one per stage": {"name": "1f1b", "ranks": 4, "microbatches": 4},
    "one rank": {"name": "1f1b", "ranks": 1, "microbatches": 1},
    "one rank with more stages than microbatches": {
        "name": "interleaved-1f1b",
        "ranks": 1,
        "microbatches": 2,
        "stages_per_rank": 4,
    },
    "slices count as microbatches": {"name": "seq1f1b", "ranks": 4, "microbatches": 2, "slices": 2},
    "each of two routes has its own stages": {"name": "chimera", "ranks": 4, "microbatches": 4},
}


@pytest.mark.parametrize("shape", ENOUGH.values(), ids=ENOUGH)
def test_enough_microbatches_are_nothing_to_tell(shape):
    assert few_microbatches(prove_and_lower(build(**shape))) is None


def test_predicted_bytes_of_shards_are_their_part_and_what_is_gathered():
    schedule = build("1f1b", ranks=2, microbatches=2)
    sizes = {"parameter_bytes": [80, 40], "gradient_bytes": [80, 40], "optimizer_bytes": [160, 80]}
    layers = (range(1), range(1, 2))

    assert predict_peaks(lower(schedule), layers, sizes) == (320, 160)
    assert predict_peaks(lower(schedule, shard="full"), layers, sizes, shards=4) == (80 + 160, 40 + 80)
