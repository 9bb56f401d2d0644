"""A stream gives each microbatch once, knows where it stands, and loses none to a failed attempt."""

import pytest
import torch

from penstock.errors import ConfigError, EndOfData, PipelineError
from penstock.execute.batch.stream import DataTimes, Part, Stream
from tests.local_pipelines import error_of


class Clock:
    """Goes on by one second each time that it is read."""

    now_s = 0.0

    def read(self):
        self.now_s += 1.0
        return self.now_s


READ = Clock().read


def inputs_of(pull):
    return pull.part.args[0]


def test_what_a_step_looked_at_first_is_what_it_takes_first():
    stream = Stream([("a", "x"), ["b", "y"]])

    looked_at = stream.begin_step(0, 2, READ)
    taken = [stream.take(0, READ) for _ in range(2)]

    assert looked_at is taken[0]
    assert [(pull.part.args, pull.part.kwargs, pull.part.target) for pull in taken] == [
        (("a",), {}, "x"),
        (("b",), {}, "y"),
    ]


def test_nothing_is_pulled_before_it_is_asked_for():
    items = iter([(index, index) for index in range(4)])

    Stream(items).begin_step(0, 2, READ)

    assert list(items) == [(1, 1), (2, 2), (3, 3)]


def test_what_a_step_left_is_passed_over_by_the_next_one():
    stream = Stream([(index, index) for index in range(6)])
    stream.begin_step(0, 3, READ)
    stream.take(0, READ)

    assert inputs_of(stream.begin_step(0, 3, READ)) == 3
    assert stream.position == 3


def test_a_step_that_was_refused_begins_again_with_the_same_microbatch():
    stream = Stream([(index, index) for index in range(6)])
    for _ in range(2):
        stream.begin_step(0, 3, READ)
        stream.undo_begin()

    again = stream.begin_step(0, 3, READ)
    assert inputs_of(again) == 0
    assert not again.is_of_this_step  # nobody waits for it any more
    assert stream.position == 0


def test_a_stream_that_ended_says_so_again_and_again():
    stream = Stream([(0, 0)])
    stream.begin_step(0, 1, READ)
    stream.take(0, READ)

    for _ in range(2):
        error = error_of(stream.begin_step, 0, 1, READ)
        assert isinstance(error, EndOfData)
        assert "rank 0 had 1 microbatches" in str(error)
        stream.undo_begin()


def test_a_stream_that_ends_inside_a_step_names_the_counts():
    stream = Stream([(index, index) for index in range(5)])
    for _ in range(3):
        stream.begin_step(2, 3, READ)
        stream.take(2, READ)
        stream.take(2, READ)
        if stream.num_taken < 5:
            stream.take(2, READ)
        else:
            break

    with pytest.raises(PipelineError, match="the stream of rank 2 gave 2 of its 3 microbatches, 5 in all"):
        stream.take(2, READ)


def test_an_item_that_could_not_be_prepared_for_a_refused_step_is_tried_again():
    attempts = []

    def prepare(item):
        attempts.append(item)
        if len(attempts) == 1:
            raise OSError("for once")
        return item, item

    stream = Stream(iter("ab"), preprocess=prepare)

    assert isinstance(error_of(stream.begin_step, 0, 1, READ), OSError)
    stream.undo_begin()
    assert inputs_of(stream.begin_step(0, 1, READ)) == "a"
    assert attempts == ["a", "a"]


def test_an_item_that_could_not_be_prepared_is_passed_over_with_its_step():
    def prepare(item):
        if item == "b":
            raise OSError("always")
        return item, item

    stream = Stream(iter("abc"), preprocess=prepare)
    stream.begin_step(0, 2, READ)
    stream.take(0, READ)
    error_of(stream.take, 0, READ)

    assert inputs_of(stream.begin_step(0, 1, READ)) == "c"


def test_the_wait_for_an_item_and_its_preparation_are_timed_apart():
    clock = Clock()

    def source():
        clock.now_s += 10
        yield "a", "x"

    def prepare(item):
        clock.now_s += 5
        return item

    pull = Stream(source(), preprocess=prepare).begin_step(0, 1, clock.read)

    assert pull.times == DataTimes(11.0, 6.0)
    assert (pull.begin_s, pull.end_s) == (1.0, 18.0)


def test_a_stream_belongs_to_the_rank_that_used_it_first():
    stream = Stream([(0, 0)] * 3)
    stream.begin_step(1, 1, READ)

    with pytest.raises(PipelineError, match="rank 2 was given the stream of rank 1"):
        stream.begin_step(2, 1, READ)


@pytest.mark.parametrize("item", [torch.zeros(2), (torch.zeros(2),), {"x": 1}, None])
def test_what_is_no_microbatch_is_an_error_that_says_what_one_is(item):
    with pytest.raises(PipelineError, match="expected a tuple or list"):
        Stream([item]).begin_step(0, 1, READ)


def test_what_cannot_be_iterated_over_is_refused_at_once():
    with pytest.raises(ConfigError, match="5 of type int gives no microbatches"):
        Stream(5)


def test_a_layout_tells_everything_that_may_decide_a_shape_and_no_value_of_a_tensor():
    part = Part(torch.zeros(2, 3), scale=1.5, size=4, mask=torch.ones(2, dtype=torch.bool), target=(None, "sum"))
    wanted = "args[0] float32[2, 3], kwargs['scale'] float, kwargs['size'] 4, kwargs['mask'] bool[2], target[1] 'sum'"

    assert part.layout() == wanted
    assert Part(torch.zeros(2, requires_grad=True)).layout() == "args[0] float32[2] that needs a gradient"
    assert Part(None).layout() == "empty"
