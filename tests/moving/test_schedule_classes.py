"""A class that is written for torch's pipelining, or PiPPy's, becomes a schedule and trains as one process does."""

import numpy as np
import pytest
import torch
from torch.distributed.pipelining import schedules as torchs

import penstock as ps
from penstock.errors import ConfigError, ScheduleError
from penstock.moving import torch_pipelining as moved
from penstock.moving.schedule_classes import schedule_of_class
from penstock.moving.torchtitan import pipeline_llm
from tests.moving.own_layers import assert_gradients, batch, gradients, own_stage, reference
from tests.support.local_pipelines import error_of, on_ranks, square_loss

OF_TORCH = {
    torchs.ScheduleGPipe: ("gpipe", 1, {}),
    torchs.Schedule1F1B: ("1f1b", 1, {}),
    torchs.ScheduleInterleaved1F1B: ("interleaved-1f1b", 2, {}),
    torchs.ScheduleLoopedBFS: ("looped-bfs", 2, {"backward_order": "descending"}),
    torchs.ScheduleInterleavedZeroBubble: ("interleaved-zb", 2, {}),
    torchs.ScheduleZBVZeroBubble: ("zbv", 2, {}),
}


class TwoByTwo(torchs.PipelineScheduleSingle):
    """Two forwards, then their backwards, the later one first; and again."""

    def _step_microbatches(self, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None, **options):
        arg_mbs, kwarg_mbs = self._check_inputs(arg_mbs, kwarg_mbs, target_mbs, losses)
        self._initialize_stage(arg_mbs[0], kwarg_mbs[0], target_mbs[0])
        for first in range(0, self._n_microbatches, 2):
            for index in (first, first + 1):
                for work in torchs._sorted_batch_p2p(self._stage.get_fwd_recv_ops(index)).values():
                    torchs._wait_batch_p2p(work)
                output = self._stage.forward_one_chunk(index, arg_mbs[index], kwarg_mbs[index])
                torchs._batch_p2p(self._stage.get_fwd_send_ops(index))
                self._maybe_compute_loss(self._stage, output, target_mbs, index)
            for index in (first + 1, first):
                torchs._batch_p2p(self._stage.get_bwd_recv_ops(index))
                self._stage.backward_one_chunk(index, loss=self._maybe_get_loss(self._stage, index))
                torchs._batch_p2p(self._stage.get_bwd_send_ops(index))
        self._stage.perform_reduce_grad(self._n_microbatches)
        self._update_losses(self._stage, losses)


class OfPiPPy:
    """PiPPy's stages count their microbatches themselves."""

    def __init__(self, stage, n_microbatches, loss_fn=None):
        self._stage, self._num = stage, n_microbatches

    def _step_microbatches(self, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None):
        for args in arg_mbs:
            self._stage.forward_one_chunk(args, {})
        for _ in range(self._num):
            self._stage.backward_one_chunk(loss=None)


class SplitAtTheEnd(torchs.PipelineScheduleMulti):
    """Each rank runs its two stages in turn, and weight gradients come last; the base class runs the order."""

    def __init__(self, stages, n_microbatches, loss_fn=None, **options):
        super().__init__(stages, n_microbatches, loss_fn, **options)
        numbers, size = range(n_microbatches), self.pp_group_size
        for rank in range(size):
            first, second = rank, rank + size
            words = [f"{stage}F{number}" for stage in (first, second) for number in numbers]
            words += [f"{stage}I{number}" for stage in (second, first) for number in numbers]
            words += [f"{stage}W{number}" for stage in (second, first) for number in numbers]
            self.pipeline_order[rank] = [torchs._Action.from_str(word) for word in words]


@pytest.mark.feature("B17")
@pytest.mark.parametrize("schedule", OF_TORCH)
def test_torchs_own_classes_are_recorded_as_the_families_that_have_their_orders(schedule):
    family, stages_per_rank, options = OF_TORCH[schedule]
    known = ps.build(family, ranks=2, microbatches=6, stages_per_rank=stages_per_rank, **options)

    recorded = schedule_of_class(schedule, ranks=2, microbatches=6, stages_per_rank=stages_per_rank)

    assert recorded.digest() == known.digest()


