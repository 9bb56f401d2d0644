"""A batch that comes one microbatch after another gives what the same batch gives as a whole, and is held no longer."""

import gc
import re
import warnings
import weakref
from itertools import pairwise

import numpy as np
import pytest
import torch

from penstock.errors import EndOfData, PenstockWarning, PipelineError, StepRefused
from penstock.execute.batch.microbatch import BatchSpec, PreSplit, Replicate
from penstock.execute.batch.stream import Part, Stream
from penstock.execute.observing.clock import Clock
from penstock.ir.operations import Op
from penstock.lowering import lower
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.support.local_pipelines import (
    NEARLY,
    WIDTH,
    Around,
    Masked,
    Task,
    assert_errors,
    assert_gradients,
    difference,
    error_of,
    float_layers,
    float_task,
    gradients_of,
    on_pipelines,
    on_ranks,
    outcome_of,
    pipeline_of,
    same_outcomes,
    square_loss,
    step_task,
    values,
    zero,
)
from tests.support.reference import reference_step

M = 4
FLOAT64 = torch.float64
FAMILIES = ["1f1b", "gpipe", "zb-h1", "interleaved-1f1b", "looped-bfs", "zbv", "dualpipe-v", "dualpipe"]


def deep_task(num_microbatches):
    """Eight layers, so that four ranks may hold two stages each; every row is a sequence."""
    inputs, target = (values(seed, 2 * num_microbatches, 4, WIDTH, dtype=FLOAT64) for seed in (1, 2))
    return Task(lambda: float_layers(FLOAT64, 8), (inputs,), target)


def pieces(task, num_microbatches=M):
    """The microbatches of a task's batch, as an iterator gives them."""
    return list(zip(*(tensor.chunk(num_microbatches) for tensor in (*task.inputs, task.target)), strict=True))


def needs_data(pipeline):
    placement = pipeline.schedule.placement
    ends = (placement.previous_stage, placement.next_stage)
    return any(column[stage.index] < 0 for stage in pipeline.stages for column in ends)


def stream_on(pipeline, items, **options):
    """The arguments of a step: a stream of its own where this rank needs data, else nothing."""
    return (Stream(items, **options),) if needs_data(pipeline) else ()


def refilled(items, write):
    """Give each item in the same memory, as a loader does that reads into one buffer."""
    buffers = [tensor.clone() for tensor in items[0]]
    for item in items:
        for buffer, tensor in zip(buffers, item, strict=True):
            write(buffer, tensor)
        yield tuple(buffers)


def write_by_torch(buffer, tensor):
    buffer.copy_(tensor)


def write_by_numpy(buffer, tensor):
    """As readinto() does, of which torch does not know."""
    buffer.numpy()[:] = tensor.numpy()


@pytest.mark.parametrize(("num_ranks", "write"), [(1, write_by_torch), (2, write_by_numpy)])
@pytest.mark.parametrize("schedule", [name for name in FAMILIES if name != "dualpipe"])
def test_a_loader_may_fill_one_buffer_again_and_again(schedule, num_ranks, write):
    task = deep_task(M)

    found = on_pipelines(num_ranks, task, lambda own: streamed(own, refilled(pieces(task), write)), schedule)

    assert difference(found, task.reference(M), **NEARLY) == []


def streamed(pipeline, items, **options):
    """What a step does with these microbatches, one after another."""
    return outcome_of(pipeline, pipeline.step(*stream_on(pipeline, items, **options), return_outputs=True))


def halved(task):
    """A task with half the inputs."""
    return Task(task.make_layers, (task.inputs[0] * 0.5,), task.target)


# ---- exactness


@pytest.mark.slow
@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_streamed_batch_gives_what_the_whole_one_gives_bit_for_bit(family, num_ranks):
    task = deep_task(8)

    outcomes, whole = both(num_ranks, task, family, 8)

    assert same_outcomes(outcomes, whole)
    assert difference(outcomes, task.reference(8), **NEARLY) == []


