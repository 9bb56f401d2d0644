import numpy as np
import pytest

from penstock.errors import ConfigError, FormatError
from penstock.ir.action import Action, Kind
from penstock.ir.instruction import Op
from penstock.ir.live import StageBytes
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.ir.timeline import Timeline
from penstock.lowering import lower
from penstock.placement import Placement
from penstock.schedules import build
from penstock.simulation import Costs, simulate
from tests.proofs.tables import schedule_of

TWO_RANKS = Program.from_schedule(schedule_of("0F0 0B0\n1F0 1B0"))
NOTED = [(0, 1), (7, 9), (2, 3), (3, 5)]


def timeline_of(program, spans, activation_bytes=0):
    start, end = np.array(spans, np.float64).T.copy()
    sizes = StageBytes.of(program.num_stages, activation=activation_bytes) if activation_bytes else None
    return Timeline(program, "measured", start, end, sizes)


def test_a_rank_without_computations_does_not_stretch_the_makespan():
    orders = [[Action(Kind.FORWARD, 0, 0), Action(Kind.BACKWARD, 0, 0)], []]
    schedule = Schedule.from_actions("idle rank", Placement.line(2), orders, num_microbatches=1)

    timeline = timeline_of(Program.from_schedule(schedule), [(1, 2), (7, 9)])

    assert (timeline.makespan_s, timeline.span_s) == (8, 8)


def test_makespan_span_work_and_both_bubble_conventions_follow_their_definitions():
    timeline = timeline_of(TWO_RANKS, [(1, 2), (7, 9), (2, 3), (3, 5)])

    assert (timeline.makespan_s, timeline.span_s, timeline.work_s.tolist()) == (8, 8, [3, 3])
    assert timeline.bubble_fraction == pytest.approx(1 - 6 / (2 * 8))
    assert timeline.bubble_rate == pytest.approx(1 - 3 / 8)


@pytest.mark.feature("H11")
def test_the_seconds_of_each_operation_add_up_per_rank():
    program = lower(build("1f1b", ranks=2, microbatches=3))
    timeline = simulate(program, Costs.uniform(forward=1, backward_input=1, backward_weight=1, transfer=0.5))

    first, last = timeline.seconds_by_op()

    assert (first[Op.FORWARD], first[Op.BACKWARD]) == (3, 6)
    assert list(first) == [Op.FORWARD, Op.BACKWARD, Op.SEND_FORWARD, Op.RECEIVE_BACKWARD, Op.REDUCE_GRADIENT]
    assert list(last) == [Op.FORWARD, Op.BACKWARD, Op.RECEIVE_FORWARD, Op.SEND_BACKWARD, Op.REDUCE_GRADIENT]


def test_two_actions_that_overlap_count_their_time_once():
    schedule = schedule_of("0F0 (0F1;0B0)OVERLAP_F_B 0B1")
    timeline = timeline_of(Program.from_schedule(schedule), [(0, 1), (1, 3), (1, 4), (4, 6)])

    assert timeline.work_s.tolist() == [6]
    assert timeline.bubble_fraction == 0


def test_peaks_of_what_is_offloaded_are_those_of_the_host():
    program = lower(build("gpipe", ranks=2, microbatches=5), offload=[0])
    timeline = simulate(program, Costs.uniform(activation_bytes=(100, 10)))

    assert timeline.peak_activations == [2, 5]
    assert timeline.peak_bytes == [200, 50]
    assert timeline.peak_host_bytes == [400, 0]
    assert simulate(program, Costs.uniform()).peak_host_bytes == [0, 0]
    assert timeline_of(TWO_RANKS, NOTED).peak_host_bytes == [0, 0]


def test_a_step_lasts_from_the_first_to_the_last_of_all_instructions():
    program = lower(build("1f1b", ranks=1, microbatches=1), optimizer_step=True)
    timeline = timeline_of(program, [(2, 3), (3, 5), (5, 6), (7, 8.5)])

    assert timeline.makespan_s == 3
    assert timeline.step_s == 6.5


@pytest.mark.feature("H11")
@pytest.mark.parametrize("key", ["start_s", "end_s"])
@pytest.mark.parametrize(
    ("times", "found"),
    [
        (np.zeros(3), r"an array of shape \(3,\)"),
        (np.zeros(5), r"an array of shape \(5,\)"),
        (np.zeros((4, 1)), r"an array of shape \(4, 1\)"),
        ([0.0] * 4, "of type list"),
    ],
    ids=["too few", "too many", "of two dimensions", "a list"],
)
def test_times_that_are_not_one_for_each_instruction_are_refused(key, times, found):
    columns = {"start_s": np.zeros(4), "end_s": np.zeros(4)} | {key: times}

    with pytest.raises(ConfigError, match=f"{found}; expected a numpy array of 4 seconds, one for each") as caught:
        Timeline(TWO_RANKS, "measured", **columns)

    assert caught.value.key == key


def test_times_cannot_be_changed_and_the_callers_arrays_stay_its_own():
    program = lower(build("gpipe", ranks=2, microbatches=2))
    start_s, end_s = np.zeros(program.num_rows), np.ones(program.num_rows)

    timeline = Timeline(program, "measured", start_s, end_s)

    start_s[0] = 0.0
    with pytest.raises(ValueError, match="read-only"):
        timeline.start_s[0] = 1.0


def test_a_saved_timeline_is_loaded_and_a_later_one_replaces_it(tmp_path):
    path = tmp_path / "step.json"
    timeline_of(TWO_RANKS, NOTED).save(path)
    later = timeline_of(TWO_RANKS, [(0, 1), (8, 9), (2, 3), (3, 5)])
    later.save(str(path))

    assert Timeline.load(path).start_s.tolist() == later.start_s.tolist()
    assert [entry.name for entry in tmp_path.iterdir()] == ["step.json"]


def test_a_timeline_is_saved_as_json_only(tmp_path):
    timeline = timeline_of(TWO_RANKS, NOTED)

    with pytest.raises(ConfigError, match=r"step\.csv does not end in \.json"):
        timeline.save(tmp_path / "step.csv")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("content", "error", "told"),
    [
        (None, ConfigError, r"step\.json: cannot be read: No such file"),
        (b"\xff", FormatError, r"step\.json:1:1: byte 0 is not UTF-8"),
        (b'{"format": ', FormatError, r"step\.json:1:\d+: this is no JSON"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, content, error, told):
    path = tmp_path / "step.json"
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(error, match=told):
        Timeline.load(path)
