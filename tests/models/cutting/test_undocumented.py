"""Canaries: torch counts changes in place, also of views, and marks what it has compiled, saves and hooks onto."""

import torch
from torch import nn

from penstock.models.cutting.undocumented import (
    forward_hooks,
    has_further_hooks,
    hooks_around_forward,
    is_compiled,
    is_saved,
    own_tensors_of,
    plain_attributes_of,
    remove_forward_hooks,
    remove_hooks_besides,
    storage_key,
    storage_of,
    version_of,
)


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


def test_views_share_one_key_of_memory_also_on_the_meta_device():
    for device in ("cpu", "meta"):
        tensor, other = torch.empty(4, 2, device=device), torch.empty(4, device=device)
        keys = [storage_key(storage_of(each)) for each in (tensor, tensor.T[0], other)]
        assert keys[0] == keys[1] != keys[2]
    assert storage_of(torch.zeros(2).to_sparse()) is None


def test_a_module_has_its_own_tensors_in_two_dicts_which_reads_follow():
    module = nn.BatchNorm1d(2)
    parameters, buffers = own_tensors_of(module)
    parameters["weight"], buffers["running_mean"] = torch.ones(2) * 3, torch.ones(2) * 4
    assert module.weight.sum() == 6
    assert module.running_mean.sum() == 8
    module.scale = 3
    assert plain_attributes_of(module)["scale"] == 3
    assert not {"_parameters", "_buffers", "_modules", "training"} & plain_attributes_of(module).keys()


def test_forward_hooks_are_listed_in_their_order_and_can_be_removed():
    module = nn.Linear(2, 2)

    def first(module, args, output):
        return output + 1

    def second(module, args, kwargs, output):
        return output * 0

    module.register_forward_hook(first)
    module.register_forward_hook(second, with_kwargs=True)

    assert forward_hooks(module) == [(first, False), (second, True)]
    assert hooks_around_forward(module) == [first, second]
    remove_forward_hooks(module, lambda hook: hook is second)
    assert forward_hooks(module) == [(first, False)]
    torch.testing.assert_close(module(torch.zeros(2)), module.bias + 1)


def test_hooks_before_a_forward_are_listed_first():
    module = nn.Identity()
    module.register_forward_hook(len)
    module.register_forward_pre_hook(print)
    assert hooks_around_forward(module) == [print, len]


def test_hooks_of_other_kinds_are_known_and_removed():
    module = nn.Linear(2, 2)
    module.register_forward_hook(print)
    kept_hooks = forward_hooks(module)
    assert not has_further_hooks(module)
    for register in (module.register_forward_pre_hook, module.register_full_backward_hook):
        register(print)
        assert has_further_hooks(module)
        module.register_forward_hook(repr)
        remove_hooks_besides(module, kept_hooks)
        assert not has_further_hooks(module)
        assert forward_hooks(module) == kept_hooks