@pytest.mark.feature("A2")
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_streamed_batch_is_bitwise_gradient_accumulation_on_one_process(num_ranks):
    task = float_task(2 * M)

    found = on_pipelines(num_ranks, task, lambda pipeline: streamed(pipeline, pieces(task)))
    assert difference(found, task.reference(M)) == []


def test_streamed_microbatches_may_be_cut_into_slices():
    assert same_outcomes(*both(2, deep_task(M), "seq1f1b", slices=2))


def test_evaluate_takes_a_stream_too():
    task = float_task(2 * M)

    def case(pipeline):
        streamed_result = pipeline.evaluate(*stream_on(pipeline, pieces(task)))
        return streamed_result.loss, pipeline.evaluate(*task.inputs, target=task.target).loss

    for found, expected in on_pipelines(2, task, case):
        assert torch.equal(found, expected)


@pytest.mark.feature("G5")
@pytest.mark.parametrize(("has_rows", "options"), [(True, {}), (False, {"specs": BatchSpec(kwargs=Replicate())})])
def test_keywords_come_with_the_parts_of_a_stream(has_rows, options):
    mask = values(5, 2 * M, 1) if has_rows else values(6, WIDTH)
    task = float_task(2 * M)
    task.make_layers = lambda: [Masked(seed) for seed in range(3)]
    task.keywords, task.options = {"mask": mask}, options
    parts = zip(pieces(task), mask.chunk(M) if has_rows else [mask] * M, strict=True)
    items = [Part(inputs, target=target, mask=part) for (inputs, target), part in parts]

    found = on_pipelines(3, task, lambda pipeline: outcome_of(pipeline, pipeline.step(Stream(items))))

    assert difference(found, task.reference(M)) == []


def test_only_the_first_rank_may_stream_while_the_last_one_has_its_targets_as_a_whole():
    task = float_task(2 * M)

    def case(pipeline):
        if pipeline.rank == 0:
            return outcome_of(pipeline, pipeline.step(Stream(Part(piece[0]) for piece in pieces(task))))
        return outcome_of(pipeline, pipeline.step(target=task.target))

    assert difference(on_pipelines(2, task, case), task.reference(M)) == []


# ---- when data are pulled


class Noting(Around):
    """A layer that notes when it runs."""

    def __init__(self, log, seed):
        super().__init__(seed)
        self._log = log

    def forward(self, features):
        self._log.append("F")
        return self.inner(features)


def noted(log, items):
    for index, item in enumerate(items):
        log.append(f"pull {index}")
        yield item


@pytest.mark.feature("G2")
def test_the_first_forward_starts_before_the_second_microbatch_is_pulled():
    task, log = float_task(2 * M), []
    pipeline = Pipeline([Noting(log, 0)], "1f1b", M, square_loss)

    pipeline.step(Stream(noted(log, pieces(task))))

    assert log == [entry for index in range(M) for entry in (f"pull {index}", "F")]


@pytest.mark.feature("G2")
def test_the_next_microbatch_is_pulled_while_the_rank_would_wait_and_none_for_the_next_step():
    task = float_task(2 * M)

    def case(wires):
        log, items = [], pieces(task) * 2
        pipeline = Pipeline([Noting(log, seed) for seed in range(2)], "1f1b", M, square_loss, transport=wires)
        for stage in pipeline.stages:
            for name, parameter in stage.named_parameters():
                if name.endswith("0.weight"):
                    parameter.register_post_accumulate_grad_hook(lambda _: log.append("B"))
        pipeline.step(Stream(noted(log, items)))
        return log

    first, last = on_ranks(2, case)

    # The first rank: its first wait for a gradient comes after the second forward, and the third pull before it.
    assert first == ["pull 0", "F", "pull 1", "F", "pull 2", "B", "F", "pull 3", "B", "F", "B", "B"]
    assert last == ["pull 0", "F", "B", "pull 1", "F", "B", "pull 2", "F", "B", "pull 3", "F", "B"]


def loaded_early(program):
    """The program with all loads of each rank in front of its other rows."""
    return program.reordered(
        np.argsort(program.op[begin:end] != Op.LOAD, kind="stable") for begin, end in pairwise(program.offsets)
    )


