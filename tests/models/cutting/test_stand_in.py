"""A stand-in has the class and the attributes of its submodule, and hands calls to the run."""

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.models.cutting.placeholders import Placeholder
from penstock.models.cutting.stand_in import StandIn, bare_parameter, share_hooks
from penstock.models.cutting.undocumented import forward_hooks


class Block(nn.Linear):
    def __init__(self):
        super().__init__(2, 2)
        self.scale = 1.5

    def twice(self, value):
        return self(self(value))


class NotedRun:
    """Notes what it is asked; has a submodule itself where `local` is given."""

    def __init__(self, local=None):
        self.local, self.notes = local, []

    def call_method(self, name, method, args, kwargs, placeholder):
        self.notes.append((name, method))
        return args[0]

    def local_module(self, name):
        return self.local

    def tensor_attribute(self, label, tensor):
        self.notes.append(label)
        return tensor

    def note_read(self, name, attribute):
        self.notes.append((name, attribute))

    def write(self, name, attribute, value, placeholder):
        self.notes.append((name, attribute, value))


class Host:
    """A frame in evaluation mode."""

    def __init__(self, run):
        self.run, self.written, self.refusal = run, [], None

    def mode_of(self, owner):
        return False


def stand_in(run, owner=None):
    return StandIn("blocks.0", Placeholder("blocks.0", owner or Block()), Host(run))


def test_calls_forwards_and_methods_are_told_apart():
    run = NotedRun()
    block = stand_in(run)
    for call in (block, block.forward, block.twice):
        assert call(3) == 3
    assert run.notes == [("blocks.0", method) for method in ("__call__", "forward", "twice")]
    assert isinstance(block, Block)


def test_attributes_are_those_of_the_owner_now_and_tensors_are_labelled():
    run, owner = NotedRun(), Block()
    block = stand_in(run, owner)
    owner.scale = 2.5

    assert block.scale == 2.5
    assert block.weight.is_meta
    assert run.notes == [("blocks.0", "scale"), "blocks.0.weight"]
    with pytest.raises(AttributeError):
        block.nothing  # noqa: B018


def test_what_the_forward_sets_is_read_again_until_the_next_run():
    run = NotedRun()
    block = stand_in(run)
    block.scale = 5
    assert block.scale == 5
    del block.scale
    block.forget_written()
    assert block.scale == 1.5
    assert [note[:2] for note in run.notes] == [("blocks.0", "scale")] * 3


def test_modes_are_those_of_the_run_and_of_the_submodules_that_a_part_has():
    local = Block()
    assert stand_in(NotedRun(local)).training
    block = stand_in(NotedRun())
    assert not block.training
    block.training = True
    assert block.training


def test_submodules_have_stand_ins_which_the_walks_of_torch_meet():
    outer = nn.Sequential(Block(), nn.Linear(2, 3))
    block = stand_in(NotedRun(), outer)
    assert [issubclass(type(module), StandIn) for module in block.modules()] == [True] * 3
    assert [name for name, _ in block.named_parameters()] == [name for name, _ in outer.named_parameters()]
    assert isinstance(getattr(block, "1"), nn.Linear)
    assert getattr(block, "1")(4) == 4


def test_an_attribute_that_the_submodule_makes_is_refused_and_so_is_a_tensor_that_no_file_has():
    class Noting(Block):
        def forward(self, value):
            self.loss = value.sum()
            return value

    owner = Noting()
    owner.table = torch.ones(2)
    placeholder = Placeholder("blocks.0", owner)
    placeholder.output("__call__", (torch.ones(2),), {}, is_training=True)
    block = StandIn("blocks.0", placeholder, Host(NotedRun()))
    with pytest.raises(PenstockError, match=r"'blocks.0' changes its attribute 'loss'.*AuxiliaryLoss"):
        block.loss  # noqa: B018
    with pytest.raises(PenstockError, match=r"tensor 'table' of 'blocks.0', which is neither a parameter nor a buffer"):
        block.table  # noqa: B018


def test_outside_of_a_forward_nothing_is_called_or_set():
    block = stand_in(None)
    with pytest.raises(PenstockError, match="called outside of a forward"):
        block(torch.ones(2))
    with pytest.raises(PenstockError, match=r"'scale' is set on the stand-in of 'blocks.0' outside"):
        block.scale = 1


def test_the_place_of_a_parameter_has_its_strides_and_asks_for_a_gradient_as_it_does():
    bare = bare_parameter(nn.Parameter(torch.ones(2, 3).T, requires_grad=False))
    assert isinstance(bare, nn.Parameter)
    assert bare.is_meta
    assert bare.stride() == (1, 3)
    assert not bare.requires_grad


def test_hooks_that_a_forward_puts_on_a_stand_in_see_its_output_and_may_change_it():
    block = stand_in(NotedRun())
    handles = [
        block.register_forward_hook(lambda module, args, output: output + args[0]),
        block.register_forward_hook(lambda module, args, kwargs, output: output * kwargs["scale"], with_kwargs=True),
    ]

    assert (block(3, scale=5), block.forward(3)) == (30, 3)
    for handle in handles:
        handle.remove()
    assert block(3) == 3


def test_shared_hooks_run_on_outputs_of_stand_ins_and_once_where_the_submodule_itself_runs():
    outputs, owner = [], Block()

    def collect(module, args, output):
        outputs.append(output)

    def other(module, args, output):
        raise AssertionError

    owner.register_forward_hook(collect)
    owner.register_forward_hook(other)
    frame = nn.ModuleList([stand_in(NotedRun(), owner), stand_in(NotedRun(owner), owner)])
    absent, local = frame

    share_hooks(frame, lambda hook: hook is collect)
    absent(3)
    local(4)

    assert outputs == [3], "the run calls a submodule that is there, with its hooks"
    assert forward_hooks(absent._target[1].module) == [(other, False)]
    assert forward_hooks(owner) == [(collect, False), (other, False)]