@pytest.mark.feature("B17")
@pytest.mark.parametrize("schedule", [TwoByTwo, OfPiPPy, SplitAtTheEnd])
def test_a_class_trains_as_one_process_does(schedule):
    indices = {0: [0, 2], 1: [1, 3]} if schedule is SplitAtTheEnd else {0: [0], 1: [1]}
    num_stages = sum(map(len, indices.values()))

    def case(transport):
        stages = [moved.PipelineStage(own_stage(index), index, num_stages) for index in indices[transport.rank]]
        moving = moved.Schedule(schedule, stages, 4, square_loss, transport=transport)
        inputs, target = batch(8)
        moving.step(inputs, target=target)
        moving.close()
        return gradients({stage.stage_index: stage.submod for stage in stages}), moving.pipeline.schedule

    outcomes = on_ranks(2, case)

    ps.check(outcomes[0][1])
    assert outcomes[0][1].name == schedule.__name__
    assert_gradients([found for found, _ in outcomes], reference(num_stages, 4)[1], tolerance=1e-12)


def test_a_class_says_where_the_parts_of_a_whole_model_go():
    def case(transport):
        model = torch.nn.Sequential(*(own_stage(index) for index in range(4)))
        pipelined = pipeline_llm(
            model, [[str(index)] for index in range(4)], SplitAtTheEnd, 4, square_loss, transport=transport
        )
        inputs, target = batch(8)
        pipelined.pp_schedule.step(inputs, target=target)
        pipelined.pp_schedule.close()
        return pipelined.pp_schedule.result.loss

    assert on_ranks(2, case) == [reference(4, 4)[0].loss] * 2


def class_that(run):
    class Mine(torchs.PipelineScheduleSingle):
        def _step_microbatches(self, arg_mbs=None, kwarg_mbs=None, target_mbs=None, losses=None):
            run(self._stage)

    return Mine


def endless(stage):
    while True:
        stage.forward_one_chunk(0, (), {})


def by_keyword(stage):
    for number in range(2):
        stage.forward_one_chunk(fwd_chunk_id=number, args=(), kwargs={})
    for number in (1, 0):
        stage.backward_one_chunk(bwd_chunk_id=number, full_backward=False)
    for number in (1, 0):
        stage.backward_weight_one_chunk(bwd_chunk_id=number)


def by_position(stage):
    for number in np.arange(2):
        stage.forward_one_chunk(number, (), {})
    for number in np.arange(2)[::-1]:
        stage.backward_one_chunk(number, None, False)
    for number in np.arange(2)[::-1]:
        stage.backward_weight_one_chunk(number)


@pytest.mark.parametrize("run", [by_keyword, by_position])
def test_a_class_says_the_microbatch_by_keyword_or_position_and_as_any_integer(run):
    schedule = schedule_of_class(class_that(run), ranks=2, microbatches=2)

    assert [" ".join(map(str, row)) for row in schedule] == [
        f"{rank}F0 {rank}F1 {rank}I1 {rank}I0 {rank}W1 {rank}W0" for rank in range(2)
    ]


@pytest.mark.parametrize(
    ("run", "text"),
    [
        (endless, r"stage 0 is asked for more than 3 passes of each of 2 microbatches; let _step_microbatches\(\) end"),
        (lambda stage: stage.forward_one_chunk(2), "Mine made a schedule with 3, but 2 were asked for"),
        (lambda stage: stage.fly(), "Mine failed: AttributeError: '_RecordingStage' object has no attribute 'fly'"),
        (lambda stage: None, "Mine, row 1"),
    ],
)
def test_a_class_that_makes_no_schedule_is_refused(run, text):
    with pytest.raises(ConfigError, match=text):
        schedule_of_class(class_that(run), ranks=2, microbatches=2)


def test_an_order_that_cannot_run_is_refused_by_the_proofs():
    def backwards_first(stage):
        for number in range(2):
            stage.backward_one_chunk(number)
            stage.forward_one_chunk(number)

    with pytest.raises(ScheduleError):
        ps.check(schedule_of_class(class_that(backwards_first), ranks=2, microbatches=2))


def test_several_stages_and_slices_are_refused_on_all_ranks():
    def case(transport):
        stages = [moved.PipelineStage(own_stage(index), index, 4) for index in (transport.rank, transport.rank + 2)]
        several = error_of(moved.Schedule, TwoByTwo, stages, 4, square_loss, transport=transport)
        stage = moved.PipelineStage(own_stage(0), transport.rank, 2)
        return several, error_of(moved.Schedule, TwoByTwo, stage, 4, square_loss, transport=transport, slices=2)

    for several, sliced in on_ranks(2, case):
        assert "TwoByTwo has one stage per rank, got 2 here; bring one" in str(several)
        assert "slices: 2, but TwoByTwo is a class that runs whole microbatches" in str(sliced)
