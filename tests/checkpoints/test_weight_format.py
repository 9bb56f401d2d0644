"""The plain format is the pipeline's own names."""

import torch

from penstock.checkpoints.weight_format import PLAIN

ENTRIES = {"a.weight": ("F32", [2, 3]), "b": ("I64", [])}


def test_every_tensor_is_a_unit_of_its_own_name_that_stays_as_it_is_and_nothing_else_is_written(tmp_path):
    units, tensors = PLAIN.units(ENTRIES), {"b": torch.tensor(1)}

    assert [unit["names"] for unit in units] == [["a.weight"], ["b"]]
    assert [unit["file_types"] for unit in units] == [{"a.weight": ("F32", [2, 3])}, {"b": ("I64", [])}]
    assert PLAIN.stem == "weights"
    assert PLAIN.convert(tensors) is tensors
    PLAIN.require_all([])
    PLAIN.write_further(tmp_path / "none", ENTRIES)
    assert list(tmp_path.iterdir()) == []
