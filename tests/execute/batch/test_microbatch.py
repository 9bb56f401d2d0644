"""The outputs of microbatches are put together by rule."""

import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.batch.microbatch import (
    BatchSpec,
    Concat,
    Replicate,
    Split,
    Stack,
    Sum,
    describe_specs,
    is_merge_spec,
    merge_outputs,
)


def rows(num_rows, *others):
    return torch.arange(float(num_rows)).reshape(num_rows, *[1] * len(others)).expand(num_rows, *others).clone()


@pytest.mark.feature("A7")
def test_outputs_are_concatenated_stacked_or_collected():
    outputs = [
        {"y": rows(2, 3), "n": (torch.tensor(1.0), 5, None)},
        {"y": rows(1, 3), "n": (torch.tensor(2.0), 6, None)},
    ]

    merged = merge_outputs(outputs)

    assert torch.equal(merged["y"], torch.cat([rows(2, 3), rows(1, 3)]))
    assert merged["n"][0].tolist() == [1.0, 2.0]
    assert merged["n"][1:] == ([5, 6], None)


def test_outputs_are_merged_by_rule():
    outputs = [(rows(2), {"a": rows(2), "b": rows(2, 1)}, rows(index + 1)) for index in range(3)]

    merged = merge_outputs(outputs, (Sum(), {"a": Stack(1), "b": Concat(1)}, list))

    assert merged[0].tolist() == [0.0, 3.0]
    assert merged[1]["a"].shape == (2, 3)
    assert merged[1]["b"].shape == (2, 3)
    assert [len(part) for part in merged[2]] == [1, 2, 3]
    assert merge_outputs([(1, [2]), (3, [4])], Sum()) == (4, [6])  # one rule for all leaves


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ([], "no outputs to merge"),
        ([(1, 2), (1,)], r"microbatch 1 has the form \(\*,\), that of microbatch 0 \(\*, \*\)"),
        ([{"y": rows(2, 3)}, {"y": rows(2, 4)}], r"output\['y'\]: Concat.*\[\(2, 3\), \(2, 4\)\]"),
    ],
)
def test_outputs_that_cannot_be_merged_are_an_error(outputs, message):
    with pytest.raises(PipelineError, match=message):
        merge_outputs(outputs)


def test_rules_and_trees_of_rules_can_merge_and_nothing_else():
    can = [None, list, Sum(), [Sum(), None], (list,), {"a": {"b": Concat(1)}}]
    cannot = [3, "cat", [Sum(), 3], {"a": ["cat"]}, {list}]

    assert [spec for spec in (*can, *cannot) if is_merge_spec(spec)] == can


def test_specs_are_described_by_what_they_mean():
    specs = BatchSpec(args=(Split(1),), kwargs={"b": Replicate(), "a": None})
    reordered = BatchSpec(args=(Split(1),), kwargs={"a": None, "b": Replicate()})

    assert describe_specs(specs) == "args=(Split(dim=1),), kwargs={'a': None, 'b': Replicate()}"
    assert describe_specs(reordered) == describe_specs(specs)
    assert describe_specs(None) == describe_specs(BatchSpec()) == "none"
