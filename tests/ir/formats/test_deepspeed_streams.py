"""What DeepSpeed would run: its recorded streams, and that they run to their end in buffers that suffice."""

import re

import pytest

from penstock.errors import ConfigError
from penstock.ir.formats.deepspeed_streams import Listing, listing_of, streams
from penstock.placement import Placement
from penstock.schedules import build
from tests.proofs.tables import schedule_of
from tests.schedules.golden import cases, sizes

RECORDED = cases("deepspeed")
TRAINING = [Listing.TRAIN, Listing.TRAIN_OLD]
SHAPES = [(ranks, microbatches) for ranks in (1, 2, 3, 4, 7) for microbatches in (1, 2, 3, 5, 9)]


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


def test_all_of_deepspeeds_streams_are_recorded():
    assert len(RECORDED) == 111


class InStep:
    """Runs streams with blocking sends and a barrier after every step; a buffer is never filled before it is free."""

    def __init__(self, found):
        self.streams = found
        self.held = [{} for _ in found]
        self.computed = [[] for _ in found]
        self.num_loaded = 0
        self.frees = ("SG", "B") if any("B0" in step for step in found[0].steps) else ("SA", "F")

    def run(self):
        """Return what each rank computed."""
        assert len({len(stream.steps) for stream in self.streams}) == 1
        for step in zip(*(stream.steps for stream in self.streams), strict=True):
            self.left = [list(instructions) for instructions in step]
            while any(self.left):
                moved = [rank for rank, own in enumerate(self.left) if own and self.advance(rank)]
                assert moved, f"every rank waits: {self.left}"
        assert self.held == [{} for _ in self.streams]
        return self.computed

    def advance(self, rank):
        """Run the next instruction of a rank, a send together with its receive; return whether it could."""
        code, buffer = split(self.left[rank][0])
        if code in ("SA", "SG"):
            peer = rank + (1 if code == "SA" else -1)
            received = split(self.left[peer][0]) if self.left[peer] else ("", "")
            if received[0] != code.replace("S", "R"):
                return False
            self.left[peer].pop(0)
            microbatch = self.held[rank][buffer]
            if code == "SA":
                self.fill(peer, received[1], microbatch)
            assert self.held[peer][received[1]] == microbatch
        elif code == "L" and rank == 0:
            self.fill(0, buffer, self.num_loaded)
            self.num_loaded += 1
        elif code in ("F", "B"):
            self.computed[rank].append(f"{rank}{code}{self.held[rank][buffer]}")
        elif code in ("RA", "RG"):
            return False
        self.left[rank].pop(0)
        ends_here = rank == (0 if code == "B" else len(self.held) - 1)
        if code == self.frees[0] or (code == self.frees[1] and ends_here):
            del self.held[rank][buffer]
        return True

    def fill(self, rank, buffer, microbatch):
        assert buffer not in self.held[rank], f"buffer {buffer} still holds microbatch {self.held[rank][buffer]}"
        self.held[rank][buffer] = microbatch


def split(instruction):
    return re.fullmatch(r"([A-Z]+)(\d*)", instruction).groups()


@pytest.mark.parametrize("listing", TRAINING)
@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
@pytest.mark.parametrize("family", ["1f1b", "gpipe", "sequential"])
def test_with_a_barrier_after_every_step_all_actions_run_in_buffers_of_their_own(family, ranks, microbatches, listing):
    schedule = build(family, ranks=ranks, microbatches=microbatches)

    computed = InStep(streams(schedule, listing)).run()

    assert computed == [[str(action) for action in order] for order in schedule]


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_inference_runs_in_step_with_two_buffers(ranks, microbatches):
    schedule = build("forward-only", ranks=ranks, microbatches=microbatches)

    found = streams(schedule, Listing.INFERENCE)

    assert InStep(found).run() == [[str(action) for action in order] for order in schedule]
    assert {stream.num_buffers for stream in found} == {2}


@pytest.mark.parametrize(("ranks", "microbatches"), SHAPES)
def test_receiving_before_sending_takes_one_buffer_more(ranks, microbatches):
    schedule = build("1f1b", ranks=ranks, microbatches=microbatches)

    today, before = (streams(schedule, listing) for listing in TRAINING)

    to_the_end = [ranks - rank for rank in range(ranks)]
    assert [stream.num_buffers for stream in today] == [max(2, min(left, microbatches)) for left in to_the_end]
    assert [stream.num_buffers for stream in before] == [max(2, min(left + 1, microbatches)) for left in to_the_end]


def test_the_old_order_with_the_buffers_of_today_overwrites_one():
    found = streams(build("1f1b", ranks=4, microbatches=6), Listing.TRAIN)
    for step in (step for stream in found for step in stream.steps):
        if len(step) > 1 and step[1][:2] in ("RA", "SA"):
            step[:2] = step[1::-1]

    with pytest.raises(AssertionError, match="buffer 0 still holds microbatch 0"):
        InStep(found).run()


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


def test_slices_are_refused():
    with pytest.raises(ConfigError, match="cut into 2 slices"):
        streams(schedule_of("0F0 0F0.1 0B0.1 0B0", slices=2), Listing.TRAIN)


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
