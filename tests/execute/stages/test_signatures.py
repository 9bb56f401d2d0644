"""What a layer can take by keyword is what its forward names, or what the module names that it wraps."""

import functools
import types

import pytest
import torch
import torch.utils.checkpoint
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import (
    CheckpointImpl,
    checkpoint_wrapper,
    offload_wrapper,
)
from torch.nn.utils.parametrize import register_parametrization
from torch.utils.checkpoint import checkpoint

from penstock.execute.batch.microbatch import ANY_KEYWORD
from penstock.execute.stages.signatures import TakenKeywords, taken_keywords
from tests.execute.stages.test_keywords import Masked, Variadic


class Plain(nn.Module):
    def forward(self, x):
        return x


class Hidden(nn.Module):
    def forward(self, x, /, y=1):
        return x


def names(module, num_positional=1):
    return taken_keywords(module).names(num_positional)


def test_a_parameter_filled_by_position_is_not_filled_by_keyword():
    assert names(Masked()) == {"mask", "scale"}
    assert names(Masked(), 0) == {"x", "mask", "scale"}
    assert names(Masked(), 2) == {"scale"}
    assert names(Variadic(), 3) == {"scale"}
    assert names(Hidden(), 0) == {"y"}


def test_a_layer_gets_what_it_names_and_nothing_else():
    taken = taken_keywords(Masked())

    assert taken.select({"scale": 2.0, "positions": 1, "x": 3}) == {"scale": 2.0}
    assert taken.select({"scale": 2.0, "mask": 1}, 2) == {"scale": 2.0}
    assert taken.select({}) == {}


def test_who_may_take_every_keyword_gets_all_but_those_filled_by_position():
    taken = TakenKeywords({"x": 0, "mask": 1}, accepts_any_keyword=True)

    assert taken.select({"x": 1, "mask": 2, "other": 3}) == {"mask": 2, "other": 3}
    assert taken.names() == {"mask", ANY_KEYWORD}


# ---- torch's wrappers


@pytest.mark.parametrize(
    "wrap",
    [
        torch.compile,
        checkpoint_wrapper,
        offload_wrapper,
        functools.partial(checkpoint_wrapper, checkpoint_impl=CheckpointImpl.REENTRANT),
        nn.DataParallel,
        torch.optim.swa_utils.AveragedModel,
        lambda layer: torch.compile(checkpoint_wrapper(layer)),
        lambda layer: offload_wrapper(checkpoint_wrapper(torch.compile(layer))),
    ],
    ids=["compile", "checkpoint", "offload", "reentrant", "DataParallel", "averaged", "both", "nested"],
)
def test_a_wrapper_of_torch_takes_what_the_wrapped_layer_takes(wrap):
    assert names(wrap(Masked())) == {"mask", "scale"}
    assert names(wrap(Masked()), 2) == {"scale"}
    assert names(wrap(Plain())) == set()
    assert names(wrap(nn.Sequential(Masked()))) == set()


def test_a_compiled_method_and_a_layer_of_torch_keep_their_signature():
    layer = Masked()
    layer.compile()

    assert names(layer) == {"mask", "scale"}
    assert names(nn.Sequential(Masked())) == set()
    assert names(nn.TransformerEncoderLayer(4, 1)) == {"src_mask", "src_key_padding_mask", "is_causal"}


class Typed(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor):
        return x * mask


def test_what_torch_jit_made_takes_what_its_schema_names():
    scripted = torch.jit.script(Typed())
    traced = torch.jit.trace(Typed(), (torch.ones(1), torch.ones(1)))

    for layer in (scripted, traced, torch.fx.symbolic_trace(Typed())):
        assert names(layer) == {"mask"}
        assert layer(torch.ones(1), **taken_keywords(layer).select({"mask": torch.ones(1), "scale": 2})) == 1


# ---- the user's own


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.drop = nn.Dropout(0.1)


class Calling(Wrapper):
    def forward(self, *args, **kwargs):
        return self.drop(self.inner(*args, **kwargs))


class CallingForward(Wrapper):
    def forward(self, x, **kwargs):
        return self.inner.forward(x, **kwargs)


class Checkpointed(Wrapper):
    def forward(self, *args, **kwargs):
        if self.training:
            return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)
        return self.inner(*args, **kwargs)


class CheckpointedByPath(Wrapper):
    def forward(self, x, **others):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False, **others)


def passing(forward):
    @functools.wraps(forward)
    def run(*args, **kwargs):
        return forward(*args, **kwargs)

    return run


class Decorated(Wrapper):
    @passing
    def forward(self, x, **kwargs):
        return self.inner(x, **kwargs)


class Inherited(Checkpointed):
    pass


class Base(Calling):
    @passing
    def forward(self, *args, **kwargs):
        return super().forward(*args, **kwargs)


class OfBase(Base):
    def forward(self, *args, **kwargs):
        return (super().forward(*args, **kwargs),)


