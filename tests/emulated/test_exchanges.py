"""Exchanges beside a program's messages, where one communicator carries what goes in both directions."""

import pytest
import torch

from penstock.execute.observing.clock import ask, reply
from penstock.execute.parameters.gradient_sums import sum_over
from tests.emulated.pipelines import Cell, expect_equal_training, transport_of

pytestmark = pytest.mark.emulated


def sums_of_a_rank(rank, num_ranks):
    transport = transport_of(rank, num_ranks, torch.device("emu", rank), coalesces=True)
    gradients = [torch.full((3,), float(10**rank * factor), device=f"emu:{rank}") for factor in (1, 2, 3)]
    sums = dict(sum_over(transport, list(range(num_ranks)), gradients, list(map(torch.empty_like, gradients))))
    transport.close()
    return [sums[index].tolist() for index in range(3)]


@pytest.mark.feature("C1")
@pytest.mark.parametrize(("num_ranks", "total"), [(2, 11.0), (3, 111.0)])
def test_copies_are_summed_over_one_communicator(emulated, num_ranks, total):
    sums = [[factor * total] * 3 for factor in (1, 2, 3)]

    assert emulated.run(sums_of_a_rank, num_ranks=num_ranks) == [sums] * num_ranks


@pytest.mark.feature("C1")
@pytest.mark.parametrize(
    "cell", [Cell("1f1b", "ties", 3, messages="coalesced"), Cell("dualpipe", "plain", 2, messages="coalesced")], ids=str
)
def test_tied_layers_and_two_routes_change_no_bit_over_one_communicator(emulated, cell):
    expect_equal_training(emulated, cell)


def ping(rank, num_ranks):
    device = torch.device("emu", rank)
    transport = transport_of(rank, num_ranks, device, coalesces=True)
    question, answer = torch.zeros(1, device=device), torch.zeros(2, device=device)
    if rank == 0:
        ask(transport, 1, question, answer, lambda: 0.0)
    else:
        reply(transport, 0, question, lambda: torch.tensor([3.0, 4.0]).to(device), 1)
    transport.close()
    return answer.tolist()


def test_a_clock_is_compared_over_one_communicator(emulated):
    assert emulated.run(ping, num_ranks=2)[0] == [3.0, 4.0]
