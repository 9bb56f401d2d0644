"""Observations hold copies, by name."""

import torch

from penstock.verifying.observation import SHRINKING, kept, named_losses, named_outputs, shrink


def test_what_is_kept_does_not_change_later():
    tensor = torch.ones(2, requires_grad=True)
    copies = kept({"a": tensor, "b": None})

    shrink([tensor])

    assert copies["a"].tolist() == [1, 1]
    assert not copies["a"].requires_grad
    assert copies["b"] is None
    assert tensor.tolist() == torch.full((2,), SHRINKING).tolist()


def test_outputs_are_named_by_their_places_and_other_leaves_left_out():
    outputs = named_outputs({"logits": torch.ones(1), "more": [torch.zeros(1), 3]})

    assert list(outputs) == ["output['logits']", "output['more'][0]"]
    assert list(named_outputs(torch.ones(1))) == ["output"]


def test_losses_are_those_of_microbatches_and_of_the_batch():
    assert list(named_losses(torch.ones(()), [torch.ones(())] * 2)) == ["microbatch 0", "microbatch 1", "batch"]
    assert named_losses(None, []) == {}