OWN = [Calling, CallingForward, Checkpointed, CheckpointedByPath, Decorated, Inherited, Base, OfBase]


@pytest.mark.parametrize("wrapper", OWN)
def test_a_wrapper_that_passes_its_keywords_to_a_submodule_takes_what_that_takes(wrapper):
    assert names(wrapper(Masked())) == {"mask", "scale"}
    assert names(wrapper(Plain())) == set()
    assert names(wrapper(torch.compile(wrapper(Masked())))) == {"mask", "scale"}


def test_a_wrapper_takes_what_it_names_too_and_not_what_it_gives_the_submodule_itself():
    class Own(Wrapper):
        def forward(self, x, factor=1.0, **kwargs):
            return factor * self.inner(x, scale=2.0, **kwargs)

    class ByPosition(Wrapper):
        def forward(self, x, **kwargs):
            return self.inner(x, None, **kwargs)

    assert names(Own(Masked())) == {"factor", "mask"}
    assert names(ByPosition(Masked())) == {"scale"}


def test_a_subclass_that_passes_its_keywords_to_its_base_takes_what_that_takes():
    class Sub(Masked):
        def forward(self, hidden, **kwargs):
            return super().forward(hidden, **kwargs)

    class Elsewhere(Masked):
        def forward(self, hidden, **kwargs):
            return super().other(hidden, **kwargs)

    assert names(Sub()) == {"mask", "scale"}
    assert names(Elsewhere()) == {ANY_KEYWORD}


def test_a_layer_that_ignores_further_keywords_is_given_none():
    class Ignoring(nn.Module):
        def forward(self, x, attention_mask=None, **kwargs):
            return x

    assert names(Ignoring()) == {"attention_mask"}


def test_a_decorated_forward_takes_what_it_names_behind_its_decorator():
    class Layer(nn.Module):
        @passing
        def forward(self, x, mask=None):
            return x

    assert names(Layer()) == {"mask"}


def mix(module, x, mask):
    return module(x) * mask


class Getting(Wrapper):
    def forward(self, x, **kwargs):
        return self.inner(x) * kwargs.get("mask", 1.0)


class Popping(Wrapper):
    def forward(self, *args, **kwargs):
        mask = kwargs.pop("mask", 1.0)
        return self.inner(*args, **kwargs) * mask


class ByFunction(Wrapper):
    def forward(self, x, **kwargs):
        return mix(self.inner, x, **kwargs)


class ByChosen(Wrapper):
    def forward(self, x, **kwargs):
        inner = self.inner if self.training else self.drop
        return inner(x, **kwargs)


@pytest.mark.parametrize("wrapper", [Getting, Popping, ByFunction, ByChosen])
def test_a_forward_that_may_use_its_keywords_itself_takes_every_keyword(wrapper):
    assert ANY_KEYWORD in names(wrapper(nn.Linear(4, 4)))
    assert ANY_KEYWORD in names(Calling(wrapper(nn.Linear(4, 4))))
    assert ANY_KEYWORD in names(torch.compile(wrapper(nn.Linear(4, 4))))


def test_a_layer_that_torch_gave_a_class_of_its_own_is_no_wrapper_of_torch():
    layer = Getting(nn.Linear(4, 4))
    del layer.drop
    layer.register_parameter("gain", nn.Parameter(torch.ones(1)))
    register_parametrization(layer, "gain", nn.Identity())
    del layer.inner

    assert len(list(layer.children())) == 1
    assert type(layer).__module__.startswith("torch.")
    assert names(layer) == {ANY_KEYWORD}


def test_a_forward_of_which_nothing_is_known_takes_every_keyword():
    layer = Wrapper(Plain())
    layer.forward = type("Opaque", (), {"__call__": len, "__signature__": "none"})()
    made = {}
    exec("def forward(self, x, **kwargs): return self.inner(x, **kwargs)", made)
    without_source = type("WithoutSource", (Wrapper,), {"forward": made["forward"]})(Plain())

    assert names(layer) == names(without_source) == {ANY_KEYWORD}


# ---- forwards that were put in place of others


def test_a_forward_on_the_instance_is_the_one_that_counts():
    layer = Plain()
    layer.forward = types.MethodType(Masked.forward, layer)
    bound = Plain()
    bound.forward = functools.partial(Masked().forward, scale=2.0)
    borrowed = Plain()
    borrowed.forward = Calling(Masked()).forward

    assert names(layer) == names(bound) == names(borrowed) == {"mask", "scale"}


def test_a_forward_replaced_by_a_function_takes_what_it_says_that_it_wraps_or_everything():
    told, untold, partly = Masked(), Masked(), Calling(Masked())
    inner = untold.forward
    told.forward = passing(told.forward)
    untold.forward = lambda *args, **kwargs: inner(*args, **kwargs)
    partly.forward = functools.partial(partly.forward, scale=2.0)

    assert names(told) == {"mask", "scale"}
    assert names(untold) == {ANY_KEYWORD}
    assert names(partly) == {"mask", "scale"}
