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


def names(module, num_positional=1):
    return taken_keywords(module).names(num_positional)


def test_a_parameter_filled_by_position_is_not_filled_by_keyword():
    hidden = nn.Module()
    hidden.forward = lambda x, /, y=1: x

    assert names(Masked()) == {"mask", "scale"}
    assert names(Masked(), 0) == {"x", "mask", "scale"}
    assert names(Masked(), 2) == {"scale"}
    assert names(Variadic(), 3) == {"scale"}
    assert names(hidden, 0) == {"y"}


def test_a_layer_gets_what_it_names_and_nothing_else():
    taken = taken_keywords(Masked())

    assert taken.select({"scale": 2.0, "positions": 1, "x": 3}) == {"scale": 2.0}
    assert taken.select({"scale": 2.0, "mask": 1}, 2) == {"scale": 2.0}
    assert taken.select({}) == {}


def test_who_may_take_every_keyword_gets_all_but_those_filled_by_position():
    taken = TakenKeywords({"x": 0, "mask": 1}, accepts_any_keyword=True)

    assert taken.select({"x": 1, "mask": 2, "other": 3}) == {"mask": 2, "other": 3}
    assert taken.names() == {"mask", ANY_KEYWORD}


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


class Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.drop = nn.Dropout(0.1)


def wrapper_by(forward):
    return type(forward.__name__, (Wrapper,), {"forward": forward})


class Passing:
    """Forwards that pass their keywords to a submodule."""

    def calling(self, *args, **kwargs):
        return self.drop(self.inner(*args, **kwargs))

    def calling_forward(self, x, **kwargs):
        return self.inner.forward(x, **kwargs)

    def checkpointed(self, *args, **kwargs):
        if self.training:
            return checkpoint(self.inner, *args, use_reentrant=False, **kwargs)
        return self.inner(*args, **kwargs)

    def checkpointed_by_path(self, x, **others):
        return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False, **others)


Calling, CallingForward, Checkpointed, CheckpointedByPath = map(wrapper_by, filter(callable, vars(Passing).values()))


def passing(forward):
    @functools.wraps(forward)
    def run(*args, **kwargs):
        return forward(*args, **kwargs)

    return run


class Decorated(Wrapper):
    @passing
    def forward(self, x, **kwargs):
        return self.inner(x, **kwargs)


Inherited = type("Inherited", (Checkpointed,), {})


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


class Giving:
    """Forwards that give a submodule a keyword themselves."""

    def by_name(self, x, factor=1.0, **kwargs):
        return factor * self.inner(x, scale=2.0, **kwargs)

    def by_position(self, x, **kwargs):
        return self.inner(x, None, **kwargs)


class OfMasked(Masked):
    def forward(self, hidden, **kwargs):
        return super().forward(hidden, **kwargs)


class Elsewhere(Masked):
    def forward(self, hidden, **kwargs):
        return super().other(hidden, **kwargs)


class Ignoring(nn.Module):
    @passing
    def forward(self, x, attention_mask=None, **kwargs):
        return x


@pytest.mark.parametrize(
    ("layer", "expected"),
    [
        (wrapper_by(Giving.by_name)(Masked()), {"factor", "mask"}),
        (wrapper_by(Giving.by_position)(Masked()), {"scale"}),
        (OfMasked(), {"mask", "scale"}),
        (Elsewhere(), {ANY_KEYWORD}),
        (Ignoring(), {"attention_mask"}),
    ],
)
def test_a_layer_takes_what_it_names_and_what_takes_its_further_keywords_is_not_given_otherwise(layer, expected):
    assert names(layer) == expected


def mix(module, x, mask):
    return module(x) * mask


class MayUse:
    """Forwards that may use their keywords themselves, for all that anybody can tell."""

    def getting(self, x, **kwargs):
        return self.inner(x) * kwargs.get("mask", 1.0)

    def popping(self, *args, **kwargs):
        mask = kwargs.pop("mask", 1.0)
        return self.inner(*args, **kwargs) * mask

    def by_function(self, x, **kwargs):
        return mix(self.inner, x, **kwargs)

    def by_chosen(self, x, **kwargs):
        inner = self.inner if self.training else self.drop
        return inner(x, **kwargs)


@pytest.mark.parametrize("wrapper", list(map(wrapper_by, filter(callable, vars(MayUse).values()))))
def test_a_forward_that_may_use_its_keywords_itself_takes_every_keyword(wrapper):
    assert ANY_KEYWORD in names(wrapper(nn.Linear(4, 4)))
    assert ANY_KEYWORD in names(Calling(wrapper(nn.Linear(4, 4))))
    assert ANY_KEYWORD in names(torch.compile(wrapper(nn.Linear(4, 4))))


def test_a_layer_that_torch_gave_a_class_of_its_own_is_no_wrapper_of_torch():
    layer = wrapper_by(MayUse.getting)(nn.Linear(4, 4))
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


@pytest.mark.parametrize(
    ("layer", "forward", "expected"),
    [
        (Plain(), types.MethodType(Masked.forward, Plain()), {"mask", "scale"}),
        (Plain(), functools.partial(Masked().forward, scale=2.0), {"mask", "scale"}),
        (Plain(), Calling(Masked()).forward, {"mask", "scale"}),
        (Masked(), passing(Masked().forward), {"mask", "scale"}),
        (Masked(), lambda *args, **kwargs: None, {ANY_KEYWORD}),
        (Masked(), functools.partial(Calling(Masked()).forward, scale=2.0), {"mask", "scale"}),
    ],
    ids=["method", "partial", "of another layer", "says what it wraps", "does not say", "partial of a wrapper"],
)
def test_a_forward_on_the_instance_is_the_one_that_counts(layer, forward, expected):
    layer.forward = forward

    assert names(layer) == expected
