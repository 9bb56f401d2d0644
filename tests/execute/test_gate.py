"""A batch comes in on all ranks or on none."""

import pytest
import torch

from penstock.errors import StepRefused
from penstock.execute.agreement import Mode
from penstock.execute.gate import Gate
from penstock.execute.microbatch import BatchSpec, Split
from tests.local_pipelines import error_of, on_ranks

CPU = torch.device("cpu")


def gate_of(wires, **options):
    options = {"num_microbatches": 2, "specs": None, "allow_ragged": False, "needs_inputs": wires.rank == 0} | options
    return Gate(wires, CPU, **options)


def admit(wires, calls, **options):
    args, kwargs, target = calls[wires.rank]
    return gate_of(wires, **options).admit(Mode.TRAIN, args, kwargs, target)


def refuse(wires, calls, **options):
    return error_of(admit, wires, calls, **options)


ROWS = torch.arange(6.0)
INPUTS_ONLY = (ROWS,), {}, None
TARGET_ONLY = (), {}, ROWS
NOTHING = (), {}, None


def test_every_rank_knows_the_sizes_and_has_the_parts_that_it_was_given():
    first, middle, last = on_ranks(3, admit, [INPUTS_ONLY, NOTHING, TARGET_ONLY])

    assert [m.size for batch in (first, middle, last) for m in batch.microbatches] == [3] * 6
    assert [m.args[0].tolist() for m in first.microbatches] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert [m.args for m in middle.microbatches] == [(), ()]
    assert [m.target.tolist() for m in last.microbatches] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]
    assert first.signature == middle.signature == last.signature


def test_ragged_sizes_reach_ranks_that_were_given_nothing():
    calls = [((torch.arange(5),), {}, None), NOTHING]

    _, second = on_ranks(2, lambda wires: admit(wires, calls, allow_ragged=True))

    assert [m.size for m in second.microbatches] == [3, 2]


def test_a_batch_of_another_shape_has_another_signature():
    (small, _), (large, _) = (on_ranks(2, admit, [((torch.zeros(rows),), {}, None), NOTHING]) for rows in (2, 4))

    assert small.signature != large.signature


def test_the_first_stage_may_be_fed_by_keywords_alone():
    batches = on_ranks(2, admit, [((), {"tokens": ROWS}, None), NOTHING])

    assert [m.kwargs["tokens"].tolist() for m in batches[0].microbatches] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


@pytest.mark.parametrize(
    ("calls", "text"),
    [
        ([((torch.arange(5),), {}, None), TARGET_ONLY], "do not divide evenly"),
        ([INPUTS_ONLY, ((), {}, torch.arange(5))], "do not divide evenly"),
        ([NOTHING, TARGET_ONLY], "was given no inputs"),
        ([INPUTS_ONLY, ((), {}, torch.arange(8))], "microbatches of different shape"),
        ([INPUTS_ONLY, ((ROWS.double(),), {}, None)], "inputs of different shape or type"),
        ([(({(1, 2): ROWS},), {}, None), TARGET_ONLY], "expected str or int keys"),
    ],
    ids=["uneven inputs", "uneven target", "no inputs", "other rows", "other type", "bad key"],
)
def test_a_batch_that_does_not_fit_is_refused_on_every_rank(calls, text):
    for error in on_ranks(2, refuse, calls):
        assert type(error) is StepRefused
        assert text in str(error)


def test_a_spec_that_does_not_fit_is_refused_on_every_rank():
    specs = BatchSpec(args=({"mask": Split()},))

    for error in on_ranks(2, lambda wires: refuse(wires, [INPUTS_ONLY, TARGET_ONLY], specs=specs)):
        assert type(error) is StepRefused
        assert "does not fit" in str(error)


def test_a_rank_that_refuses_says_why_and_the_others_whose_batch_it_was():
    first, second = on_ranks(2, refuse, [((torch.arange(5),), {}, None), TARGET_ONLY])

    assert str(first).startswith("args[0]")
    assert str(second).startswith("rank 0 refuses its batch: args[0]")
    assert (first.rank, second.rank) == (0, 0)


def test_a_keyword_that_no_layer_names_is_refused_with_the_nearest_one():
    calls = [((torch.ones(4, 2),), {"maks": torch.ones(4)}, None)] * 2

    for error in on_ranks(2, lambda wires: refuse(wires, calls, known_keywords=frozenset({"mask", "scale"}))):
        assert "no layer's forward names 'maks'. Did you mean 'mask'?" in str(error)


def test_a_rank_whose_layers_take_keywords_must_get_them_where_another_does():
    batch, mask = (torch.ones(4, 2),), {"mask": torch.ones(4)}
    names = frozenset({"mask"})

    calls = [(batch, mask, None), (batch, {}, None)]
    for error in on_ranks(2, lambda wires: refuse(wires, calls, own_keywords=names)):
        assert "rank 0 was given keyword arguments, rank 1 was not" in str(error)
