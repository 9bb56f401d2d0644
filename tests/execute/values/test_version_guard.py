"""What lies ready for another stage is noticed when it changes in place, itself or a view of it."""

import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.undocumented import version_of
from penstock.execute.values.version_guard import VersionGuard


def trees(tensor):
    return {"tensor": tensor, "view": {"whole": (None, 3, tensor[:1])}, "other": [torch.ones(2), tensor.detach()]}


@pytest.mark.parametrize("place", ["tensor", "view", "other"])
def test_a_change_in_place_of_any_tensor_is_told_with_the_place(place):
    tensor = torch.zeros(3)
    tensor += 1
    tree = trees(tensor)[place]
    guard = VersionGuard.of(tree)
    assert guard.checked("1F2") is tree

    tensor[0] = 1.0

    with pytest.raises(PipelineError, match=r"^1F2: a tensor of its output was changed in place .*clone\(\)"):
        guard.checked("1F2")


def test_what_is_detached_shares_values_and_changes_with_the_original_and_not_its_graph():
    original = torch.ones(2, requires_grad=True) * 2
    guard = VersionGuard.detached({"x": original, "n": 3})
    found = guard.checked("1F2")

    assert found["n"] == 3
    assert (found["x"].requires_grad, found["x"].grad_fn) == (True, None)
    assert found["x"].data_ptr() == original.data_ptr()
    original.detach().add_(1)
    with pytest.raises(PipelineError):
        guard.checked("1F2")


def test_tensors_of_inference_mode_are_taken_though_their_changes_are_not_counted():
    with torch.inference_mode():
        tensor = torch.zeros(3)
        guard = VersionGuard.of(tensor)

    assert version_of(tensor) == 0
    assert guard.checked("1F2") is tensor
