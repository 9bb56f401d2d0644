"""A diagnosis in words: figures with their units, tables that add up, and the same as JSON."""

import json
import re
from dataclasses import replace

import pytest

from penstock.cli.diagnosis import to_json, to_text
from penstock.ir.measured import ImmediateWeights
from penstock.schedules import build
from penstock.searching.what_if import Setting
from penstock.simulation import Costs
from penstock.simulation.causes import Cause
from penstock.train.watching.diagnosis import diagnose
from tests.cli.recorded_steps import recorded_step

CAUSES = "the step without each cause, and the idle time that has it (one wait can hide another)"
HELPS = "what would help, each simulated"
SETTING = Setting(batch_size=16, family="1f1b", stages_per_rank=1)


def diagnosis_of(setting=SETTING, **step):
    return diagnose(recorded_step(**step), setting)


def sections(text):
    """Blocks of lines between empty ones, by their first line."""
    blocks = [block.split("\n") for block in text.split("\n\n")]
    return {block[0]: block[1:] for block in blocks}


def test_the_first_block_says_what_was_measured_and_predicted():
    lines = to_text(diagnosis_of()).split("\n")[:4]

    assert lines == [
        "step 20: 1f1b, 4 ranks, 4 stages, 8 microbatches, split 4,4,4,4",
        "measured:   makespan 33.0 s, bubble 27.3 %, and 3.00 s before its first computation",
        "predicted:  makespan 33.0 s, bubble 27.3 % (+0.0 %)",
        "largest cause: dependency, 25.0 % of the step (the order of 1f1b); "
        "then data loading, 2.8 % of the step (rank 0)",
    ]


def test_what_waiting_for_replicas_cost_is_told_where_there_are_several():
    """The last computation ends at 36 s, and the sums on rank 0 at 38; a third second is before the step."""
    recorded = replace(recorded_step(reduce_s=(2.0,)), num_replicas=3)
    diagnosis = diagnose(recorded, SETTING)

    lines = to_text(diagnosis).split("\n")

    assert lines[0] == "step 20: 1f1b, 3 replicas of 4 ranks, 4 stages, 8 microbatches, split 4,4,4,4"
    assert lines[3] == (
        "replicas:   the step waits for them 2.00 s behind its last computation (rank 0), 5.3 % of it, and rank 0 "
        "0.00 s between computations"
    )
    found = json.loads(to_json(diagnosis))
    assert found["replicas"] == 3
    assert found["waits_for_replicas"] == {"within_s": 0.0, "within_rank": 0, "behind_s": 2.0, "behind_rank": 0}
    alone = diagnosis_of(reduce_s=(2.0,))
    assert "replicas" not in to_text(alone)
    assert json.loads(to_json(alone))["waits_for_replicas"] is None


def test_idle_times_of_a_rank_add_up_in_its_row_and_the_largest_cause_is_the_first():
    rows = sections(to_text(diagnosis_of(late_s=6.0)))["idle time of each rank by its cause, in s"]

    assert " ".join(rows[0].split()) == "rank dependency straggler launch synchronisation data loading idle"
    for row in rows[2:]:
        *causes, idle = (float(figure) for figure in row.split()[1:])
        assert sum(causes) == pytest.approx(idle, abs=0.003)
    assert rows[-1].split()[0] == "all"
    assert float(rows[3].split()[2]) == 6.0
    for step in ({"late_s": 60.0}, {"forward_s": (1.0, 1.0, 1.0, 2.0)}):
        text = to_text(diagnosis_of(**step))
        share, cause = re.match(r" *-([\d.]+ %) +[\d.]+ %  (\w+)", sections(text)[CAUSES][2]).groups()
        assert f"\nlargest cause: {cause}, {share} of the step" in text


def test_causes_that_cost_next_to_nothing_have_no_line():
    rows = sections(to_text(diagnosis_of(late_s=6.0)))[CAUSES]

    assert [re.split(r"  +", row.strip()) for row in rows[2:]] == [
        ["-21.4 %", "33.3 %", "dependency", "the order of 1f1b"],
        ["-14.3 %", "33.3 %", "straggler", "rank 1, late for the step"],
        ["-2.4 %", "5.6 %", "data loading", "rank 1"],
        ["-2.4 %", "22.2 %", "synchronisation"],
        ["+0.0 %", "5.6 %", "launch"],
    ]


def test_a_memory_limit_is_a_cause_in_both_tables_and_costs_the_same_order_nothing():
    diagnosis = diagnose(recorded_step(), SETTING, memory_limit=4)

    found = sections(to_text(diagnosis))

    assert "memory limit" in found["idle time of each rank by its cause, in s"][0]
    [row] = [line for line in found[CAUSES] if "memory limit" in line]
    share, of_idle, _ = re.split(r"  +", row.strip())
    assert share == "+0.0 %"
    idle = diagnosis.idle
    assert of_idle == f"{100 * idle.total(Cause.MEMORY) / idle.by_rank.sum():.1f} %" != "0.0 %"


