"""Canaries: torch counts changes in place, also those of views, marks what it has compiled, and what it saves."""

import torch
from torch import nn

from penstock.models.cutting.undocumented import is_compiled, is_saved, version_of


def test_changes_in_place_are_counted():
    tensor = torch.zeros(4)
    before = version_of(tensor)
    tensor[1:].add_(1)
    assert version_of(tensor) > before
    with torch.inference_mode():
        assert version_of(torch.zeros(2)) == 0


def test_a_compiled_module_is_known():
    module = nn.Linear(2, 2)
    assert is_compiled(torch.compile(module)), "torch.compile returns something else"
    assert not is_compiled(module)


def test_a_buffer_that_is_not_saved_is_known():
    module = nn.BatchNorm1d(2)
    module.register_buffer("table", torch.zeros(2), persistent=False)
    assert {name for name, _ in module.named_buffers() if is_saved(module, name)} == {
        name for name in module.state_dict() if name not in dict(module.named_parameters())
    }