@pytest.mark.feature("B14", "G2")
def test_a_load_says_when_a_microbatch_is_pulled():
    task, by_loads = float_task(2 * M), lower(build("1f1b", ranks=2, microbatches=M), loads=True)

    def case(wires, program):
        log = []
        pipeline = Pipeline([Noting(log, seed) for seed in range(2)], program, M, square_loss, transport=wires)
        pipeline.step(Stream(noted(log, pieces(task))))
        return log

    each_in_turn = [entry for index in range(M) for entry in (f"pull {index}", "F")]
    assert on_ranks(2, case, by_loads) == [each_in_turn] * 2
    first, _ = on_ranks(2, case, loaded_early(by_loads))
    assert first == ["pull 0", "pull 1", "pull 2", "pull 3", "F", "F", "F", "F"]


@pytest.mark.feature("B14", "G2")
@pytest.mark.parametrize("family", ["1f1b", "zbv", "dualpipe", "seq1f1b"])
def test_loads_change_no_bit(family):
    schedule = build(family, ranks=2, microbatches=8, slices=2 if family == "seq1f1b" else 1)
    task, copies = deep_task(8), [(0, 2), (1, 3)] if family == "dualpipe" else []

    plain, with_loads = (
        on_pipelines(2, task, lambda own: streamed(own, pieces(task, 8)), program, None)
        for program in (lower(schedule, tied_groups=copies), lower(schedule, tied_groups=copies, loads=True))
    )

    assert same_outcomes(with_loads, plain)


def pulls(num_ranks, schedule):
    """What each rank pulls in a step of eight microbatches."""
    task = deep_task(8)

    def case(pipeline):
        log = []
        pipeline.step(Stream(noted(log, pieces(task, 8))))
        return log

    return on_pipelines(num_ranks, task, case, schedule, 8)


def test_a_rank_between_is_never_asked_for_data():
    assert [len(log) for log in pulls(3, "1f1b")] == [8, 0, 8]


@pytest.mark.feature("G2")
def test_a_schedule_that_takes_microbatches_out_of_order_pulls_each_once():
    assert pulls(2, "dualpipe") == [[f"pull {index}" for index in range(8)]] * 2


# ---- how long data are held


class Counting:
    """Gives microbatches, and notes before each how many of those before it are still alive."""

    def __init__(self, items):
        self._items = [tuple(tensor.clone() for tensor in item) for item in items]
        self._given = []
        self.alive = []

    def __iter__(self):
        while self._items:
            self.alive.append(self.count())
            item = self._items.pop(0)
            self._given += [weakref.ref(tensor) for tensor in item]
            yield item
            del item

    def count(self):
        return sum(ref() is not None for ref in self._given)


@pytest.mark.feature("X7")
@pytest.mark.parametrize(("schedule", "most"), [("1f1b", 2), ("gpipe", 8)])
def test_a_microbatch_is_let_go_when_its_last_use_on_the_rank_is_over(schedule, most):
    task = float_task(16)

    def case(pipeline):
        source = Counting(pieces(task, 8))
        pipeline.step(Stream(source))
        gc.collect()
        return source.alive, source.count()

    (first, first_left), (last, last_left) = on_pipelines(2, task, case, schedule, 8)

    assert (first_left, last_left) == (0, 0)
    # What the backward of the first layer needs stays, which is its input; the target does not.
    assert max(first) <= most
    assert max(last) <= (1 if schedule == "1f1b" else most)


