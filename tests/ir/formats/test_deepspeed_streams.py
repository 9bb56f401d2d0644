"""What DeepSpeed would run: its recorded streams and buffers, and what such streams cannot express."""

import pytest

from penstock.errors import ConfigError
from penstock.ir.formats.deepspeed_streams import Listing, listing_of, streams
from penstock.placement import Placement
from penstock.schedules import build
from tests.proofs.tables import schedule_of
from tests.schedules.golden import cases, sizes

RECORDED = cases("deepspeed")


def written(found):
    return ["|".join(" ".join(step) for step in stream.steps) for stream in found]


@pytest.mark.feature("B12")
@pytest.mark.parametrize("key", [key for key in RECORDED if not key.startswith("Data")])
def test_the_streams_and_buffers_of_a_pipeline_are_those_of_deepspeed(key):
    kind, rule = key.split("/")[:2]
    schedule = build(
        "1f1b", ranks=sizes(key)["s"], microbatches=sizes(key)["m"], forward_only=kind == "InferenceSchedule"
    )

    found = streams(schedule, listing_of(schedule, old=rule == "old"))

    assert written(found) == RECORDED[key]["ranks"]
    assert [stream.num_buffers for stream in found] == RECORDED[key]["num_pipe_buffers"]


@pytest.mark.feature("B13")
@pytest.mark.parametrize("key", [key for key in RECORDED if key.startswith("Data")])
def test_every_rank_of_data_parallelism_runs_the_stream_of_sequential_on_one(key):
    schedule = build("sequential", ranks=1, microbatches=sizes(key)["m"])

    (found,) = streams(schedule, listing_of(schedule, old=False))

    assert set(RECORDED[key]["ranks"]) == set(written([found]))
    assert set(RECORDED[key]["num_pipe_buffers"]) == {found.num_buffers}


def test_buffers_are_as_many_as_lie_from_the_oldest_microbatch_to_the_newest():
    last_first = schedule_of("0F0 0F1 0B1 0F2 0B0 0B2")

    assert [stream.num_buffers for stream in streams(last_first, Listing.TRAIN)] == [3]


@pytest.mark.parametrize(
    ("schedule", "told"),
    [
        (build("forward-only", ranks=2, microbatches=2, stages_per_rank=2), "4 stages on 2 ranks .*stage s on rank s"),
        (schedule_of("1F0\n0F0", placement=Placement.explicit([1, 0])), "2 stages on 2 ranks"),
        (schedule_of("0F0 0I0 0W0"), "splits backwards"),
        (schedule_of("0F0 0R0 0B0"), "runs forwards again"),
        (schedule_of("0F0 0F0.1 0B0.1 0B0", slices=2), "cut into 2 slices"),
        (schedule_of("0F0 (0F1;0B0)OVERLAP_F_B 0B1"), "overlaps actions"),
        (build("1f1b", ranks=4, microbatches=8, warmup="eager"), "0B0 cannot run in the step after 1B0"),
        (schedule_of("0F1 0F0 0B0 0B1"), "the forwards of rank 0 are in another order; expected microbatch 0, then 1"),
        (schedule_of("0F0 0F1 0B0"), "rank 0 has 1 backwards; expected 2"),
        (schedule_of("0F0 0F1 0B0 0B0"), "rank 0 has 2 backwards; expected 2, at most one of each"),
        (schedule_of("0F0 0B0 0F1 0B1\n1F0 1F1 1B0 1B1"), "it cannot run to its end"),
    ],
)
def test_what_such_streams_cannot_express_is_refused(schedule, told):
    with pytest.raises(ConfigError, match=f"^format: .*{told}.* CSV and JSON can$"):
        streams(schedule, listing_of(schedule, old=False))


@pytest.mark.parametrize(("family", "ranks"), [("gpipe", 1), ("sequential", 2)])
def test_a_listing_without_a_pipeline_takes_f_and_b_in_turn_alone(family, ranks):
    with pytest.raises(ConfigError, match="one rank that runs F and B in turn"):
        streams(build(family, ranks=ranks, microbatches=2), Listing.DATA_PARALLEL)


@pytest.mark.parametrize(
    ("shape", "listing"),
    [
        ({"name": "1f1b", "ranks": 1}, Listing.TRAIN),
        ({"name": "sequential", "ranks": 1}, Listing.DATA_PARALLEL),
        ({"name": "sequential", "ranks": 2}, Listing.TRAIN),
        ({"name": "sequential", "ranks": 1, "forward_only": True}, Listing.INFERENCE),
        ({"name": "1f1b", "ranks": 3, "forward_only": True}, Listing.INFERENCE),
    ],
)
def test_the_schedule_decides_which_class_lists_it(shape, listing):
    assert listing_of(build(**shape, microbatches=2), old=False) is listing


def test_the_old_order_is_of_training_alone():
    assert listing_of(build("1f1b", ranks=2, microbatches=2), old=True) is Listing.TRAIN_OLD
    assert listing_of(build("forward-only", ranks=2, microbatches=2), old=True) is Listing.INFERENCE
