"""Arguments, keywords and target are cut by one rule, along the samples and along the sequence."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.microbatch import BatchSpec, Concat, PreSplit, Replicate, Split, merge_outputs
from tests.execute.batch.test_microbatch import rows


def split_batch(args, kwargs, target, *, num_microbatches, **rule):
    return BatchRule(num_microbatches, **rule).microbatches(args, kwargs, target)


@dataclass
class Batch:
    tokens: Any
    scale: float = 1.0


@pytest.mark.feature("0.8", "A6")
def test_args_keywords_and_target_are_split_alike():
    x, mask, target = rows(6, 2), rows(6), rows(6, 3)

    parts = split_batch((x,), {"mask": mask}, target, num_microbatches=3)

    assert [part.index for part in parts] == [0, 1, 2]
    assert [part.size for part in parts] == [2, 2, 2]
    for part, start in zip(parts, (0, 2, 4), strict=True):
        assert torch.equal(part.args[0], x[start : start + 2])
        assert torch.equal(part.kwargs["mask"], mask[start : start + 2])
        assert torch.equal(part.target, target[start : start + 2])


@pytest.mark.feature("A4")
def test_nested_trees_keep_their_form_and_presplit_parts_are_handed_out_as_they_are():
    marker = object()
    others = {"flag": True, "more": [marker, None, "text"], "scalar": torch.tensor(7.0)}
    args = Batch((rows(4), [rows(4, 2)]), 2.0), others
    parts = split_batch(args, {}, {"y": rows(4)}, num_microbatches=2)
    without = split_batch((), {}, None, num_microbatches=3, specs=BatchSpec(args=(Split(1),)))

    ones, targets = [{"x": rows(3)}, {"x": rows(1)}], [rows(3), rows(1)]
    presplit = split_batch((PreSplit(ones),), {}, PreSplit(targets), num_microbatches=2)

    assert [(part.args[0], part.target, part.size) for part in presplit] == list(
        zip(ones, targets, (3, 1), strict=True)
    )
    assert [part.args[1] for part in parts] == [others, others]
    assert [(part.args, part.kwargs, part.target, part.size) for part in without] == [((), {}, None, 0)] * 3
    assert isinstance(parts[0].args[0], Batch)
    assert parts[1].args[0].scale == 2.0
    assert parts[1].args[0].tokens[1][0].tolist() == [[2.0, 2.0], [3.0, 3.0]]
    assert parts[1].target["y"].tolist() == [2.0, 3.0]


@pytest.mark.feature("A4", "G5")
def test_specs_choose_the_dimension_or_replicate():
    x, table, mask, target = rows(8, 4).T, rows(16, 2), rows(3, 3), rows(8)
    specs = BatchSpec(args=(Split(1), {"table": Replicate()}), kwargs={"mask": Replicate()}, target=Split())

    parts = split_batch((x, {"table": table}), {"mask": mask, "w": rows(8)}, target, num_microbatches=4, specs=specs)

    assert [tuple(part.args[0].shape) for part in parts] == [(4, 2)] * 4
    assert torch.equal(merge_outputs([part.args[0] for part in parts], Concat(1)), x)
    assert all(part.args[1]["table"] is table and part.kwargs["mask"] is mask for part in parts)
    assert parts[3].kwargs["w"].tolist() == [6.0, 7.0]


@pytest.mark.feature("A3")
@pytest.mark.parametrize(
    ("args", "specs", "message"),
    [
        ((PreSplit([1, 2, 3]),), None, r"args\[0\]: PreSplit holds 3 parts for 2 microbatches"),
        ((PreSplit([rows(1), rows(2)]), PreSplit([rows(2), rows(1)])), None, r"parts of \(1, 2\).*parts of \(2, 1\)"),
        ((PreSplit([rows(1), rows(2)]), rows(4)), None, r"parts of \(1, 2\) rows, but args\[1\].*4 rows"),
        ((rows(4),), (Split(1),), r"args\[0\] of shape \(4,\) cannot be split on dim 1"),
        ((rows(4),), (Split(-2),), r"cannot be split on dim -2"),
        ((torch.tensor(1.0),), Split(), r"args\[0\] of shape \(\) cannot be split on dim 0"),
        ((rows(4),), {1: Split()}, r"args: the spec names 1"),
        ((rows(4),), Split, r"args: the spec <class .*Split'> does not fit"),
        ((rows(0),), None, "has 0 rows"),
    ],
)
def test_wrong_inputs_are_errors_that_name_the_place(args, specs, message):
    with pytest.raises(PipelineError, match=message):
        split_batch(args, {}, None, num_microbatches=2, specs=BatchSpec(args=specs))
    with pytest.raises(PipelineError, match="num_microbatches is 0"):
        split_batch((rows(4),), {}, None, num_microbatches=0)


def test_fewer_microbatches_than_parts_are_refused_though_their_rows_do_not_count():
    images, specs = PreSplit([1, 2, 3, 4]), BatchSpec(args=(None, Replicate()))
    with pytest.raises(PipelineError, match=r"args\[1\]: PreSplit holds 4 parts for 2 microbatches"):
        split_batch((rows(2), images), {}, None, num_microbatches=4, specs=specs, takes_any_size=True)


@pytest.mark.parametrize(("rule", "num_parts"), [({}, 3), ({"microbatch_size": 2}, 2)])
def test_an_evaluation_of_few_rows_takes_a_part_for_each_of_its_microbatches(rule, num_parts):
    rule = BatchRule(4, takes_any_size=True, **rule)

    parts = rule.microbatches((rows(3),), {"state": PreSplit(range(num_parts))}, None)

    assert [part.kwargs["state"] for part in parts] == list(range(num_parts))
    assert sum(part.size for part in parts) == 3


# ---- signatures


def signature(*args, target=None, num_microbatches=2, **options):
    return BatchRule(num_microbatches, **options).signature(args, {"k": 1}, target)


def test_a_signature_does_not_depend_on_the_values_of_tensors_and_numbers():
    assert signature(torch.zeros(4), 1.0, 1) == signature(torch.ones(4), 2.0, -(2**63))
    assert signature(PreSplit([1, 2])) == signature(PreSplit([3, 4]))
    assert signature(PreSplit([rows(1), rows(2)])) == signature(PreSplit([rows(1) + 1, rows(2)]))


def test_a_signature_changes_with_everything_that_may_change_a_shape():
    x = torch.zeros(4, 4)
    found = [
        signature(x),
        signature(x, num_microbatches=4),
        signature(x, allow_ragged=True),
        signature(x, specs=BatchSpec(args=Split(1))),
        signature(x, specs=BatchSpec(args=Replicate())),
        signature(x, target=x),
        signature(x[:2]),
        signature(x.double()),
        signature(x.clone().requires_grad_()),
        signature((x,)),
        signature([x]),
        signature({"x": x}),
        signature(x, 1),
        signature(x, 2**64),
        signature(x, True),
        signature(x, False),
        signature(x, "1"),
        signature(x, "2"),
        signature(x, 1.0),
        signature(x, None),
        signature(PreSplit([x, x])),
        signature(PreSplit([x, x[:1]])),
    ]

    assert len(set(found)) == len(found)


@pytest.mark.parametrize(
    ("num_rows", "sizes"), [(8, [2, 2, 2, 2]), (7, [2, 2, 2, 1]), (4, [1] * 4), (3, [1] * 3), (1, [1])]
)
def test_a_rule_that_takes_any_size_makes_fewer_microbatches_of_few_rows(num_rows, sizes):
    parts = BatchRule(4, takes_any_size=True).microbatches((rows(num_rows),), {"scale": 2}, None)

    assert [part.size for part in parts] == sizes
    assert [part.index for part in parts] == list(range(len(sizes)))
    assert torch.equal(torch.cat([part.args[0] for part in parts]), rows(num_rows))
    assert all(part.kwargs == {"scale": 2} for part in parts)


# ---- what cannot be cut


class Opaque:
    """An object that nobody has registered."""

    def __init__(self, **attributes):
        self.__dict__.update(attributes)


def score_of(bias):
    return lambda score, row, head, query, key: score + bias[row]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (
            Opaque(batch=[rows(8)]),
            r"kwargs\['k'\]\[0\].batch\[0\] has 8 rows.*belongs to a .*Opaque.*kwargs={'k': {0: ps.Repl",
        ),
        (rows(8).numpy(), r"kwargs\['k'\]\[0\] has 8 rows, as the batch has, but is a numpy.ndarray.*ps.PreSplit"),
        (score_of(rows(8)), r"kwargs\['k'\]\[0\] reading bias has 8 rows.*belongs to a function"),
        (torch.distributions.Normal(rows(8), 1.0), r"kwargs\['k'\]\[0\].loc has 8 rows.*Normal"),
    ],
)
def test_an_object_with_rows_of_the_batch_is_refused_unless_it_is_marked(value, text):
    specs = BatchSpec(kwargs={"k": Replicate()})

    for batch in [((rows(8),), {"k": [value]}, None), ((), {"k": [value]}, rows(8))]:
        with pytest.raises(PipelineError, match=text):
            split_batch(*batch, num_microbatches=4)
        assert all(part.kwargs["k"] == [value] for part in split_batch(*batch, num_microbatches=4, specs=specs))


@pytest.mark.parametrize(
    "value",
    [
        Opaque(table=rows(5), scale=torch.tensor(1.0), names=["a"] * 8),
        Opaque(keys=rows(0)),
        torch.nn.Linear(3, 8),
        rows(5).numpy(),
        ["text"] * 8,
        score_of(rows(3)),
    ],
)
@pytest.mark.parametrize("args", [(rows(8),), ()], ids=["rows", "of other ranks"])
def test_an_object_without_rows_of_the_batch_goes_whole(value, args):
    parts = split_batch(args, {"k": value}, None, num_microbatches=4)

    assert all(part.kwargs["k"] is value or part.kwargs["k"] == value for part in parts)


def test_rows_in_an_object_are_counted_along_the_dimension_of_its_marker_and_named_by_ranks_without_rows():
    value = Opaque(x=rows(8, 3).T)

    split_batch((rows(8),), {"k": value}, None, num_microbatches=4)
    with pytest.raises(PipelineError, match=r"kwargs\['k'\].x has 8 rows"):
        split_batch((rows(8),), {"k": value}, None, num_microbatches=4, specs=BatchSpec(kwargs=Split(1)))
    found = BatchRule(4).uncut_rows((Opaque(x=rows(8), y=rows(3)),), {"k": rows(2)}, None)
    assert {number: text.partition(" has")[0] for number, text in found.items()} == {8: "args[0].x", 3: "args[0].y"}
