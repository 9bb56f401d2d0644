"""A microbatch is cut along the sequence, all its parts by one rule, and what has no sequence goes along whole."""

import pytest
import torch

from penstock.errors import PipelineError
from penstock.execute.batch.cutting import BatchRule, with_sizes
from penstock.execute.batch.microbatch import BatchSpec, PreSplit, Replicate, Split


def cut(args=(), kwargs=None, target=None, *, num_slices=2, num_microbatches=1, **rule):
    """The slices of the last microbatch."""
    rule = BatchRule(num_microbatches, num_slices, **rule)
    return rule.slices(rule.microbatches(args, kwargs or {}, target)[-1])


def grid(rows, length, *others):
    return torch.arange(float(rows * length)).reshape(rows, length, *[1] * len(others)).expand(rows, length, *others)


def test_args_keywords_and_target_are_cut_alike_on_the_sequence():
    tokens, mask, target = grid(2, 6), grid(2, 6, 4), grid(2, 6)

    slices = cut((tokens,), {"mask": mask}, target, num_slices=3)

    assert [(part.index, part.slice, part.size, part.length) for part in slices] == [(0, q, 2, 2) for q in range(3)]
    for part, start in zip(slices, (0, 2, 4), strict=True):
        assert torch.equal(part.args[0], tokens[:, start : start + 2])
        assert torch.equal(part.kwargs["mask"], mask[:, start : start + 2])
        assert torch.equal(part.target, target[:, start : start + 2])


def test_one_slice_is_the_microbatch_itself():
    rule = BatchRule(2)
    microbatch = rule.microbatches((grid(4, 3),), {}, torch.zeros(4))[1]

    assert rule.slices(microbatch) == [microbatch]


def test_slices_are_views_of_their_microbatch():
    tokens = grid(2, 4).clone()

    second = cut((tokens,))[1]

    assert second.args[0].untyped_storage().data_ptr() == tokens.untyped_storage().data_ptr()


def test_the_first_slices_are_longer_by_one_where_that_is_allowed():
    assert [part.length for part in cut((grid(1, 8),), num_slices=3, allow_ragged=True)] == [3, 3, 2]


def test_what_has_no_sequence_goes_to_every_slice_whole():
    weights, scale = torch.arange(2.0), torch.tensor(3.0)

    for part in cut((grid(2, 4), weights, "text"), {"scale": scale, "pair": (7, None)}):
        assert torch.equal(part.args[1], weights)
        assert part.args[2] == "text"
        assert part.kwargs["scale"] is scale
        assert part.kwargs["pair"] == (7, None)


def test_what_every_microbatch_gets_whole_every_slice_does_too():
    table = torch.zeros(10, 5)
    specs = BatchSpec(kwargs={"table": Replicate()})

    for part in cut((grid(2, 4),), {"table": table}, specs=specs):
        assert part.kwargs["table"] is table


def test_a_spec_cuts_what_every_microbatch_gets_whole():
    positions = torch.arange(4)

    slices = cut(
        (grid(2, 4),),
        {"positions": positions},
        specs=BatchSpec(kwargs={"positions": Replicate()}),
        slice_specs=BatchSpec(kwargs={"positions": Split(0)}),
    )

    assert [part.kwargs["positions"].tolist() for part in slices] == [[0, 1], [2, 3]]


@pytest.mark.parametrize(
    ("rule", "shape"),
    [({"slice_dim": 0, "specs": BatchSpec(args=Split(1))}, (4, 2)), ({"slice_dim": -1}, (2, 4))],
    ids=["sequence first", "sequence last"],
)
def test_the_sequence_may_lie_on_another_dimension(rule, shape):
    values = torch.arange(8).reshape(shape)

    slices = cut((values,), **rule)

    for part, expected in zip(slices, values.chunk(2, dim=rule["slice_dim"]), strict=True):
        assert torch.equal(part.args[0], expected)


def test_a_part_that_its_caller_has_split_is_cut_too():
    parts = PreSplit([{"x": grid(2, 4)}, {"x": grid(1, 2)}])

    slices = cut((parts,), num_microbatches=2)

    assert [part.args[0]["x"].tolist() for part in slices] == [[[0.0]], [[1.0]]]


def test_a_rank_that_was_given_nothing_has_slices_of_nothing():
    slices = cut(slice_specs=BatchSpec(args=(Split(1),), kwargs={"mask": Split(1)}))

    assert [(part.args, part.kwargs, part.target, part.length) for part in slices] == [((), {}, None, 0)] * 2


def test_agreed_sizes_are_put_in():
    assert [(part.size, part.length) for part in with_sizes(cut(), 3, [2, 1])] == [(3, 2), (3, 1)]


@pytest.mark.parametrize(
    ("args", "target", "rule", "text"),
    [
        (
            (grid(2, 5),),
            None,
            {},
            r"args\[0\] .*5 positions, which 2 slices do .*Pass 4 or 6 positions.*one of 1, 5",
        ),
        ((grid(2, 1),), None, {}, r"1 positions for 2 slices; .* use at most 1 slices"),
        ((grid(2, 4), grid(2, 1)), None, {}, r"args\[0\] .*has 4 positions, but .*args\[1\] .*has 1 positions"),
        ((grid(2, 4),), torch.zeros(2), {}, r"target of shape \(2,\) has no dimension 1 .* would count all of it"),
        ((grid(2, 4),), None, {"slice_specs": BatchSpec(args=Split(2))}, r"cannot be split on dim 2"),
        ((grid(2, 4),), None, {"slice_specs": BatchSpec(args=[Split(), Split()])}, "does not fit"),
    ],
    ids=["uneven", "short", "disagreeing", "target without sequence", "no such dim", "bad spec"],
)
def test_what_cannot_be_cut_says_where_and_how_to_go_on(args, target, rule, text):
    with pytest.raises(PipelineError, match=text):
        cut(args, target=target, **rule)


def test_a_target_without_a_sequence_goes_along_where_it_is_marked():
    target = torch.zeros(2)

    for part in cut((grid(2, 4),), target=target, slice_specs=BatchSpec(target=Replicate())):
        assert part.target.shape == (2,)


def test_another_way_to_cut_has_another_signature():
    args = (grid(2, 4),)
    rules = [
        BatchRule(1),
        BatchRule(1, 2),
        BatchRule(1, 4),
        BatchRule(1, 2, slice_dim=-1),
        BatchRule(1, 2, slice_specs=BatchSpec(args=Replicate())),
    ]

    assert len({rule.signature(args, {}, None) for rule in rules}) == len(rules)
    assert BatchRule(1, 2).signature(args, {}, None) == BatchRule(1, 2).signature((grid(2, 4) + 1,), {}, None)
