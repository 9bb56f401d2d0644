"""Each mode is planned and compiled once, and errors speak of the one that runs."""

from types import SimpleNamespace

from penstock import build
from penstock.execute.compile.programs import CompiledPrograms
from penstock.execute.control.agreement import Mode
from penstock.execute.session import MOST_PROGRAMS, ProgramKey
from penstock.execute.transport import LocalTransport
from penstock.execute.transport.places import Places
from penstock.execute.transport.rank_names import RankNames
from penstock.planning import prove_and_lower

SCHEDULE = build("1f1b", ranks=2, microbatches=2)


class Uncompiled(CompiledPrograms):
    def _compile(self, program):
        return SimpleNamespace(program=program)


def programs(planned, places):
    def plan(key, *, is_planned):
        planned.append((key.mode, key.num_microbatches))
        return prove_and_lower(SCHEDULE if key.mode.is_training else SCHEDULE.forward_only())

    return Uncompiled(SimpleNamespace(places=places, programs=SimpleNamespace(of=plan)), None, [], 1.0)


def key_of(mode, number):
    return ProgramKey(mode, number, number)


def test_a_mode_is_planned_once_for_each_number_of_microbatches():
    planned = []
    own = programs(planned, Places.of(LocalTransport.create(2)[0]))

    for _ in range(2):
        assert own.of(key_of(Mode.TRAIN, 2)) is own.of(key_of(Mode.TRAIN, 2))
        own.of(key_of(Mode.EVALUATE, 2))
        own.of(key_of(Mode.EVALUATE, 1))

    assert planned == [(Mode.TRAIN, 2), (Mode.EVALUATE, 2), (Mode.EVALUATE, 1)]


def test_an_instruction_is_described_by_the_number_of_its_rank_on_a_mesh():
    names = RankNames([4, 5, 6, 7], ["a", "b", "c", "d"])
    (pipeline, _), (_, data) = LocalTransport.create(2), LocalTransport.create(2)
    own = programs([], Places(pipeline, data, names))
    assert own.describe(4, 0) == ""

    own.of(key_of(Mode.TRAIN, 2))
    assert [own.describe(number, 0) for number in (4, 5, 6, 7)] == ["0F0", "1RECV_F0", "0F0", "1RECV_F0"]
    own.of(key_of(Mode.EVALUATE, 2))

    assert own.describe(7, 0) == "1RECV_F0"
    assert own.describe(7, 99) == ""


def test_the_programs_that_ran_last_are_kept():
    planned = []
    own = programs(planned, Places.of(LocalTransport.create(2)[0]))

    for number in [*range(1, MOST_PROGRAMS + 1), 1, MOST_PROGRAMS + 1, 1, 2]:
        own.of(key_of(Mode.TRAIN, number))

    assert [number for _, number in planned[MOST_PROGRAMS:]] == [MOST_PROGRAMS + 1, 2]
    assert len(own._compiled) == MOST_PROGRAMS