@pytest.mark.feature("X7")
def test_parts_that_may_be_spent_are_let_go_and_the_others_kept():
    task = float_task(16)

    def case(wires, is_consumed):
        inputs = PreSplit([piece[0].clone() for piece in pieces(task, 8)], is_consumed=is_consumed)
        target = PreSplit([piece[1].clone() for piece in pieces(task, 8)], is_consumed=is_consumed)
        alive, refs = [], [weakref.ref(part) for part in inputs.parts + target.parts]

        def loss(output, wanted):
            alive.append(sum(ref() is not None for ref in refs))
            return square_loss(output, wanted)

        pipeline = Pipeline(float_layers(), "1f1b", 8, loss, transport=wires)
        result = pipeline.step(inputs, target=target)
        return outcome_of(pipeline, result), alive, len(inputs.parts)

    ((spent, alive, num_parts),) = on_ranks(1, case, True)
    ((kept, alive_kept, num_kept),) = on_ranks(1, case, False)

    assert alive == [16, 14, 12, 10, 8, 6, 4, 2]
    assert alive_kept == [16] * 8
    assert (num_parts, num_kept) == (0, 8)
    assert same_outcomes([spent], [kept])


# ---- the time that data cost


class FakeTime:
    def __init__(self):
        self.now_s = 100.0

    def read(self):
        return self.now_s


def slow(time, items, durations_s):
    for item, duration_s in zip(items, durations_s, strict=True):
        time.now_s += duration_s
        yield item


def test_a_recorded_step_counts_no_wait_for_data_as_work():
    time, task = FakeTime(), float_task(2 * M)
    pipeline = pipeline_of(None, task, clock=Clock(time.read))

    pipeline.step(Stream(slow(time, pieces(task), [1.0] * M)), record=True)

    assert set(pipeline.timeline.end_s - pipeline.timeline.start_s) == {0.0}
    assert pipeline.timeline.makespan_s == M - 1  # the first microbatch came before the step began


@pytest.mark.feature("X5")
def test_a_recorded_step_tells_on_every_rank_who_waited_for_which_data_and_when():
    """All ranks read one clock, which only the data of the last one move."""
    time, task = FakeTime(), float_task(2 * M)
    clock = Clock(time.read, "one host")

    def recorded(wires):
        pipeline = pipeline_of(wires, task, clock=clock)
        items = slow(time, pieces(task), [2.0, 0.0, 0.5, 0.25]) if wires.rank else pieces(task)
        result = pipeline.step(*stream_on(pipeline, items), record=True)
        timeline = pipeline.timeline
        pipeline.step(*task.inputs, target=task.target, record=True)
        return result.data_times, timeline, pipeline.timeline

    for rank, (times, timeline, without) in enumerate(on_ranks(2, recorded)):
        assert without.data_waits == ()
        assert [wait.microbatch for wait in timeline.data_waits] == [*range(M), *range(M)]
        assert [wait.rank for wait in timeline.data_waits] == [0] * M + [1] * M
        lengths_s = [wait.end_s - wait.begin_s for wait in timeline.data_waits]
        assert lengths_s[M:] == [2.0, 0.0, 0.5, 0.25]
        own = slice(rank * M, (rank + 1) * M)
        assert times.waited_s + times.prepared_s == pytest.approx(sum(lengths_s[own]))
        first, second, third, fourth = timeline.data_waits[M:]
        assert first.end_s <= 0 <= second.begin_s <= third.begin_s < third.end_s <= fourth.begin_s


@pytest.mark.feature("G3")
def test_slow_data_are_warned_of_once_a_step_with_rank_microbatch_and_milliseconds():
    time, task = FakeTime(), float_task(2 * M)
    pipeline = pipeline_of(None, task, clock=Clock(time.read), data_warn_s=0.1)
    stream = Stream(slow(time, pieces(task) * 3, [0.0, 0.0, 0.25, 0.5] + [0.1] * 4 + [0.15] * 4))

    with warnings.catch_warnings(record=True) as first:
        warnings.simplefilter("always")
        pipeline.step(stream)
    with warnings.catch_warnings():
        warnings.simplefilter("error", PenstockWarning)
        pipeline.step(stream)
    with pytest.warns(PenstockWarning, match="rank 0 waited 150 ms for the data of microbatch 0"):
        pipeline.step(stream)

    assert [str(each.message) for each in first if each.category is PenstockWarning] == [
        "rank 0 waited 250 ms for the data of microbatch 2 and prepared them for 0 ms, more than data_warn_s = 0.1; "
        "have them ready earlier, as a data loader with workers does"
    ]


