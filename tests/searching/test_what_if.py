"""Changes are simulated on the measured costs: splits, schedules, microbatches."""

from dataclasses import replace

import pytest

from penstock.lowering import lower
from penstock.partition.split import split_over
from penstock.schedules import build
from penstock.searching.what_if import MeasuredRun, Setting, what_if
from penstock.simulation import Costs, LayerCosts, simulate
from penstock.simulation.costs.fit import HALVES, SplitShares, costs_from_timelines
from penstock.train.settings.config import config_from_table
from penstock.train.settings.overrides import apply_overrides
from penstock.train.watching.diagnosis import setting_of
from tests.cli.recorded_steps import recorded_step

SETTING = Setting(batch_size=16, family="1f1b", stages_per_rank=1)
UNEVEN = (1.0, 1.0, 1.0, 2.0)


def changes(recorded, setting=SETTING, *, costs=None, shares=HALVES, **known):
    """The changes to a recorded step by their texts; its costs are those that were measured unless given."""
    costs = costs or costs_from_timelines([recorded], shares=shares)
    schedule = recorded.program.actions()
    run = MeasuredRun(schedule, costs, recorded.layers_of_stage, recorded.layer_weights, **known)
    return {change.text: change for change in what_if(run, setting)}


def makespan_s(name, costs, **shape):
    return simulate(lower(build(name, **({"ranks": 4, "microbatches": 8} | shape))), costs).makespan_s


def test_schedules_and_numbers_of_microbatches_change_the_step_as_their_simulation_says():
    found = changes(recorded_step())

    now_s = makespan_s("1f1b", Costs.uniform(forward=1.0, backward=2.0))
    then_s = makespan_s("zb-h1", Costs.uniform(forward=1.0, backward_input=1.0, backward_weight=1.0))
    assert found["zb-h1"].step_change == pytest.approx(then_s / now_s - 1)
    assert found["gpipe"].step_change == pytest.approx(0.0)
    assert (found["gpipe"].memory_change, found["zb-h1"].memory_change) == (1.0, 0.0)
    assert "1f1b" not in found
    assert "forward-only" not in found
    texts = {text for text, change in found.items() if change.sort == "microbatches"}
    assert texts == {"2 microbatches", "4 microbatches", "16 microbatches"}
    expected = makespan_s("1f1b", Costs.uniform(forward=0.5, backward=1.0), microbatches=16)
    assert found["16 microbatches"].step_change == pytest.approx(expected / now_s - 1)
    assert found["16 microbatches"].memory_change == pytest.approx(-0.5)


