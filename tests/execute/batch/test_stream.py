"""A stream gives each microbatch once and loses none to a failed attempt."""

import pytest
import torch

from penstock.errors import ConfigError, EndOfData, PipelineError
from penstock.execute.batch.preprocessing import StreamContext
from penstock.execute.batch.stream import Part, Stream
from tests.support.local_pipelines import error_of


class Clock:
    """Goes on by one second each time that it is read."""

    now_s = 0.0

    def read(self):
        self.now_s += 1.0
        return self.now_s


READ = Clock().read


def context(number, *, is_training=True, step=0):
    """Of the first microbatch of a step."""
    return StreamContext(0, number, is_training, step)


def test_a_step_takes_first_what_it_looked_at_asks_for_no_more_and_passes_over_what_the_one_before_it_left():
    items = iter([("a", "x"), ["b", "y"], ("c", "z"), ("d", "z")])
    stream = Stream(items)

    looked_at = stream.begin_step(0, context(3), READ)
    taken = [stream.take() for _ in range(2)]

    assert looked_at is taken[0]
    pulled = [(pull.part.args, pull.part.kwargs, pull.part.target) for pull in taken]
    assert pulled == [(("a",), {}, "x"), (("b",), {}, "y")]
    assert stream.begin_step(0, context(1), READ).part.args == ("d",)
    assert stream.position == 3


def test_a_stream_is_of_one_rank():
    stream = Stream([(torch.ones(2), torch.ones(2))] * 4)
    stream.begin_step(0, context(2), READ)

    with pytest.raises(
        PipelineError, match="rank 1 was given the stream of rank 0; give each rank a Stream of its own"
    ):
        stream.begin_step(1, context(2), READ)


def test_a_stream_that_ended_says_so_again_and_again():
    stream = Stream([(0, 0)])
    stream.begin_step(0, context(1), READ)
    stream.take()

    for _ in range(2):
        error = error_of(stream.begin_step, 0, context(1), READ)
        assert isinstance(error, EndOfData)
        assert "rank 0 had 1 microbatches" in str(error)
        stream.undo_begin()


def test_a_stream_that_ends_inside_a_step_names_the_counts():
    stream = Stream([(index, index) for index in range(5)])
    for _ in range(3):
        stream.begin_step(2, context(3), READ)
        stream.take()
        stream.take()
        if stream.num_taken < 5:
            stream.take()
        else:
            break

    with pytest.raises(PipelineError, match="the stream of rank 2 gave 2 of its 3 microbatches, 5 in all"):
        stream.take()


def test_the_wait_for_an_item_and_its_preparation_are_timed_apart():
    clock = Clock()

    def source():
        clock.now_s += 10
        yield "a", "x"

    def prepare(item):
        clock.now_s += 5
        return item

    pull = Stream(source(), preprocess=prepare).begin_step(0, context(1), clock.read)

    assert (pull.begin_s, pull.got_s, pull.end_s) == (1.0, 12.0, 18.0)


@pytest.mark.feature("G4")
def test_the_context_of_a_preprocess_is_that_of_its_step_after_a_refused_and_a_failed_one_too():
    notes = []

    def prepare(item, context):
        notes.append((item, context.index, context.number, context.is_training, context.step))
        if item == "c" and len(notes) < 5:
            raise OSError("planted")
        return item, context.index

    stream = Stream("abcdef", preprocess=prepare)
    stream.begin_step(0, context(2, step=4), READ)
    stream.undo_begin()  # the ranks refused the step, and then evaluate
    stream.begin_step(0, context(3, is_training=False, step=4), READ)
    taken = [stream.take().part.args for _ in range(2)]
    assert isinstance(error_of(stream.take), OSError)
    stream.begin_step(0, context(2, step=4), READ)
    taken += [stream.take().part.args for _ in range(2)]

    assert taken == [("a",), ("b",), ("d",), ("e",)]
    assert notes == [
        ("a", 0, 2, True, 4),
        ("a", 0, 3, False, 4),
        ("b", 1, 3, False, 4),
        ("c", 2, 3, False, 4),
        ("d", 0, 2, True, 4),
        ("e", 1, 2, True, 4),
    ]


@pytest.mark.parametrize("item", [torch.zeros(2), (torch.zeros(2),), {"x": 1}, None])
def test_what_is_no_microbatch_or_no_stream_is_an_error_that_says_what_is(item):
    with pytest.raises(PipelineError, match=r"expected a tuple or list .* or ps.Part\(input, "):
        Stream([item]).begin_step(0, context(1), READ)
    with pytest.raises(ConfigError, match="5 of type int gives no microbatches"):
        Stream(5)


def test_a_layout_tells_everything_that_may_decide_a_shape_and_no_value_of_a_tensor_or_number():
    part = Part(torch.zeros(2, 3), scale=1.5, size=4, mask=torch.ones(2, dtype=torch.bool), target=(None, "sum"))
    wanted = "args[0] float32[2, 3], kwargs['scale'] float, kwargs['size'] int, kwargs['mask'] bool[2], target[1] 'sum'"

    assert part.layout() == wanted
    assert Part(torch.zeros(2, requires_grad=True)).layout() == "args[0] float32[2] that needs a gradient"
    assert Part(None).layout() == "empty"


def begun(stream, asked=None):
    """Begin a step of the number that the stream says, and return the number."""
    number = stream.number_of_step(asked)
    stream.begin_step(0, context(number), READ)
    return number


def test_a_stream_says_how_many_each_step_takes_and_again_after_a_refused_one():
    stream = Stream([("a", "x")] * 9, microbatches=iter([2, 3, 4]))

    assert begun(stream) == 2
    stream.undo_begin()
    assert begun(stream) == 2
    assert begun(stream) == 3  # the step before it failed: what it had left is passed over
    assert stream.position == 2
    stream.undo_begin()
    stream.number_of_step(None)
    stream.undo_begin()  # refused before it was begun
    assert begun(stream) == 3
    assert begun(stream) == 4
    assert stream.position == 5
    with pytest.raises(EndOfData, match="microbatches= have all been used"):
        stream.number_of_step(None)


def test_a_stream_without_numbers_takes_what_a_step_asks_for():
    stream = Stream([("a", "x")] * 9)

    assert stream.number_of_step(None) is None
    assert begun(stream, 3) == 3
    assert begun(stream, 2) == 2
    assert stream.position == 3


def test_a_refusal_before_a_step_begins_leaves_what_the_failed_step_before_it_has_left_to_be_passed_over():
    stream = Stream([("a", "x"), ("b", "x"), ("c", "x")])
    begun(stream, 2)  # and fails
    stream.number_of_step(1)
    stream.undo_begin()

    begun(stream, 1)

    assert stream.take().part.args == ("c",)