def test_changes_that_help_are_listed_with_their_price_in_memory_and_of_schedules_no_more_than_six():
    block = sections(to_text(diagnosis_of()))[HELPS]

    assert block[0].split() == ["step", "memory", "change", "how"]
    assert "-18.2 % +0.0 % zb-h1 --set pipeline.schedule=zb-h1" in [" ".join(line.split()) for line in block]
    assert len([line for line in block[2:] if "pipeline.schedule" in line]) == 6


def test_changes_that_save_less_than_two_percent_or_are_paid_with_memory_are_apart():
    found = sections(to_text(diagnosis_of()))

    second = [line.split() for line in found["what would help with a second copy of the weights, each simulated"][2:]]
    assert {row[4] for row in second} >= {"chimera", "dualpipe"}
    costly = found["what would help, but takes much more memory, each simulated"][2:]
    for line in (*found[HELPS][2:], *costly):
        saved, _, memory, *_ = line.split()
        assert float(saved) <= -2
        assert (float(memory) <= -2 * float(saved)) == (line not in costly)
        assert "chimera" not in line


def test_assumptions_behind_a_change_are_told_where_it_is_listed():
    text = to_text(diagnosis_of(forward_s=(1.0, 1.0, 1.0, 2.0)))
    measured = to_text(diagnose(recorded_step(), SETTING, profiled=Costs.uniform(backward=2.0)))

    assert "move one layer from stage 3 to stage 2" in text
    assert (
        "\n  a stage's measured seconds are shared among its layers by what was profiled, or by their weights" in text
    )
    assert "\n  backwards in two parts are taken to be halves that cost nothing more; penstock profile" in text
    assert "halves" not in measured
    assert "times of different hosts are within 20.0 µs of each other" in to_text(diagnosis_of(uncertainty_s=2e-5))
    assert "different hosts" not in text


def test_weight_gradients_that_do_not_wait_for_w_are_told_with_what_they_cost():
    schedule = build("zb-h1", ranks=4, microbatches=8)
    names = [f"7.{index}" for index in range(12)]
    recorded = replace(
        recorded_step(schedule, backward_input_s=(2.0,), backward_weight_s=(0.0,)),
        early_weights={
            0: ImmediateWeights(0.01, ("0.small",)),
            1: ImmediateWeights(1.0, tuple(names), {"7.0": "small"} | dict.fromkeys(names[1:], "cannot be told apart")),
        },
    )

    found = sections(to_text(diagnose(recorded, replace(SETTING, family="zb-h1"))))

    rows = found["weight gradients that the split backward of a stage leaves to W"]
    assert [" ".join(row.split()) for row in rows[2:]] == [
        "1 0.0 % 7.0 (small); 7.1, 7.2, 7.3, 7.4, 7.5, 7.6, 7.7, 7.8, 7.9, 7.10 and 1 more (cannot be told apart)"
    ]
    helping = "\n".join(found[HELPS])
    assert re.search(r"-\d+\.\d %\s+\+0.0 %  all weight gradients wait for W", helping)
    assumed = "\n".join(found["what is assumed of them"])
    assert "half of what an I and a W take is taken to be weight gradients" in assumed


@pytest.mark.parametrize(
    ("weight_s", "reason", "is_told"),
    [(0.1, "small", True), (0.1, "cannot be told apart", False), (1.0, "small", False)],
)
def test_a_schedule_without_split_backwards_is_advised_where_w_has_nothing_to_do(weight_s, reason, is_told):
    recorded = replace(
        recorded_step(build("zb-h1", ranks=4, microbatches=8), backward_input_s=(2.0,), backward_weight_s=(weight_s,)),
        early_weights={0: ImmediateWeights(1.0, ("0.lora",), {"0.lora": reason})},
    )

    text = " ".join(to_text(diagnose(recorded, replace(SETTING, family="zb-h1"))).split())

    assert ("W takes 4.8 % of the backwards, as where almost all weights are frozen" in text) == is_told
    assert "almost all weights are frozen" not in to_text(diagnosis_of())


def test_json_holds_the_same_with_seconds_that_add_up():
    diagnosis = diagnosis_of(late_s=6.0, uncertainty_s=2e-5)

    document = json.loads(to_json(diagnosis))

    assert list(document) == [
        "step", "schedule", "split", "step_s", "measured", "predicted", "clock_uncertainty_s", "plan", "replicas",
        "waits_for_replicas", "finding", "spread",
        "advice", "idle_s", "losses", "early_weights", "changes",
    ]  # fmt: skip
    assert document["step_s"] == 33.0 + 9.0
    assert document["clock_uncertainty_s"] == 2e-5
    assert document["spread"] is None
    assert document["advice"] == to_text(diagnosis).split("\n")[-1]
    for row in document["idle_s"]:
        assert sum(value for key, value in row.items() if key not in ("rank", "idle")) == pytest.approx(row["idle"])
    assert document["losses"][1] | {"step_change": 0} == {
        "cause": "straggler", "duration_s": 6.0, "step_change": 0, "culprit": "rank 1, late for the step",
    }  # fmt: skip
    [zb_h1] = [change for change in document["changes"] if change["change"] == "zb-h1"]
    assert (zb_h1["sort"], zb_h1["memory_change"], zb_h1["copies_weights"]) == ("schedule", 0.0, False)
    assert zb_h1["settings"] == ["pipeline.schedule=zb-h1"]
