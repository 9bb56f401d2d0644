"""What changes changes its fingerprint, and nothing else does."""

import random
from collections import Counter, deque
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from penstock.models.cutting.state import changed_names, fingerprint, module_state


def add_in_place(tensor):
    tensor.add_(1)


@pytest.mark.parametrize(
    ("make", "change"),
    [
        (lambda: [1, 2], lambda value: value.append(3)),
        (lambda: {"a": 1}, lambda value: value.update(a=2)),
        (lambda: {"a": [1]}, lambda value: value["a"].append(2)),
        (lambda: {1}, lambda value: value.add(2)),
        (lambda: deque([1]), lambda value: value.append(2)),
        (lambda: Counter("a"), lambda value: value.update("a")),
        (lambda: torch.zeros(2), add_in_place),
        (lambda: SimpleNamespace(a=SimpleNamespace(b=1)), lambda value: setattr(value.a, "b", 2)),
        (lambda: random.Random(0), lambda value: value.random()),
        (lambda: torch.Generator(), lambda value: torch.rand(1, generator=value)),
    ],
)
def test_a_change_of_what_an_object_holds_is_found(make, change):
    value = make()
    before = fingerprint(value)
    assert fingerprint(value) == before
    change(value)
    assert fingerprint(value) != before


def test_objects_that_hold_themselves_have_a_fingerprint():
    value = []
    value.append(value)
    assert fingerprint(value) == fingerprint(value)
    assert fingerprint(float("nan")) == fingerprint(float("nan"))


def test_attributes_of_modules_are_named_and_parts_of_a_cut_left_out():
    module = nn.Module()
    module.inner, module.calls = nn.Linear(2, 2), 0
    module.register_buffer("table", torch.zeros(2), persistent=False)
    module.register_buffer("mean", torch.zeros(2))

    inner_id = frozenset([id(module.inner)])

    def state():
        return module_state([("", module)], frozenset(["mean"]), inner_id)

    before = state()
    module.train(False)
    module.inner, module.mean = nn.Linear(3, 3), torch.ones(2)
    assert changed_names(before, state()) == ["submodules"]
    module.calls += 1
    module.table.add_(1)
    module.register_forward_hook(print)
    assert set(changed_names(before, state())) >= {"submodules", "calls", "table", "_forward_hooks"}
