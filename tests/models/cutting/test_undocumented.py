"""torch counts changes in place, also those of views."""

import torch

from penstock.models.cutting.undocumented import version_of


def test_changes_in_place_are_counted():
    tensor = torch.zeros(4)
    before = version_of(tensor)
    tensor[1:].add_(1)
    assert version_of(tensor) > before
    with torch.inference_mode():
        assert version_of(torch.zeros(2)) == 0
