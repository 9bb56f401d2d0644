"""What moves to the host leaves the device, and nobody who holds a tensor is wrong for it, errors and reports too."""

import gc
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

import penstock as ps
from penstock.errors import PipelineError
from tests.acceptance.steps.test_offload import GPIPE, SPLIT, WITH_R, copies, moving, numbers
from tests.acceptance.steps.test_recomputed_steps import assert_same
from tests.simulation.drawing import ends, starts
from tests.support.local_pipelines import (
    WIDTH,
    block,
    error_of,
    gradients_of,
    on_ranks,
    settle,
    square_loss,
    values,
    zero,
)


class Watched(nn.Module):
    """Keeps what it saves, or where that is stored, and calls a function first in each forward."""

    def __init__(self, seed, note=None, before=lambda: None):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH), seed)
        self.note, self.before = note, before

    def forward(self, x):
        self.before()
        hidden = self.linear(x).tanh()
        output = hidden * 2
        if self.note:
            self.note(x, hidden, output)
        return output


def bytes_at(stored):
    """The bytes of a storage that may be gone, or emptied."""
    storage = torch.UntypedStorage._new_with_weak_ptr(stored.cdata)
    return 0 if storage is None else storage.nbytes()


@pytest.mark.parametrize(("what", "again"), [("hidden", False), ("input", False), ("input", True)])
def test_the_device_has_no_bytes_of_what_is_offloaded(what, again):
    def kept(wires, plan):
        stored, seen = [], []

        def before():
            seen.append(sum(bytes_at(each) > 0 for each in stored))

        def note(x, hidden, output):
            stored.append(StorageWeakRef((x if what == "input" else hidden).untyped_storage()))

        layers = [block(0), Watched(1, note, before) if wires.rank else block(1)]
        pipeline = ps.Pipeline(layers, plan, loss=square_loss, transport=wires)
        pipeline.step(values(1, 12, WIDTH), target=values(3, 12, WIDTH))
        return seen[:5]

    schedule = WITH_R[again](ps.build("gpipe", ranks=2, microbatches=6))
    assert on_ranks(2, kept, ps.lower(schedule))[1] == [0, 1, 2, 3, 4]
    assert on_ranks(2, kept, moving(schedule))[1] == [0, 0, 0, 0, 0]


@pytest.mark.parametrize("schedule", [GPIPE(microbatches=4), SPLIT], ids=["whole", "split"])
def test_a_backward_frees_activations_as_it_goes(schedule):
    def freed(plan):
        stored, seen = [], []

        def first(x, hidden, output):
            place = len(stored)
            output.register_hook(lambda gradient: seen.append(bytes_at(stored[place])))

        def second(x, hidden, output):
            stored.append(StorageWeakRef(hidden.untyped_storage()))

        pipeline = ps.Pipeline([Watched(1, first), Watched(2, second)], plan, loss=square_loss)
        pipeline.step(values(1, 8, WIDTH), target=values(2, 8, WIDTH))
        assert all(each.expired() for each in stored)
        return seen

    assert freed(moving(schedule)) == freed(schedule)
    assert freed(GPIPE(microbatches=4)) == [0, 0, 0, 0]


HOLDS = {
    "itself": lambda tensor: tensor,
    "detached": torch.Tensor.detach,
    "a view": lambda tensor: tensor.t()[1:],
    "its storage": lambda tensor: tensor.untyped_storage(),
    "an array": lambda tensor: tensor.detach().numpy(),
    "dlpack": lambda tensor: np.from_dlpack(tensor.detach()),
    "a closure": lambda tensor: partial(torch.Tensor.clone, tensor),
    "what its node saved": lambda tensor: getattr(tensor.grad_fn, "_saved_result", None),
}


def copied(held):
    if held is None:
        return []
    if callable(held):
        held = held()
    return held.tolist()


