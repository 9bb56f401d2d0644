"""A stream gives each microbatch once and loses none to a failed attempt; a reader holds later ones to the first;
the data of a step are pulled in order, and dropped but for their sizes."""

import pytest
import torch

from penstock.errors import ConfigError, EndOfData, PipelineError
from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.preprocessing import StreamContext
from penstock.execute.batch.stream import Part, Reader, Stream, StreamRules
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
def test_what_is_no_microbatch_no_stream_or_no_rule_for_one_is_an_error_that_says_what_is(item):
    with pytest.raises(PipelineError, match=r"expected a tuple or list .* or ps.Part\(input, "):
        Stream([item]).begin_step(0, context(1), READ)
    with pytest.raises(ConfigError, match="5 of type int gives no microbatches"):
        Stream(5)
    reader = Reader(Stream([item]), 0, context(1), BatchRule(1), StreamRules(has_count=True), read=READ)
    with pytest.raises(PipelineError, match="count weighs microbatches by their targets"):
        reader.begin()  # before anything is pulled


def test_a_layout_tells_everything_that_may_decide_a_shape_and_no_value_of_a_tensor_or_number():
    part = Part(torch.zeros(2, 3), scale=1.5, size=4, mask=torch.ones(2, dtype=torch.bool), target=(None, "sum"))
    wanted = "args[0] float32[2, 3], kwargs['scale'] float, kwargs['size'] int, kwargs['mask'] bool[2], target[1] 'sum'"

    assert part.layout() == wanted
    assert Part(torch.zeros(2, requires_grad=True)).layout() == "args[0] float32[2] that needs a gradient"
    assert Part(None).layout() == "empty"


# ---- one step's way through a stream


def item(rows, length=4):
    return torch.zeros(rows, length), torch.zeros(rows, length)


def reader_of(items, *, rule=None, read=lambda: 0.0, **rules):
    reader = Reader(
        Stream(items), 1, context(len(items)), rule or BatchRule(len(items)), StreamRules(**rules), read=read
    )
    reader.begin()
    return reader


def test_microbatches_come_numbered_and_cut():
    reader = reader_of([item(2)] * 3, rule=BatchRule(3, num_slices=2))

    taken = [reader.next(index) for index in range(3)]

    assert [[(each.index, each.slice, each.size, each.length) for each in slices] for _, slices in taken] == [
        [(index, 0, 2, 2), (index, 1, 2, 2)] for index in range(3)
    ]


@pytest.mark.parametrize(
    ("second", "rules", "text"),
    [
        (item(2, 6), {"num_slices": 2, "has_variable_shapes": True}, r"slices of \[3, 3\], .* of \[2, 2\]"),
        (item(3), {}, r"variable_shapes=True and reduction='sum': a mean needs all sizes"),
        (item(3), {"is_sum": True}, r"create the pipeline with variable_shapes=True$"),
        (item(2, 5), {}, r"create the pipeline with variable_shapes=True$"),
        (item(3), {"has_variable_shapes": True}, r"has 3 rows, microbatch 0 of the step had 2 rows"),
    ],
)
def test_a_microbatch_that_is_not_like_the_first_is_an_error_with_the_way_out(second, rules, text):
    num_slices = rules.get("num_slices", 1)
    rules = {name: value for name, value in rules.items() if name != "num_slices"}
    reader = reader_of([item(2), second], rule=BatchRule(2, num_slices=num_slices), **rules)
    reader.next(0)

    with pytest.raises(PipelineError, match=text):
        reader.next(1)


@pytest.mark.parametrize(
    ("second", "rules"), [(item(2, 5), {}), (item(3), {"is_sum": True}), (item(1, 1), {"is_sum": True})]
)
def test_shapes_that_may_vary_do(second, rules):
    reader = reader_of([item(2), second], has_variable_shapes=True, **rules)

    assert [reader.next(index)[0].args[0].shape for index in range(2)] == [(2, 4), second[0].shape]


def test_a_wait_of_a_step_that_was_refused_is_none_of_the_next_one():
    stream = Stream([item(2)] * 2)
    readers = [Reader(stream, 1, context(2), BatchRule(2), StreamRules(), read=lambda: 0.0) for _ in range(2)]
    readers[0].begin()
    stream.undo_begin()

    readers[1].begin()
    for index in range(2):
        readers[1].next(index)

    assert [wait.microbatch for wait in readers[1].waits] == [1]
