"""Kernels compute what the CPU computes, to the bit."""

import pytest
import torch
from torch.nn import functional as F

from tests.emulated.runtime import RUNTIME

pytestmark = pytest.mark.emulated


def _draw(device):
    torch.manual_seed(5)
    values = torch.empty(6, device=device)
    drawn = [values.uniform_().clone(), torch.randn(3, device=device), torch.randperm(5, device=device)]
    own = torch.Generator(device=device).manual_seed(9)
    drawn += [torch.randint(0, 99, (4,), device=device, generator=own), torch.rand(2, device=device, generator=own)]
    drawn += [torch.multinomial(torch.ones(8, device=device), 3), torch.bernoulli(torch.full((5,), 0.5, device=device))]
    return [tensor.cpu().tolist() for tensor in drawn]


def _draws_alike(rank, num_ranks):
    return _draw("cpu"), _draw("emu")


def test_generators_give_the_numbers_of_the_cpu(emulated):
    ((expected, found),) = emulated.run(_draws_alike)

    assert found[:5] == expected[:5]


def _gradient(loss_of, values):
    leaf = values.clone().requires_grad_()
    return torch.autograd.grad(loss_of(leaf), leaf)[0]


CASES = {
    "transposed": lambda x: x.t() @ x,
    "sliced": lambda x: x[1:, ::2] + 1,
    "expanded": lambda x: x[:, :1].expand(4, 4) * 2,
    "unfolded": lambda x: x.unfold(0, 2, 1).sum(-1),
    "split": lambda x: torch.cat(x.split(2)[::-1]),
    "in place": lambda x: x.clone().mul_(2).add_(1),
    "through a view": lambda x: (y := x.clone(), y[0].zero_(), y)[-1],
    "out": lambda x: torch.add(x, x, out=torch.empty(0, device=x.device)),
    "out of sort": lambda x: torch.sort(x)[1],
    "boolean index": lambda x: x[x > 0],
    "nonzero": lambda x: x.nonzero(),
    "index put": lambda x: x.clone().index_put_((torch.tensor([0, 1], device=x.device),), x[2]),
    "index of the host": lambda x: x[torch.tensor([0, 2])],
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "scalar of the host that changes": lambda x: (factor := torch.tensor(2.0), x * factor, factor.fill_(9.0))[1],
    "type": lambda x: x.to(torch.bfloat16).float(),
    "empty": lambda x: x[:0].sum(),
    "of lists": lambda x: torch.stack(torch._foreach_mul([x, x], 2.0)),
    "normalized": lambda x: F.layer_norm(x, (4,)),
    "gradient of an embedding": lambda x: _gradient(lambda w: w[torch.tensor([1, 1], device=w.device)].sum(), x),
}


def _case(rank, num_ranks, name):
    values = torch.randn(4, 4)
    expected, found = CASES[name](values), CASES[name](values.to("emu"))
    return found.device.type, torch.equal(found.cpu(), expected), RUNTIME.host_waits


@pytest.mark.parametrize("name", CASES)
def test_operations_are_equal_to_the_cpu(emulated, name):
    ((device, is_equal, host_waits),) = emulated.run(_case, name)

    assert (device, is_equal) == ("emu", True)
    waits = {"boolean index": {"index.Tensor"}, "nonzero": {"nonzero.default"}}
    assert set(host_waits) - {"copy to the device", "copy to the host"} == waits.get(name, set())


def _mixed_devices(rank, num_ranks, other):
    torch.ones(2, device="emu") + torch.ones(2, device=other)


@pytest.mark.parametrize("other", ["cpu", "emu:1"])
def test_tensors_of_two_devices_are_an_error_at_once(emulated, other):
    (text,) = emulated.attempt(_mixed_devices, other).tracebacks.values()

    assert "expected all tensors to be on the same device, found" in text


def _between_devices(rank, num_ranks):
    values = torch.full((4,), 3.0, device="emu:0")
    return (values.to("emu:1") + 1).cpu().tolist()


def test_a_copy_between_devices_is_ordered_on_both(emulated):
    assert emulated.run(_between_devices, policy="random", seed=1) == [[4.0] * 4]
