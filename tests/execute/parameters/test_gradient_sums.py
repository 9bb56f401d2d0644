"""Holders of a parameter end with the sum of their gradients, in their order, and need room for one more meanwhile."""

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.execute.parameters.gradient_sums import added, sum_over
from penstock.execute.parameters.tied import TiedCopy
from penstock.pipeline import Pipeline
from tests.execute.parameters.test_tied import begun
from tests.support.local_pipelines import WIDTH, on_ranks, settle, square_loss, values

FLOAT64 = torch.float64
LIKE = torch.empty((), dtype=FLOAT64).expand(5, 2)


def sparse(rows, seed=1):
    return torch.sparse_coo_tensor([rows], values(seed, len(rows), 2, dtype=FLOAT64), (5, 2)).coalesce()


def sums(gradients, like=LIKE):
    """What each rank gets for the gradient that it holds."""

    def case(wires):
        return dict(sum_over(wires, list(range(len(gradients))), [gradients[wires.rank]], [like]))[0]

    return on_ranks(len(gradients), case)


@pytest.mark.parametrize(
    "gradients",
    [
        [None, None],
        [values(1, 5, 2, dtype=FLOAT64), None],
        [None, values(1, 5, 2, dtype=FLOAT64), None],
        [values(1, 5, 2, dtype=FLOAT64), sparse([0, 3, 3])],
        [sparse([4, 1]), None, sparse([1, 1, 2], 2)],
        [sparse([0, 3]), values(1, 5, 2, dtype=FLOAT64), None],
        [sparse([]), sparse([2])],
        [sparse([0, 2, 3]), None, sparse([])],
        [sparse([]), sparse([])],
        [sparse([0]), sparse([2]), sparse([1]), values(1, 5, 2, dtype=FLOAT64)],
    ],
)
def test_every_holder_gets_the_sum(gradients):
    found = [gradient.to_dense() for gradient in gradients if gradient is not None]

    for total in sums(gradients):
        if not found:
            assert total is None
        else:
            torch.testing.assert_close(total.to_dense(), sum(found), rtol=1e-12, atol=1e-12)
            assert total.is_sparse == all(gradient is None or gradient.is_sparse for gradient in gradients)


@pytest.mark.parametrize("ranks", [[0, 1, 2, 3], [2, 0, 3, 1], [3, 1]])
def test_the_order_of_adding_is_that_of_the_holders(ranks):
    parts = [[values(10 * rank + index, 3, 4).T * 10.0**rank for index in range(6)] for rank in range(4)]
    expected = [parts[ranks[0]][index].clone() for index in range(6)]
    for rank in ranks[1:]:
        for total, part in zip(expected, parts[rank], strict=True):
            total += part

    def case(wires):
        likes = [torch.empty(()).expand(4, 3)] * 6
        return dict(sum_over(wires, ranks, list(parts[wires.rank]), likes)) if wires.rank in ranks else None

    for rank, found in enumerate(on_ranks(4, case)):
        if rank in ranks:
            assert all(torch.equal(found[index], expected[index]) for index in range(6))


def test_gradients_that_share_memory_are_each_summed():
    memory = values(1, 4)

    def case(wires):
        own = [memory.view(2, 2), memory.view(4)] if wires.rank else [values(2, 2, 2), values(3, 4)]
        return [total for _, total in sorted(sum_over(wires, [1, 0], own, own), key=lambda pair: pair[0])]

    for first, second in on_ranks(2, case):
        assert torch.equal(first, values(1, 4).view(2, 2) + values(2, 2, 2))
        assert torch.equal(second, values(1, 4) + values(3, 4))


def test_what_was_accumulated_stays_and_is_sparse_only_with_sparse():
    dense = values(3, 5, 2, dtype=FLOAT64)

    for total in sums([torch.eye(3).to_sparse()] * 2, torch.eye(3)):
        assert torch.equal(total, 2 * torch.eye(3))  # dense, for it was sparse in more than rows
    assert added(None, None) is None
    assert added(dense, None) is dense
    assert added(None, dense) is dense
    assert added(sparse([1]), sparse([1, 2])).is_sparse
    torch.testing.assert_close(added(dense.clone(), sparse([1])), dense + sparse([1]).to_dense())
    torch.testing.assert_close(added(sparse([1]), dense.clone()), dense + sparse([1]).to_dense())


# ---- memory


class Counting(TorchDispatchMode):
    """Counts the bytes of tensors that were made in it and are still there."""

    def __init__(self):
        super().__init__()
        self.peak = 0
        self._made = {}

    @property
    def num_bytes(self):
        self._made = {key: each for key, each in self._made.items() if not each[0].expired()}
        return sum(num_bytes for _, num_bytes in self._made.values())

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        made = func(*args, **(kwargs or {}))
        if isinstance(made, torch.Tensor) and made.layout is torch.strided and not func._schema.is_mutable:
            memory = StorageWeakRef(made.untyped_storage())
            self._made.setdefault(memory.cdata, (memory, made.untyped_storage().nbytes()))
            self.peak = max(self.peak, self.num_bytes)
        return made


SIZES = [700, 2000, 3, 5, 1000, 1200, 1999]


@pytest.mark.parametrize("num_ranks", [2, 3, 4])
@pytest.mark.parametrize("has_before", [False, True])
def test_one_parameter_more_is_held_at_most(num_ranks, has_before):
    def case(wires):
        parameters = {str(size): nn.Parameter(torch.zeros(size, dtype=FLOAT64)) for size in SIZES}
        copied = TiedCopy(parameters, list(range(num_ranks)))
        with Counting() as counting:
            for parameter in parameters.values():
                parameter.grad = torch.ones_like(parameter) if has_before else None
            store = begun(copied)
            for parameter in parameters.values():
                parameter.grad = torch.full_like(parameter, wires.rank + 1.0)
            held = counting.num_bytes
            copied.reduce(wires, store)
            assert counting.num_bytes == 8 * sum(SIZES)
        return held, counting.peak, [parameter.grad.unique().tolist() for parameter in parameters.values()]

    total = float(sum(range(num_ranks + 1)) + has_before)
    for held, peak, found in on_ranks(num_ranks, case):
        assert found == [[total]] * len(SIZES)
        assert held == 8 * sum(SIZES) * (1 + has_before)
        assert peak - held <= 8 * max(SIZES) + 64 * num_ranks * len(SIZES)


# ---- in a pipeline


class Unused(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.idle = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(3))

    def forward(self, hidden):
        return self.used(hidden)


@pytest.mark.parametrize(
    ("family", "tied"),
    [("1f1b", ()), ("1f1b", [("0.idle", "1.idle")]), ("chimera", ()), ("dualpipe", [("0.idle", "1.idle")])],
)
@pytest.mark.parametrize("main_gradients", [False, True])
def test_a_parameter_that_nobody_uses_has_no_gradient(family, tied, main_gradients):
    def case(wires):
        layers = [settle(Unused(), seed) for seed in range(2)]
        pipeline = Pipeline(layers, family, 4, square_loss, transport=wires, tied=tied, main_gradients=main_gradients)
        pipeline.step(values(1, 8, WIDTH), target=values(2, 8, WIDTH))
        attribute = "main_grad" if main_gradients else "grad"
        return {name: getattr(parameter, attribute) for name, parameter in pipeline.named_parameters()}

    for found in on_ranks(2, case):
        assert {name for name, gradient in found.items() if gradient is None} == {n for n in found if "idle" in n}
