"""What holders of one parameter tell each other of its gradient adds up to what one process has."""

import pytest
import torch
from torch import nn

from penstock.execute.stages.gradient_parts import (
    ABSENT,
    DENSE,
    Form,
    added,
    common_form,
    parts_of,
    room_for,
    settled,
    size_of,
    total_of,
)
from penstock.pipeline import Pipeline
from tests.local_pipelines import WIDTH, on_ranks, settle, square_loss, values

FLOAT64 = torch.float64
LIKE = torch.empty((), dtype=FLOAT64).expand(5, 2)


def sparse(rows, seed=1):
    gradient = torch.sparse_coo_tensor([rows], values(seed, len(rows), 2, dtype=FLOAT64), (5, 2))
    return settled(gradient)


@pytest.mark.parametrize(
    ("sizes", "form"),
    [
        ([ABSENT, ABSENT], Form.NONE),
        ([ABSENT, DENSE], Form.DENSE),
        ([3, DENSE, ABSENT], Form.DENSE),
        ([3, ABSENT, 0], Form.SPARSE),
        ([0, 0], Form.SPARSE),
    ],
)
def test_one_dense_gradient_makes_all_dense_and_none_makes_none(sizes, form):
    assert common_form(sizes) is form


@pytest.mark.parametrize(
    "gradients",
    [
        [None, None],
        [values(1, 5, 2, dtype=FLOAT64), None],
        [values(1, 5, 2, dtype=FLOAT64), sparse([0, 3, 3])],
        [sparse([4, 1]), None, sparse([1, 1, 2], 2)],
        [sparse([]), sparse([2])],
    ],
)
def test_the_sum_is_that_of_the_gradients(gradients):
    form = common_form([size_of(gradient) for gradient in gradients])
    sent = [parts_of(gradient, LIKE, form) for gradient in gradients]

    total = total_of(sent, LIKE, form)

    rooms = [room_for(LIKE, form, size_of(gradient)) for gradient in gradients]
    assert [[(r.shape, r.dtype) for r in room] for room in rooms] == [
        [(s.shape, s.dtype) for s in each] for each in sent
    ]
    found = [gradient.to_dense() for gradient in gradients if gradient is not None]
    if not found:
        assert total is None
    else:
        torch.testing.assert_close(total.to_dense(), sum(found), rtol=1e-12, atol=1e-12)
        assert total.is_sparse == all(gradient is None or gradient.is_sparse for gradient in gradients)


def test_what_was_accumulated_stays_and_is_sparse_only_with_sparse():
    dense = values(3, 5, 2, dtype=FLOAT64)

    assert added(None, None) is None
    assert added(dense, None) is dense
    assert added(None, dense) is dense
    assert added(sparse([1]), sparse([1, 2])).is_sparse
    torch.testing.assert_close(added(dense, sparse([1])), dense + sparse([1]).to_dense())
    torch.testing.assert_close(added(sparse([1]), dense), dense + sparse([1]).to_dense())


def test_a_gradient_that_is_sparse_in_more_than_rows_becomes_dense():
    assert not settled(torch.eye(3).to_sparse()).is_sparse


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


def table_layers():
    return [settle(nn.Embedding(11, WIDTH, sparse=True, dtype=FLOAT64), 1), settle(nn.Linear(WIDTH, WIDTH).double(), 2)]


def learn(layers, step):
    table, others = [], []
    for parameter in layers:
        (table if parameter.shape == (11, WIDTH) else others).append(parameter)
    optimizers = ([torch.optim.SparseAdam(table, lr=0.1)] if table else []) + [torch.optim.SGD(others, lr=0.1)]
    for number in range(3):
        tokens = torch.randint(11, (8,), generator=torch.Generator().manual_seed(number))
        for _ in range(2):  # gradients of two steps add up
            step(tokens)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


@pytest.mark.parametrize(("family", "debug"), [("dualpipe", "off"), ("chimera", "values")])
def test_a_sparse_table_with_copies_on_two_ranks_learns_by_sparse_adam(family, debug):
    target = values(2, 8, WIDTH, dtype=FLOAT64)

    def case(wires):
        pipeline = Pipeline(table_layers(), family, 4, square_loss, transport=wires, debug=debug)
        learn(pipeline.parameters(), lambda tokens: pipeline.step(tokens, target=target))
        return {name: parameter.detach() for name, parameter in pipeline.named_parameters()}

    model = nn.Sequential(*table_layers())

    def step(tokens):
        for part, wanted in zip(tokens.split(2), target.split(2), strict=True):
            (square_loss(model(part), wanted) / 4).backward()

    learn(model.parameters(), step)
    for found in on_ranks(2, case):
        for name, parameter in found.items():
            torch.testing.assert_close(parameter, dict(model.named_parameters())[name].detach(), rtol=1e-12, atol=1e-12)
