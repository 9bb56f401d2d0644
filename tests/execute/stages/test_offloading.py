"""What a forward keeps is moved to the host and back: its bytes, and nobody else's."""

import gc
import weakref
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.stages.offloading import begin_movable, is_on_host, movable, saved_in
from penstock.execute.stages.recompute import Recomputation
from penstock.execute.stages.stage import Stage
from tests.support.local_pipelines import WIDTH, settle, values
from tests.support.one_stage import PLACE, OneStage
from tests.support.using import Using

ROWS = 4
ONE = 4 * ROWS * WIDTH
"""The bytes of one activation between two layers."""


def one_stage(*layers, is_checkpoint=False, place=PLACE, **options):
    movables = partial(begin_movable, {place: is_checkpoint}, options.get("is_first", False))
    stage = Stage(0, {str(index): layer for index, layer in enumerate(layers)})
    return OneStage(stage, features=[movables], **options)


def offloaded(stage, inputs):
    """Run a forward and move what it keeps to the host; return the output and what was saved."""
    output, saved = stage.forward(inputs)
    movable(saved).offload(saved)
    return output, saved


def linear():
    return settle(nn.Linear(WIDTH, WIDTH), 0)


def inputs():
    return values(1, ROWS, WIDTH).requires_grad_()


def bytes_of(saved):
    """The bytes of all storages of a forward, each once."""
    storages = {
        each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in [*saved.inputs, *saved_in(saved)]
    }
    return sum(storages.values())


def gradients(stage, saved):
    found = stage.backward(saved, values(2, ROWS, WIDTH))
    return [*found, *[parameter.grad for parameter in stage.stage.parameters()]]


def test_what_only_the_forward_holds_leaves_the_device_and_comes_back():
    expected, stage = (one_stage(linear(), nn.Tanh(), linear()) for _ in range(2))
    kept, saved = (each.saved(inputs()) for each in (expected, stage))
    num_parameter_bytes = sum(parameter.nbytes for parameter in stage.stage.parameters() if parameter.dim() == 2)
    before = [(each.shape, each.stride(), each.storage_offset()) for each in saved_in(saved)]

    assert bytes_of(saved) == 2 * ONE + num_parameter_bytes  # the input and the tanh
    movable(saved).offload(saved)
    assert is_on_host(saved)
    assert bytes_of(saved) == num_parameter_bytes
    movable(saved).reload()
    assert not is_on_host(saved)
    assert bytes_of(saved) == 2 * ONE + num_parameter_bytes
    assert [(each.shape, each.stride(), each.storage_offset()) for each in saved_in(saved)] == before
    assert all(map(torch.equal, gradients(stage, saved), gradients(expected, kept)))


def test_views_of_one_storage_share_one_again():
    def layer(self, x):
        wide = torch.cat([x, x], 1).tanh()
        return wide[:, :WIDTH] * wide[:, WIDTH:].flip(0)

    saved = one_stage(Using(layer)).saved(inputs())
    addresses = [each.data_ptr() for each in saved_in(saved)]
    movable(saved).offload(saved)
    other = torch.empty(2 * ONE)  # takes the memory that was given back
    movable(saved).reload()

    storages = {each.untyped_storage().data_ptr() for each in saved_in(saved)}
    assert len(addresses) == 3
    assert len(storages) == 2  # the flipped half is a copy
    assert other.untyped_storage().data_ptr() not in storages


def test_layers_get_inputs_with_the_strides_that_they_had():
    """A dimension of one element has a stride too, by which torch lays out results."""
    seen = []
    stage = one_stage(Using(lambda self, x: seen.append(x.stride()) or x * 2))
    stage.forward(torch.empty_strided((1, ROWS, WIDTH), (100, 1, ROWS)).zero_().requires_grad_())

    assert seen == [(100, 1, ROWS)]


def test_parameters_buffers_and_outputs_on_their_way_stay_where_they_are():
    norm = nn.BatchNorm1d(WIDTH)
    stage = one_stage(norm, linear(), nn.Tanh())
    output, saved = stage.forward(inputs())
    then = output.detach().clone()
    movable(saved).offload(saved)

    assert torch.equal(output, then)
    for each in (*stage.stage.parameters(), *norm.buffers()):
        assert each.untyped_storage().nbytes() == each.nbytes


def test_the_callers_batch_stays_where_it_is():
    x = inputs()
    for is_checkpoint in (False, True):
        stage = one_stage(linear(), is_first=True, is_checkpoint=is_checkpoint)
        run = Recomputation(stage.passes) if is_checkpoint else stage.passes
        _, kept = run.forward(stage.step, PLACE, (x,), {})
        movable(kept).offload(kept)
        assert x.untyped_storage().nbytes() == ONE


def test_memory_that_is_not_torchs_own_stays_where_it_is():
    outside = [torch.from_numpy(np.ones((ROWS, WIDTH), np.float32)), torch.ones(ROWS, WIDTH).share_memory_()]
    stage = one_stage(Using(lambda self, x: x * outside.pop() * outside.pop() * torch.full_like(x, 3)))
    _, saved = offloaded(stage, inputs())

    gc.collect()
    sizes = sorted(each.untyped_storage().nbytes() for each in saved_in(saved))
    assert sizes == [0] * (len(sizes) - 2) + [ONE, ONE]
    assert len(sizes) > 2


def test_a_split_backward_leaves_the_same_weights_for_later():
    kept = []
    for place in ((1, 0), PLACE):
        one = one_stage(*(settle(nn.Linear(64, 64), seed) for seed in range(2)), place=place, is_split=True)
        saved = one.saved(values(1, 64, 64).requires_grad_())
        if place == PLACE:
            movable(saved).offload(saved)
            movable(saved).reload()
        _, left = one.passes.backward_input(saved, [values(2, 64, 64)])
        kept.append([entry.parameters[0].shape for entry in left.entries])
        one.passes.gradients.add(left)

    assert kept[0] == kept[1] == [(64, 64), (64, 64)]


def test_to_read_what_is_on_the_host_is_an_error():
    stage = one_stage(linear(), nn.Tanh(), linear())
    _, saved = offloaded(stage, inputs())

    with pytest.raises(PipelineError, match=r"a saved tensor of shape \[4, 6\] was read while it is on the host"):
        gradients(stage, saved)


def test_an_error_while_moving_keeps_nothing_alive(monkeypatch):
    def fail(storage):
        raise MemoryError("no more")

    monkeypatch.setattr("penstock.execute.stages.offloading._emptied", fail)
    stage = one_stage(linear(), nn.Tanh(), linear())
    saved = stage.saved(inputs())
    alive = [weakref.ref(each) for each in saved_in(saved)]
    with pytest.raises(MemoryError) as raised:
        movable(saved).offload(saved)
    del saved
    gc.collect()

    assert raised.tb is not None
    assert [each() for each in alive] == [None] * 5


def test_other_microbatches_are_saved_as_ever():
    saved = one_stage(linear(), place=(1, 0)).saved(inputs())

    assert saved_in(saved) == []
    assert not is_on_host(saved)
