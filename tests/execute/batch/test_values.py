"""A digest stands for the bits of all elements, wherever they lie; what differs between ranks is named."""

import math

import pytest
import torch
from torch import nn

from penstock.execute.batch.microbatch import PreSplit
from penstock.execute.batch.values import BatchValues, refuse_other_values
from penstock.execute.control.collectives import Control
from tests.support.local_pipelines import error_of, on_ranks

BLOCK = 2**16


def digest(value):
    return BatchValues((value,), {}, None).digests()[0]


def drawn(*shape, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(5)).to(dtype)


@pytest.mark.parametrize("size", [1, 2, 3, 1000, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 17])
def test_one_changed_element_anywhere_changes_the_digest(size):
    values = drawn(size)
    before = digest(values)

    for place in {0, size // 3, size // 2, size - 1}:
        changed = values.clone()
        changed[place] = torch.nextafter(changed[place], torch.tensor(math.inf))
        assert digest(changed) != before


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint64),
        *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.float8_e4m3fn, torch.float8_e5m2),
        *(torch.complex64, torch.complex128),
    ],
    ids=str,
)
def test_values_of_every_type_are_read(dtype):
    first, second = torch.tensor([0, 1, 1, 0, 0, 1, 1]).to(dtype), torch.tensor([0, 1, 1, 0, 1, 1, 1]).to(dtype)

    assert digest(first) == digest(first.clone())
    assert digest(first) != digest(second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.int64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [2, 37, 5000])
def test_the_same_rows_in_another_order_have_another_digest(dtype, rows):
    values = torch.arange(rows).to(dtype).repeat_interleave(64).reshape(rows, 64) % 256
    before = digest(values)

    for order in (values.flip(0), values.roll(1, 0), values[torch.randperm(rows)[torch.arange(rows)]]):
        assert torch.equal(order, values) or digest(order) != before


def test_every_single_bit_of_an_element_counts():
    bits = torch.tensor([0, *(1 << bit for bit in range(63)), -(2**63)])

    assert len({digest(torch.cat([torch.zeros(40, dtype=torch.int64), bit[None]])) for bit in bits}) == 65


def test_pairs_that_change_places_are_noticed_whatever_their_distance_and_value():
    values = torch.zeros(2 * BLOCK, dtype=torch.float64)
    found = set()
    for distance in [*(2**power for power in range(17)), 3 * 2**12, BLOCK - 1, BLOCK + 2**12]:
        changed = values.clone()
        changed[5], changed[5 + distance] = 1.0, 2.0
        found.add(digest(changed))
        changed[5], changed[5 + distance] = 2.0, 1.0
        found.add(digest(changed))

    assert len(found) == 40


def test_where_and_how_values_lie_in_memory_does_not_matter():
    values = drawn(6, 4)
    image = drawn(2, 3, 4, 5)
    rows = drawn(3).reshape(3, 1).expand(3, 7)
    whole_numbers, complex_numbers = torch.arange(20), drawn(4, dtype=torch.complex64).conj()

    assert digest(values.t().contiguous().t()) == digest(values)
    assert digest(torch.cat([drawn(1, 4), values])[1:]) == digest(values)
    assert digest(image.to(memory_format=torch.channels_last)) == digest(image)
    assert digest(rows) == digest(rows.contiguous())
    assert digest(whole_numbers[::5]) == digest(torch.tensor([0, 5, 10, 15]))
    assert digest(whole_numbers[5::5][:1]) == digest(torch.tensor([5]))
    assert digest(torch.arange(4.0)[::2]) == digest(torch.tensor([0.0, 2.0]))
    assert digest(nn.Parameter(values)) == digest(values) == digest((values * 1.0).requires_grad_())
    assert digest(complex_numbers) == digest(complex_numbers.resolve_conj())


def digests_are_the_same(device):
    for values in (drawn(3), drawn(130 * BLOCK + 3), drawn(70, dtype=torch.bfloat16), drawn(9, dtype=torch.complex64)):
        assert digest(values.to(device)) == digest(values)


def test_a_digest_is_the_same_on_a_device(on_device):
    on_device(digests_are_the_same)


def test_values_are_named_by_the_places_of_a_call():
    split = PreSplit([{"x": drawn(2)}, {"x": drawn(3)}])

    values = BatchValues((drawn(2), [1.5, None]), {"mask": drawn(1), "split": split}, {"labels": drawn(4)})

    assert list(values.by_place()) == [
        "args[0]",
        "args[1][0]",
        "kwargs['mask']",
        "kwargs['split'].parts[0]['x']",
        "kwargs['split'].parts[1]['x']",
        "target['labels']",
    ]
    assert all(values.digests())
    assert BatchValues((), {}, None).digests() == [0, 0, 0]


@pytest.mark.parametrize("index", range(20))
def test_numbers_and_tensors_may_stand_in_any_order(index):
    numbers, tensors = [index, index + 0.5, 7], [drawn(2), drawn(3)]
    orders = [[*numbers, *tensors], [*tensors, *numbers], [numbers[0], tensors[0], *numbers[1:], tensors[1]]]

    found = [BatchValues(tuple(order), {}, None).digests() for order in orders]

    assert len({each[0] for each in found}) == 3
    assert all(each[1:] == [0, 0] for each in found)


def test_floats_count_and_what_cannot_be_read_is_left_out():
    def number(*args):
        return BatchValues(args, {}, None).digests()[0]

    class Own(torch.Tensor):
        pass

    assert number(1.0) != number(2.0)
    assert number(math.nan) == number(math.nan)
    assert number(torch.eye(2).to_sparse()) == number(2 * torch.eye(2).to_sparse())
    assert number(drawn(2).as_subclass(Own)) == number((2 * drawn(2)).as_subclass(Own))
    assert number(torch.zeros(2, device="meta")) == number(torch.zeros(2, device="meta"))
    assert number(object()) == number(object())
    assert number(drawn(2), drawn(3)) != number(drawn(3), drawn(2))
    assert digest(torch.zeros(0)) == digest(torch.zeros(0, 3))
    assert digest(torch.tensor(2.5)) != digest(torch.tensor(2.0))
    nan = torch.tensor([math.nan, 1.0])
    assert digest(nan) == digest(nan.clone()) != digest(torch.tensor([0.0, 1.0]))


def refusals(*batches):
    def case(wires):
        values = BatchValues(*batches[wires.rank])
        everyone = [BatchValues(*each).digests() for each in batches]
        return error_of(refuse_other_values, Control(wires), values, everyone)

    return on_ranks(len(batches), case)


def test_many_places_are_counted_and_places_that_a_rank_was_not_given_are_left_out():
    first = (tuple(drawn(3) for _ in range(7)), {}, None)
    second = (tuple(drawn(3) + 1 for _ in range(7)), {"mask": drawn(1)}, drawn(2))

    same = [[3, 0, 0], [0, 4, 0], [3, 4, 0], [0, 0, 0]]
    assert refuse_other_values(None, None, same) is None  # and nothing is exchanged
    for error in refusals(first, second):
        assert "values in args[0], args[1], args[2], args[3], args[4] and 2 more; pass" in str(error)