def test_memory_is_by_the_bytes_of_each_layer_where_they_are_known():
    """The first and the last of four stages are large. A loop has them on two ranks, a wave on one."""
    recorded = recorded_step(build("interleaved-1f1b", ranks=2, microbatches=4))
    of_stages = (32, 4, 4, 32)
    sizes = tuple(size // 4 for size in of_stages for _ in range(4))

    found = changes(recorded, replace(SETTING, family=None, stages_per_rank=None), activation_bytes=sizes)

    def peak(name):
        table = lower(build(name, ranks=2, microbatches=4))
        return max(simulate(table, Costs(forward_s=(1.0,), backward_s=(2.0,), activation_bytes=of_stages)).peak_bytes)

    now = peak("interleaved-1f1b")
    assert found["hanayo"].memory_change == pytest.approx(peak("hanayo") / now - 1)
    assert found["looped-bfs"].memory_change == pytest.approx(peak("looped-bfs") / now - 1)


def test_what_was_measured_of_split_backwards_counts():
    """Where the `I` does all of it, nothing is saved; what preparing it costs, is paid."""
    found = changes(recorded_step(), shares=SplitShares(1.0, 1.0, 0.0))
    dear = changes(recorded_step(), shares=SplitShares(1.5, 1.0, 0.0))

    assert found["zb-h1"].step_change == pytest.approx(0.0)
    assert dear["zb-h1"].step_change == pytest.approx(0.5 / 3)
    assert dear["gpipe"].step_change == pytest.approx(0.0)


def test_weight_gradients_that_come_early_are_moved_to_w():
    """All of it in `I` against halves."""
    recorded = recorded_step(build("zb-h1", ranks=4, microbatches=8), backward_input_s=(2.0,), backward_weight_s=(0.0,))
    costs = Costs.uniform(forward=1.0, backward_input=2.0, backward_weight=0.0)
    early = dict.fromkeys(range(4), 1.0)

    found = changes(recorded, costs=costs, early_weights=early)["all weight gradients wait for W"]

    now_s = makespan_s("zb-h1", costs)
    then_s = makespan_s("zb-h1", Costs.uniform(forward=1.0, backward_input=1.0, backward_weight=1.0))
    assert found.step_change == pytest.approx(then_s / now_s - 1)
    assert found.step_change < -0.05
    assert not any("wait for W" in text for text in changes(recorded))


def test_the_most_even_split_is_tried_as_a_whole():
    found = changes(recorded_step(forward_s=(1.0, 1.0, 1.0, 4.0)))

    [split] = [change for change in found.values() if change.text.startswith("split ")]
    assert split.text == "split 6,6,2,2"
    assert split.step_change < found["move one layer from stage 3 to stage 2"].step_change


def test_families_with_more_stages_than_layers_are_left_out():
    layers = tuple(range(place, place + 1) for place in range(4))
    short = replace(recorded_step(), layers_of_stage=layers, layer_weights=(1.0,) * 4)

    assert "zbv" not in changes(short)
    assert "zb-h1" in changes(short)


def test_two_copies_of_the_weights_are_told():
    found = changes(recorded_step())
    from_two = changes(recorded_step(build("chimera", ranks=4, microbatches=8)), Setting(batch_size=8))

    assert {text for text, change in found.items() if change.copies_weights} >= {"chimera", "dualpipe"}
    assert not found["zb-h1"].copies_weights
    assert not any(change.copies_weights for change in from_two.values())


def test_changes_of_an_uneven_run_name_their_keys_move_layers_to_shorter_stages_and_begin_with_the_most_helpful():
    found = changes(recorded_step(forward_s=UNEVEN))
    options = Setting(batch_size=16, family="1f1b", options={"warmup": "eager"}, stages_per_rank=1)

    assert found["move one layer from stage 3 to stage 2"].settings == ("pipeline.split=[4,4,5,3]",)
    assert found["zb-h1"].settings == ("pipeline.schedule=zb-h1",)
    assert found["16 microbatches"].settings == ("pipeline.microbatches=16",)
    assert found["hanayo"].settings == (
        "pipeline.schedule=hanayo", "pipeline.stages_per_rank=2", "pipeline.split=[3,3,3,2,2,1,1,1]",
    )  # fmt: skip
    assert changes(recorded_step(), options)["zb-h1"].settings == ("pipeline.schedule=zb-h1", "pipeline.options={}")
    assert [text for text in found if text.startswith("move")] == ["move one layer from stage 3 to stage 2"]
    step_changes = [change.step_change for change in found.values()]
    assert step_changes == sorted(step_changes)


@pytest.mark.parametrize("number", [{"microbatches": 8}, {"microbatch_size": 2}], ids=str)
def test_a_run_with_the_keys_of_a_change_takes_what_was_simulated_of_it(number):
    """Also of a run whose options its new schedule does not have, and of one that sets the size of a microbatch."""
    table = {
        "run": {"folder": "run"},
        "data": {"corpus": "stdlib"},
        "batch": {"size": 16},
        "pipeline": {"ranks": 4, "schedule": "1f1b", "options": {"warmup": "eager"}, **number},
    }
    each = tuple(seconds / 4 for seconds in UNEVEN for _ in range(4))
    per_layer = LayerCosts(forward=each, backward_input=each, backward_weight=each)
    recorded = recorded_step(build("1f1b", ranks=4, microbatches=8, warmup="eager"), forward_s=UNEVEN)

    def step_s(settings):
        pipeline = config_from_table(apply_overrides(table, settings)).pipeline
        shape = {"ranks": pipeline.ranks, "microbatches": pipeline.microbatches}
        schedule = build(
            pipeline.schedule, **shape, stages_per_rank=pipeline.stages_per_rank or None, **pipeline.options
        )
        split = pipeline.split if isinstance(pipeline.split, tuple) else (4, 4, 4, 4)
        costs = per_layer.of_stages(split_over(schedule.placement, 16, split=split))
        return simulate(lower(schedule), costs.of_share(8 / pipeline.microbatches)).makespan_s

    found = changes(recorded, setting_of(config_from_table(table))).values()

    assert {change.sort for change in found} == {"schedule", "split", "microbatches"}
    for change in found:
        assert step_s(change.settings) / step_s([]) - 1 == pytest.approx(change.step_change), change


def test_slices_are_compared_with_whole_sequences_and_with_more_of_them():
    """Costs were measured per slice, of which whole microbatches hold two."""
    schedule = build("seq1f1b", ranks=4, microbatches=8, slices=2)

    found = changes(recorded_step(schedule), Setting(batch_size=16, family="seq1f1b"))

    now_s = makespan_s("seq1f1b", Costs.uniform(forward=1.0, backward=2.0), slices=2)
    whole_s = makespan_s("1f1b", Costs.uniform(forward=2.0, backward=4.0))
    more_s = makespan_s("seq1f1b", Costs.uniform(forward=0.5, backward=1.0), microbatches=16, slices=2)
    assert found["1f1b"].step_change == pytest.approx(whole_s / now_s - 1)
    assert found["16 microbatches"].step_change == pytest.approx(more_s / now_s - 1)
    assert more_s < now_s < whole_s


def test_a_schedule_from_a_file_keeps_its_microbatches():
    found = changes(recorded_step(), Setting(batch_size=16))

    assert {change.sort for change in found.values()} == {"schedule"}


def test_a_step_on_two_routes_is_compared_with_others():
    schedule = build("chimera", ranks=4, microbatches=8)
    recorded = recorded_step(schedule)

    found = changes(recorded, Setting(batch_size=8, family="chimera"))

    assert found["1f1b"].step_change > 0.1