@pytest.mark.parametrize(
    ("num_ranks", "again"), [(1, False), pytest.param(2, True, marks=pytest.mark.slow)], ids=["whole", "again"]
)
@pytest.mark.parametrize("hold", HOLDS)
def test_what_a_user_holds_of_a_tensor_stays_as_it_is(hold, num_ranks, again):
    def run(wires, plan):
        held = []

        def check():
            assert all(copied(mine) == then for mine, then in held)

        def note(*tensors):
            held.extend((mine, copied(mine)) for each in tensors for mine in [HOLDS[hold](each)])

        pipeline = ps.Pipeline(
            [Watched(1, note, check), Watched(2, note, check)], plan, loss=square_loss, transport=wires
        )
        for step in range(2):
            inputs, target = numbers(12, WIDTH)(step)
            pipeline.step(inputs, target=target)
            assert len(held) >= (step + 1) * 18
            check()
        return gradients_of(pipeline.named_parameters())

    if hold == "what its node saved" and again:
        return  # it has no node yet
    schedule = ps.build("looped-bfs", ranks=num_ranks, stages_per_rank=2 // num_ranks, microbatches=6)
    schedule = WITH_R[again](schedule)
    assert_same(on_ranks(num_ranks, run, moving(schedule)), on_ranks(num_ranks, run, schedule))


CHANGES = {
    "itself": lambda held: held.add_(1),
    "a view": lambda held: held[:1].zero_(),
    "detached": lambda held: held.detach().mul_(2),
}


@pytest.mark.parametrize(("change", "call"), [("itself", 0), ("a view", 1), ("detached", 1), ("itself", 3)])
def test_a_change_in_place_between_forward_and_backward_is_an_error_as_in_torch(change, call):
    def error(plan):
        held = []

        def note(x, hidden, output):
            held.append(hidden)
            if len(held) == call + 1:
                with torch.no_grad():
                    CHANGES[change](held[0])

        pipeline = ps.Pipeline([Watched(1, note)], plan, loss=square_loss)
        found = error_of(pipeline.step, values(1, 8, WIDTH), target=values(2, 8, WIDTH))
        pipeline.close()
        return str(found)

    schedule = GPIPE(microbatches=4)
    expected, found = error(schedule), error(moving(schedule))
    words = "one of the variables needed for gradient computation has been modified by an inplace operation"
    assert "0B0" in found
    assert words in expected
    assert words in found


class Failing(Watched):
    """Fails in a forward or a backward of its first step."""

    def __init__(self, where, note=None):
        super().__init__(3, note)
        self.where, self.num_calls = where, 0

    def fail(self, *_):
        self.num_calls += 1
        if self.num_calls == 3:
            raise ValueError("out of luck")

    def forward(self, x):
        output = super().forward(x)
        if self.where == "backward":
            output.register_hook(self.fail)
        elif self.where == "forward":
            self.fail()
        return output


@pytest.mark.parametrize(("where", "again"), [("forward", True), ("backward", False)])
def test_a_failing_step_keeps_nothing_and_the_next_one_is_right(where, again):
    schedule = WITH_R[again](ps.build("gpipe", ranks=2, microbatches=6))

    def case(wires, plan, where):
        stored = []
        layer = Failing(where, lambda x, hidden, output: stored.append(StorageWeakRef(hidden.untyped_storage())))
        pipeline = ps.Pipeline([block(1), layer], plan, loss=square_loss, transport=wires)
        inputs, target = numbers(12, WIDTH)(1)
        if where:
            error = error_of(pipeline.step, inputs, target=target)
            assert isinstance(error, PipelineError)
            assert "out of luck" in str(error)
            del error
        gc.collect()
        assert sum(bytes_at(each) > 0 for each in stored) <= 1  # the microbatch that failed may be in frames
        zero(pipeline)
        result = pipeline.step(inputs, target=target)
        return result.loss, result.losses, gradients_of(pipeline.named_parameters())

    assert_same(on_ranks(2, case, moving(schedule), where), on_ranks(2, case, schedule, None))


class Doubling(nn.Module):
    """Changes its input in place."""

    def __init__(self, call):
        super().__init__()
        self.linear, self.call = settle(nn.Linear(WIDTH, WIDTH), 4), call

    def forward(self, x):
        return self.call(self, x)


def after_it_was_saved(self, x):
    output = self.linear(x)
    with torch.no_grad():
        x.mul_(2)
    return output


INPUT_CHANGES = {
    "with a gradient": lambda self, x: self.linear(x.mul_(2)),
    "without one": after_it_was_saved,
    "of a view": lambda self, x: self.linear(x[:1].add_(1)) + x.sum(),
}


@pytest.mark.parametrize("again", WITH_R, ids="again={}".format)
@pytest.mark.parametrize("change", INPUT_CHANGES)
def test_a_stage_that_changes_its_input_is_the_same_error(change, again):
    schedule = WITH_R[again](ps.build("gpipe", ranks=2, microbatches=4))

    def case(wires, plan):
        pipeline = ps.Pipeline([block(1), Doubling(INPUT_CHANGES[change])], plan, loss=square_loss, transport=wires)
        text = str(error_of(pipeline.step, values(1, 8, WIDTH), target=values(2, 8, WIDTH)))
        return text.partition("\n")[0].partition(" Hint")[0].replace("a view of a leaf", "a leaf")

    assert on_ranks(2, case, moving(schedule))[1] == on_ranks(2, case, schedule)[1]


class Penalty(nn.Module):
    """Differentiates in its forward, so that saved tensors are read there and saved again."""

    def __init__(self, seed):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH), seed)

    def forward(self, x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.linear(x).tanh().square().sum(), x, create_graph=True)
        return x + slope


@pytest.mark.parametrize("name", ["gpipe", "zb-h1"])
def test_a_layer_that_differentiates_in_its_forward_trains_the_same(name):
    schedule = ps.build(name, ranks=2, microbatches=6)

    def run(wires, plan):
        pipeline = ps.Pipeline([block(0), Penalty(1), Penalty(2)], plan, loss=square_loss, transport=wires)
        inputs, target = numbers(12, WIDTH)(0)
        return pipeline.step(inputs, target=target).losses, gradients_of(pipeline.named_parameters())

    assert_same(on_ranks(2, run, moving(schedule)), on_ranks(2, run, schedule))


# ---- what is told of a step


@pytest.mark.parametrize("again", WITH_R, ids="again={}".format)
def test_a_recorded_step_has_its_copies_in_order(again):
    program = moving(WITH_R[again](GPIPE(microbatches=5)))
    pipeline = ps.Pipeline([block(1), block(2)], program, loss=square_loss)
    pipeline.step(values(1, 10, WIDTH), target=values(2, 10, WIDTH), record=True)
    start_s, end_s = starts(pipeline.timeline), ends(pipeline.timeline)

    assert pipeline.timeline.program == program
    for text in copies(program):
        other = text.replace("OFFLOAD", "F") if "OFFLOAD" in text else text.replace("RELOAD", "OFFLOAD")
        assert end_s[other] <= start_s[text] < end_s[text]
