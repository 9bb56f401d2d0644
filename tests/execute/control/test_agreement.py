"""Ranks find out together that they were set up differently, or that they run different things."""

from dataclasses import replace

import pytest

from penstock.errors import EndOfData, StepRefused
from penstock.execute.control.agreement import (
    AgreedStep,
    Extra,
    Mode,
    StepProposal,
    agree_on_step,
    digest,
    refusing,
    require_cut,
)
from penstock.execute.control.collectives import Control
from penstock.execute.transport.rank_names import RankNames
from tests.support.local_pipelines import error_of, on_ranks

GIVEN = StepProposal(mode=Mode.TRAIN, inputs=11, target=22, sizes=(2, 2), lengths=(3, 2))
NOTHING = StepProposal(mode=Mode.TRAIN)


def refusals(*proposals):
    return on_ranks(len(proposals), lambda wires: error_of(agree_on_step, Control(wires), proposals[wires.rank]))


def agreements(*proposals):
    return on_ranks(len(proposals), lambda wires: agree_on_step(Control(wires), proposals[wires.rank]))


def test_a_digest_is_the_same_in_every_process_and_never_means_nothing():
    assert digest("schedule") == 26865468698641645
    assert digest("a") != digest("b")
    assert all(0 < digest(str(number)) < 2**56 for number in range(100))


def test_ranks_that_need_nothing_may_propose_nothing():
    first = StepProposal(mode=Mode.TRAIN, inputs=11, sizes=(2, 2))
    last = StepProposal(mode=Mode.TRAIN, target=22, sizes=(2, 2), lengths=(3, 2), takes_target=True)

    for proposals in agreements(first, NOTHING, last):
        agreed = AgreedStep.of(proposals)
        assert [each.inputs for each in proposals] == [11, None, None]
        assert (agreed.sizes, agreed.lengths) == ((2, 2), (3, 2))
        assert agreed.signature == "TRAIN 11 0 22 0"


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (GIVEN, GIVEN),
        (GIVEN, NOTHING),
        (replace(GIVEN, position=9), replace(GIVEN, position=9)),
        (replace(GIVEN, position=0), replace(GIVEN, position=None)),
        (replace(GIVEN, attempt=3), replace(GIVEN, attempt=5)),
        (replace(GIVEN, target=None, takes_target=True), replace(GIVEN, target=None, takes_target=True)),
    ],
    ids=["the same", "nothing", "one place of a stream", "no stream", "other attempts", "no target"],
)
def test_ranks_that_do_not_differ_agree_and_go_on_at_the_later_attempt(first, second):
    found = agreements(first, second)

    assert found == [[first, second]] * 2
    agreed = AgreedStep.of(found[0])
    assert agreed.attempt == max(first.attempt, second.attempt)
    assert agreed.signature == AgreedStep.of([first, first]).signature


def test_ranks_agree_on_a_number_of_microbatches_and_on_what_all_have_planned():
    first = StepProposal(mode=Mode.TRAIN, inputs=11, microbatches=6, planned=(9, 6), first_microbatch=(5, 0, 0))
    last = StepProposal(mode=Mode.TRAIN, target=22, microbatches=6, planned=(6,), first_microbatch=(0, 0, 7))

    for proposals in agreements(first, replace(NOTHING, planned=(6, 9)), last):
        agreed = AgreedStep.of(proposals)
        assert (agreed.asked_microbatches, agreed.planned) == (6, {6})
        assert agreed.first_microbatch == "TRAIN 5 0 7 0"


@pytest.mark.parametrize("change", [{"has_alike_layouts": False}, {"inputs": 11}], ids=["seen to differ", "unknown"])
def test_microbatches_are_no_kind_where_a_rank_knows_of_others(change):
    proposals = [StepProposal(mode=Mode.TRAIN, target=22, first_microbatch=(0, 0, 7)), replace(NOTHING, **change)]

    assert AgreedStep.of(proposals).first_microbatch == ""
    assert AgreedStep.of([proposals[0], NOTHING]).first_microbatch == "TRAIN 0 0 7 0"


def test_a_number_that_follows_from_a_size_is_none_that_ranks_are_told():
    sized = replace(GIVEN, microbatches="those of microbatch_size = 2")

    assert AgreedStep.of([NOTHING, sized]).asked_microbatches is None
    for error in refusals(replace(GIVEN, microbatches=4), sized):
        assert "the ranks disagree on microbatches: rank 0 has 4, rank 1 has those of microbatch_size = 2" in str(error)


def test_everything_that_is_proposed_survives_the_exchange():
    large = 2**56 - 1
    full = StepProposal(
        mode=Mode.EVALUATE,
        inputs=large,
        keywords=7,
        target=large,
        sizes=(3, 3),
        lengths=(2, 1, 2, 1),
        takes_keywords=True,
        takes_target=True,
        wants_outputs=True,
        position=9,
        values=(-(2**63), 0, 2**63 - 1),
        attempt=12,
        step_number=2**40,
        trained=large,
        extra=Extra.MEMORY,
        no_sync="no_sync()",
        scale=1 / 3,
        uncut_rows=([6, "an object holds them"],),
    )

    assert agreements(full, full)[0] == [full, full]
    assert type(agreements(full, full)[0][1].mode) is Mode