@pytest.mark.feature("G4")
def test_prepared_items_give_what_items_that_were_ready_give():
    task = float_task(2 * M)
    raw = [{"x": piece[0] - 1, "y": piece[1]} for piece in pieces(task)]

    def prepare(item):
        return item["x"] + 1, item["y"]

    found = on_pipelines(2, task, lambda pipeline: streamed(pipeline, raw, preprocess=prepare))

    ready = Task(task.make_layers, (torch.cat([item["x"] + 1 for item in raw]),), task.target)
    assert difference(found, ready.reference(M)) == []


@pytest.mark.feature("G4")
def test_a_hook_is_told_which_microbatch_of_which_step_it_prepares_and_computes_the_same():
    """Ranks without data of their own are given none; step 1 is refused, and an evaluation takes what it looked at."""
    task = float_task(2 * M)
    raw = [(piece[0] - index, piece[1]) for index, piece in enumerate(pieces(task))]

    def case(wires):
        notes = []

        def prepare(item, context):
            notes.append((context.step, context.is_training, context.index, context.number))
            return item[0] + context.index, item[1]

        pipeline = pipeline_of(wires, task)
        stream = stream_on(pipeline, raw * 3, preprocess=prepare)
        outcome = outcome_of(pipeline, pipeline.step(*stream))
        refused = error_of(pipeline.step, *(stream if wires.rank else (torch.zeros(1),)))
        evaluated = pipeline.evaluate(*stream).loss
        pipeline.step(*stream)
        return outcome, refused, evaluated, notes

    found = on_ranks(2, case)

    ready = Task(task.make_layers, (torch.cat([item[0] + index for index, item in enumerate(raw)]),), task.target)
    assert difference([outcome for outcome, *_ in found], ready.reference(M)) == []
    for rank, (outcome, refused, evaluated, notes) in enumerate(found):
        assert isinstance(refused, StepRefused)
        assert evaluated == outcome.result.loss
        looked_at = [(1, True, 0, M)] * rank  # by the step that was refused
        expected = [(0, True, index, M) for index in range(M)] + looked_at
        expected += [(1, False, index, M) for index in range(M)] + [(1, True, index, M) for index in range(M)]
        assert notes == expected


# ---- data that end, or go on


@pytest.mark.feature("G7")
def test_data_that_end_inside_a_step_end_it_on_all_ranks_with_the_counts_and_new_data_go_on():
    task = float_task(2 * M)

    def case(pipeline):
        stream = stream_on(pipeline, pieces(task)[:2])
        errors = [error_of(pipeline.step, *stream) for _ in range(2)]
        zero(pipeline)
        return *errors, streamed(pipeline, pieces(task))

    inside, after, outcomes = zip(*on_pipelines(3, task, case), strict=True)

    text = r"the data ended inside a step: the stream of rank [02] gave 2 of its 4 microbatches"
    for error in inside:
        assert isinstance(error, PipelineError)
        assert not isinstance(error, StepRefused)
        assert re.search(text, str(error))
    assert_errors(after, EndOfData)
    assert difference(outcomes, task.reference(M)) == []


def test_what_a_step_does_not_take_stays_for_the_next_one():
    task = float_task(2 * M)

    def case(pipeline):
        stream = stream_on(pipeline, iter(two_batches(task)))
        pipeline.step(*stream)
        zero(pipeline)
        return outcome_of(pipeline, pipeline.step(*stream)), error_of(pipeline.step, *stream)

    outcomes, errors = zip(*on_pipelines(2, task, case), strict=True)

    assert difference(outcomes, halved(task).reference(M)) == []
    assert_errors(errors, EndOfData, "the stream of rank 0 had 8 microbatches, and all of them have been used")


class Failing(Around):
    def __init__(self, seed, fails_at):
        super().__init__(seed)
        self._fails_at = fails_at
        self._num_calls = 0

    def forward(self, features):
        self._num_calls += 1
        if self._num_calls == self._fails_at:
            raise OSError("planted")
        return self.inner(features)


