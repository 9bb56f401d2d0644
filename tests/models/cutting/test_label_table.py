"""Labels belong to memory, so that views share them, and to a leaf as long as it is as it was made."""

import torch

from penstock.models.cutting.label_table import UNKNOWN, LabelTable


def test_views_share_the_labels_of_their_memory_and_other_memory_has_none():
    table = LabelTable()
    leaf, other = torch.empty(4, 2, device="meta"), torch.zeros(2)
    table.add_leaf(leaf, "a#0.0")
    table.add_labels(leaf, frozenset(["b#0.0"]))

    assert table.labels_of({"view": leaf.T[0], "number": 3}) == {"a#0.0", "b#0.0"}
    assert table.labels_of(other) == frozenset()
    assert table.labels_of(torch.empty(1, device="meta")) == {UNKNOWN}
    assert table.leaf_label(leaf) == "a#0.0"
    assert table.leaf_label(leaf.view_as(leaf)) is None
    assert table.labels_of(torch.zeros(2).to_sparse()) == frozenset()


def test_a_change_in_place_ends_a_leaf_and_is_noted():
    table = LabelTable()
    leaf, constant = torch.empty(4, device="meta"), torch.zeros(4)
    table.add_leaf(leaf, "a#0.0")
    leaf.add_(1)
    table.note_change(leaf, frozenset())
    table.note_change(constant, frozenset(["a#0.0"]))

    assert table.leaf_label(leaf) is None
    assert table.changed_labels == {"a#0.0"}
    assert table.labels_of(constant) == {"a#0.0"}
    assert constant._version == 1
