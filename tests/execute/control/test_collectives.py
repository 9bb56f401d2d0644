"""Collectives over any transport; `transport/test_contract.py` has them over processes, with deadlines and failures."""

import time
from collections import Counter
from functools import partial

import pytest
import torch

from penstock.errors import CheckpointError, ConfigError, EndOfData, PartitionError, PipelineError
from penstock.execute.control.collectives import HEAD_BYTES, LENGTH, Control
from penstock.execute.transport.protocol import Tag
from tests.support.local_pipelines import error_of, float_task, on_ranks, pipeline_of, step_task
from tests.support.local_wires import ordered
from tests.support.mesh_pipelines import on_mesh

LABEL_BYTES = len(b"pipeline.control\ttest_collectives.py:10\n")
"""What an exchange opens with outside of every public call, on lines of two digits."""
ROOM = HEAD_BYTES - LENGTH.size - LABEL_BYTES


@pytest.mark.parametrize("num_bytes", [2, ROOM - 1, ROOM, ROOM + 1, 5 * ROOM])
def test_objects_of_every_length_arrive_whole(num_bytes):
    def case(wires):
        return Control(wires).all_gather_object("x" * (num_bytes - 2) if wires.rank else "short")  # with its quotes

    assert on_ranks(3, case) == [["short", "x" * (num_bytes - 2), "x" * (num_bytes - 2)]] * 3


@pytest.mark.parametrize("seed", range(5))
def test_collectives_keep_their_order_in_whichever_order_messages_arrive(seed):
    def case(wires):
        control, found = Control(wires), []
        for number in range(3):
            total = sum(control.all_gather_object(wires.rank + number))
            found.append((total, control.all_gather_object(["y" * 2000, wires.rank, number])[2][1:]))
        return found

    assert on_ranks(3, case, connect=ordered(seed)) == [[(3, [2, 0]), (6, [2, 1]), (9, [2, 2])]] * 3


def test_a_collective_may_last_as_long_as_waits_may_when_it_begins():
    def case(wires):
        own, of_wires = Control(wires, limit_s=3.0), Control(wires)
        usual_s = of_wires.limit_s
        with wires.waiting(usual_s + 100):
            longer = own.limit_s, of_wires.limit_s - usual_s
        return longer, of_wires.limit_s - usual_s

    assert on_ranks(1, case) == [((3.0, 100.0), 0.0)]


class Noting:
    """Notes of each message that a transport posts its peer, tag, bytes and device."""

    def __init__(self, transport):
        self.sent, self.received = [], []
        transport.post_send = partial(self._note, self.sent, transport.post_send)
        transport.post_receive = partial(self._note, self.received, transport.post_receive)

    @staticmethod
    def _note(noted, post, peer, tensor, tag=Tag.DATA):
        noted.append((peer, tag, tensor.nbytes, tensor.device.type))
        return post(peer, tensor, tag)


def test_each_rank_sends_its_own_to_every_other_one_and_nothing_is_relayed():
    def case(wires):
        noting = Noting(wires)
        Control(wires).all_gather_object("x" * (2 * ROOM if wires.rank == 1 else 2))
        return [Counter((peer, size) for peer, _, size, _ in each) for each in (noting.sent, noting.received)]

    long = ROOM + 2  # beside the head, with its quotes
    for rank, (sent, received) in enumerate(on_ranks(4, case)):
        others = [peer for peer in range(4) if peer != rank]
        assert sent == Counter((peer, size) for peer in others for size in (HEAD_BYTES, *[long] * (rank == 1)))
        assert received == Counter((peer, size) for peer in others for size in (HEAD_BYTES, *[long] * (peer == 1)))


def test_agreement_and_losses_stay_in_the_memory_of_the_cpu_whichever_device_is_the_default():
    task = float_task(4)

    def case(wires):
        noting, pipeline = Noting(wires), pipeline_of(wires, task, num_microbatches=2)
        expected = step_task(pipeline, task).result.loss
        noting.sent.clear()
        noting.received.clear()
        with torch.device("meta"):
            found = step_task(pipeline, task).result.loss
        control = [each for each in (*noting.sent, *noting.received) if each[1] is Tag.CONTROL]
        return {device for *_, device in control}, len(control), torch.equal(found, expected)

    for devices, num_messages, is_equal in on_ranks(2, case):
        assert devices == {"cpu"}
        assert num_messages == 4  # what the ranks agree on, and the losses
        assert is_equal


# ---- together