def test_rows_that_a_rank_would_hand_whole_to_every_microbatch_are_refused_by_that_rank():
    proposals = [replace(GIVEN, uncut_rows=()), replace(GIVEN, uncut_rows=([4, "an object holds them"], [6, "no"]))]
    names = RankNames.plain(2)

    with pytest.raises(StepRefused, match=r"rank 1 .*an object holds them") as caught:
        require_cut(proposals, AgreedStep.of(proposals), names)
    assert caught.value.rank == 1
    require_cut(proposals, replace(AgreedStep.of(proposals), sizes=[4]), names)  # one microbatch gets all rows
    require_cut(proposals, replace(AgreedStep.of(proposals), sizes=[2, 3]), names)


def differing(name, values, text):
    """What each rank proposes of one field, and what all are told."""
    return [{name: value} for value in values], f"disagree on {name}: {text}"


PLAIN, RECORDING, MEMORY = Extra.NOTHING, Extra.RECORDING, Extra.MEMORY
DIFFERENT = [
    differing("mode", [Mode.TRAIN, Mode.EVALUATE], "rank 0 has step, rank 1 has evaluate. Call"),
    differing(
        "mode", [Mode.TRAIN, Mode.TRAIN_SPLIT], "rank 0 has step, rank 1 has a step with split backwards. Call the"
    ),
    differing("inputs", [11, 12], "rank 0 and rank 1 have different shapes or types. Pass the same"),
    differing("target", [22, 23], "rank 0 and rank 1 have different shapes"),
    differing("no_sync", ["none", "no_sync()"], "rank 0 has none, rank 1 has no_sync(). Enter no_sync() on"),
    differing("lengths", [(3, 2), (2, 1)], "rank 0 has [3, 2], rank 1 has [2, 1]. These are the lengths of slices"),
    differing("position", [0, 5], "rank 0 has 0, rank 1 has 5. It is the microbatch at which the"),
    differing(
        "step_number",
        [5, 5, 3],
        "rank 0 has 5, rank 2 has 3. With a seed random numbers go by it: set pipeline.step_number alike on all ranks",
    ),
    differing("scale", [65536.0, 65536.0, 0.125], "rank 0 has 65536.0, rank 2 has 0.125. It is that of the GradScaler"),
    differing("extra", [PLAIN, PLAIN, RECORDING], f"rank 0 has nothing besides, rank 2 has {RECORDING.value}"),
    differing("extra", [RECORDING, RECORDING, MEMORY], f"rank 0 has {RECORDING.value}, rank 2 has {MEMORY.value}"),
    differing("extra", [MEMORY, MEMORY, PLAIN], f"rank 0 has {MEMORY.value}, rank 2 has nothing besides"),
    (
        [{}, {"inputs": None, "sizes": (3, 1)}],
        "sizes: rank 0 has [2, 2], rank 1 has [3, 1]. These are the rows of microbatches: in specs, mark",
    ),
    ([{}, {"target": None, "lengths": None, "takes_target": True}], "a target, rank 1 was not, but holds"),
]


@pytest.mark.parametrize(("changes", "text"), DIFFERENT, ids=[text for _, text in DIFFERENT])
def test_ranks_that_run_different_things_all_refuse(changes, text):
    for error in refusals(*(replace(GIVEN, **change) for change in changes)):
        assert type(error) is StepRefused
        assert error.rank == len(changes) - 1
        assert text in str(error)


@pytest.mark.parametrize("odd", [0, 1, 3])
@pytest.mark.parametrize("change", [{"mode": Mode.EVALUATE}, {"inputs": 99}, {"position": 7}])
def test_the_one_rank_that_differs_from_all_others_is_blamed_whichever_it_is(odd, change):
    proposals = [replace(GIVEN, position=5)] * 4
    proposals[odd] = replace(proposals[odd], **change)

    assert [error.rank for error in refusals(*proposals)] == [odd] * 4


def test_what_any_rank_trains_is_part_of_the_signature_and_the_same_for_all():
    trained = [(5, 2**56 - 1), (5, 6), (6, 5), (0, 0)]
    found = [agreements(*(replace(GIVEN, trained=each) for each in pair)) for pair in trained]
    agreed = [[AgreedStep.of(proposals) for proposals in ranks] for ranks in found]

    assert all(first.signature == second.signature for first, second in agreed)
    assert len({first.signature for first, _ in agreed}) == len(trained)
    assert [first.trained == 0 for first, _ in agreed] == [False, False, False, True]


def test_one_rank_that_refuses_is_enough_whatever_it_was_given():
    refused = replace(GIVEN, inputs=None, target=None, takes_target=True, **refusing(StepRefused("cannot be split")))

    first, second, third = refusals(GIVEN, refused, GIVEN)

    assert str(second) == "cannot be split"
    assert str(first) == str(third) == "rank 1 refuses the step: cannot be split"
    assert {(type(error), error.rank) for error in (first, second, third)} == {(StepRefused, 1)}
    ended = [replace(GIVEN, **refusing(kind("of rank"))) for kind in (StepRefused, EndOfData)]
    for error in refusals(*ended):  # the end of the data counts before other reasons
        assert (type(error), str(error), error.rank) == (EndOfData, "of rank", 1)