@pytest.mark.parametrize(("item", "call"), [(0, 0), (2, 0), (None, 1), (None, 3)])
def test_after_data_or_a_step_that_failed_all_ranks_go_on_with_the_same_microbatches(item, call):
    """The step of three ranks fails by an item or by a call of a layer; the next one takes the microbatches behind."""
    task = float_task(2 * M)
    items = two_batches(task)

    def case(wires):
        def prepare(prepared):
            if wires.rank == 0 and item is not None and prepared is items[item]:
                raise OSError("planted")
            return prepared

        layers = [Failing(seed, call if seed == 1 else 0) for seed in range(3)]
        pipeline = Pipeline(layers, "1f1b", M, square_loss, transport=wires)
        stream = stream_on(pipeline, items, preprocess=prepare)
        error = error_of(pipeline.step, *stream)
        zero(pipeline)
        return error, outcome_of(pipeline, pipeline.step(*stream))

    errors, outcomes = zip(*on_ranks(3, case), strict=True)

    assert_errors(errors, PipelineError, "OSError: planted")
    second = Task(lambda: [Failing(seed, 0) for seed in range(3)], halved(task).inputs, task.target)
    assert difference(outcomes, second.reference(M)) == []


def test_a_refused_step_leaves_the_stream_where_it_was():
    task = float_task(2 * M)

    def case(pipeline):
        stream = stream_on(pipeline, pieces(task))
        errors = [error_of(pipeline.evaluate if pipeline.rank else pipeline.step, *stream) for _ in range(2)]
        return *errors, outcome_of(pipeline, pipeline.step(*stream))

    *errors, outcomes = zip(*on_pipelines(2, task, case), strict=True)

    for each in errors:
        assert_errors(each, StepRefused, "rank 0 is in step (", "rank 1 in evaluate (")
    assert difference(outcomes, task.reference(M)) == []


# ---- microbatches that are not alike


def sum_loss(output, target):
    return ((output - target) ** 2).sum()


def test_a_sum_takes_microbatches_of_any_size():
    items = [(values(seed, size, WIDTH), values(seed + 10, size, WIDTH)) for seed, size in enumerate([2, 1, 3, 2])]
    layers = float_layers()
    for inputs, target in items:
        reference_step(layers, (inputs,), {}, target, loss=sum_loss, num_microbatches=1, reduction="sum")

    def case(pipeline):
        pipeline.step(*stream_on(pipeline, items))
        return gradients_of(pipeline.named_parameters())

    options = {"variable_shapes": True, "reduction": "sum"}
    assert_gradients(on_pipelines(2, Task(float_layers, (), None, sum_loss), case, **options), layers)


# ---- wrong use


@pytest.mark.parametrize(
    ("args", "options", "text"),
    [
        ((Stream([]), values(1, 4, WIDTH)), {}, "pass it alone"),
        ((Stream([]),), {"target": values(1, 4, WIDTH)}, "pass it alone"),
        ((values(1, 4, WIDTH),), {"target": Stream([])}, "pass it alone"),
        ((Stream([Part(values(1, 4, WIDTH), hidden=1)]),), {}, "no layer's forward names 'hidden'"),
        ((Stream([Part(target=values(1, 4, WIDTH))]),), {}, "was given no inputs"),
        ((Stream([(values(1, 4, WIDTH), values(1, 3, WIDTH))]),), {}, "expected the same rows"),
    ],
)
def test_wrong_streams_are_refused_with_the_way_out(args, options, text):
    pipeline = pipeline_of(None, float_task(2 * M))

    error = error_of(pipeline.step, *args, **options)

    assert isinstance(error, StepRefused)
    assert text in str(error)


def both(num_ranks, task, schedule="1f1b", num_microbatches=M, **options):
    """What pipelines do with a streamed batch, and with the same one as a whole."""
    items = pieces(task, num_microbatches)
    bodies = (lambda own: streamed(own, items), lambda own: step_task(own, task))
    return [on_pipelines(num_ranks, task, body, schedule, num_microbatches, **options) for body in bodies]


def two_batches(task):
    """The microbatches of a task, and those of its half."""
    return pieces(task) + pieces(halved(task))