def of_ranks(errors, fails_as=None):
    """What each rank raises where those in `errors` fail in what all do together, and how many messages it sent."""

    def case(wires):
        def make():
            if wires.rank in errors:
                raise errors[wires.rank]

        noting = Noting(wires)
        error = error_of(Control(wires).together, make, *([] if fails_as is None else [fails_as]))
        return error, len(noting.sent)

    return on_ranks(3, case, deadline_s=30.0)


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (PartitionError("planted"), "rank 1: planted"),
        (RuntimeError("planted"), "rank 1: RuntimeError: planted"),
        (KeyError(), "rank 1: KeyError: "),
    ],
    ids=["ours", "another", "without a text"],
)
def test_an_error_of_one_rank_is_raised_there_as_it_is_and_told_on_the_others_at_once(error, told):
    begin_s = time.monotonic()

    (first, _), (own, _), (last, _) = found = of_ranks({1: error})

    assert own is error
    assert [type(other) for other in (first, last)] == [ConfigError, ConfigError]
    assert str(first) == str(last) == told
    assert time.monotonic() - begin_s < 15.0
    assert {num_sent for _, num_sent in found} == {2}  # one gather, as where nothing fails


def test_a_rank_whose_result_cannot_be_sent_fails_on_all_ranks_too():
    def case(wires):
        return error_of(Control(wires).together, object if wires.rank == 0 else int)

    own, other = on_ranks(2, case, deadline_s=30.0)

    assert (type(own), own.rank, type(other)) == (PipelineError, 0, ConfigError)
    assert str(other) == f"rank 0: {own}"


def test_where_several_fail_each_raises_its_own_and_the_others_that_of_the_first():
    errors = {1: PartitionError("first"), 2: PartitionError("second")}

    (told, _), (first, _), (second, _) = of_ranks(errors)

    assert [str(told), first, second] == ["rank 1: first", *errors.values()]


def test_the_rank_of_an_error_of_a_step_is_the_one_that_raised_it_unless_it_names_another():
    assert of_ranks({1: PipelineError("planted")})[1][0].rank == 1
    assert of_ranks({1: EndOfData("planted", rank=2)})[1][0].rank == 2


def test_what_is_raised_for_a_failure_is_the_callers_to_choose_also_on_the_rank_that_failed():
    planted, seen = KeyError("planted"), []

    def fails_as(failure):
        seen.append((failure.rank, failure.kind, failure.text, failure.is_expected, failure.local_error))
        return CheckpointError(failure.words)

    errors = [error for error, _ in of_ranks({1: planted}, fails_as)]

    assert [(type(error), str(error)) for error in errors] == [(CheckpointError, "KeyError: 'planted'")] * 3
    assert [error.__cause__ for error in errors] == [None, planted, None]
    told = (1, "KeyError", "'planted'", False)
    assert sorted(seen, key=str) == sorted([(*told, None), (*told, planted), (*told, None)], key=str)


def test_rank_0_alone_does_its_part_and_all_get_its_result_or_its_error():
    def case(wires):
        calls = []
        found = Control(wires).on_rank_0(lambda: calls.append(0) or {"rank": wires.rank})
        return found, len(calls), error_of(Control(wires).on_rank_0, lambda: 1 / 0)

    first, second = on_ranks(2, case)

    assert (first[:2], second[:2]) == (({"rank": 0}, 1), ({"rank": 0}, 0))
    assert isinstance(first[2], ZeroDivisionError)
    assert str(second[2]) == "rank 0: ZeroDivisionError: division by zero"


def test_replicas_gather_along_one_dimension_and_then_the_next():
    def case(places):
        noted = [Noting(transport) for transport in places.transports]
        control = Control.of(places)
        found = control.all_gather_object([places.index, "ä\n"])
        assert [len(each.sent) for each in noted] == [2, 1]
        return found, control.within.all_gather_object(places.index), control.across(places.index)

    for index, (found, within, across) in enumerate(on_mesh(3, 2, case)):
        assert found == [[rank, "ä\n"] for rank in range(6)]
        assert within == [index // 3 * 3 + place for place in range(3)]
        assert across == [index % 3, index % 3 + 3]


def test_a_failure_of_one_replica_is_told_to_all_with_its_places():
    def case(places):
        def make():
            if places.index == 2:
                raise ConfigError("no", key="layers")
            return places.index

        return error_of(Control.of(places).together, make)

    errors = on_mesh(2, 2, case)

    assert str(errors[2]) == "layers: no"
    assert {str(error) for rank, error in enumerate(errors) if rank != 2} == {"rank 2 (pipeline 0, data 1): layers: no"}
