"""Every rank gets every loss, bit for bit, whatever the type, and by name where it has one."""

import pytest
import torch
from torch.overrides import TorchFunctionMode

from penstock.errors import PipelineError
from penstock.execute.control.collectives import Control
from penstock.execute.losses.exchange import LossExchange
from penstock.execute.losses.loss import LossShares
from penstock.execute.losses.output import ALL_TOGETHER, LossName
from penstock.execute.losses.step_losses import StepLosses
from tests.support.local_pipelines import error_of, on_ranks

CPU = torch.device("cpu")


def share(wires, losses, weights, holders=(-1,)):
    own = losses_of(len(losses), weights)
    for microbatch, loss in enumerate(losses):
        if holders[microbatch % len(holders)] % wires.num_ranks == wires.rank:
            own.computed[microbatch, 0] = loss
    return LossExchange(Control(wires), CPU).share(own)


def losses_of(num_microbatches, weights, fractions=(1.0,)):
    return StepLosses(num_microbatches, len(fractions), shares=LossShares(weights, [fractions] * num_microbatches))


@pytest.mark.feature("A8", "E14")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_losses_arrive_with_their_bits_and_type(dtype):
    losses = [(torch.rand(3, dtype=torch.float64) / 3).to(dtype)[index] for index in range(3)]
    mixed = [losses[0], losses[1].half()]

    for result in on_ranks(2, lambda wires: LossExchange(Control(wires), CPU).share(losses_of(2, [0.5, 0.5]))):
        assert (result.loss, result.losses, result.outputs) == (None, [], None)  # of no losses
    for result in on_ranks(3, share, losses, [0.25, 0.25, 0.5]):
        assert all(map(torch.equal, result.losses, losses))
        assert result.loss.dtype == dtype
        assert torch.equal(result.loss, losses[0] * 0.25 + losses[1] * 0.25 + losses[2] * 0.5)
    for result in on_ranks(2, share, mixed, [0.5, 0.5], (0, 1)):
        assert [(float(loss), loss.dtype) for loss in result.losses] == [(float(loss), loss.dtype) for loss in mixed]


def test_a_loss_that_is_not_finite_stays_so_unless_it_weighs_nothing():
    losses = [torch.tensor(float("nan")), torch.tensor(2.0), torch.tensor(float("inf"))]

    weightless = on_ranks(2, share, losses[:2], [0.0, 1.0])
    weighed = on_ranks(2, share, losses[1:], [0.5, 0.5])

    assert [float(result.loss) for result in weightless] == [2.0, 2.0]
    assert all(result.losses[0].isnan() for result in weightless)
    assert [float(result.loss) for result in weighed] == [float("inf")] * 2


# ---- names


class Counted(Control):
    """Counts its collectives."""

    def __init__(self, wires):
        super().__init__(wires)
        self.count = 0

    def all_gather_object(self, value):
        self.count += 1
        return super().all_gather_object(value)


def named_losses_of(losses=(), weights=(0.25, 0.75)):
    """A step with these losses: (name, is auxiliary, microbatch, value)."""
    own = losses_of(2, list(weights))
    own.auxiliary_shares = LossShares([0.5, 0.5], [[1.0], [1.0]])
    for name, is_auxiliary, microbatch, value in losses:
        value = torch.as_tensor(value)
        own.note(LossName(name, is_auxiliary, value.dtype), (microbatch, 0), value)
        if not is_auxiliary:
            own.computed[microbatch, 0] = value
    return own


def share_named(wires, *losses):
    return LossExchange(Control(wires), CPU).share(named_losses_of(*losses))


def numbers(losses):
    return {name: float(loss) for name, loss in losses.items()}


def test_named_losses_are_weighted_as_the_loss_is_and_those_of_layers_by_rows():
    def case(wires):
        own = [("a", False, 0, 4.0), ("a", False, 1, 8.0)] if wires.rank else [("z", True, 0, 1.0), ("z", True, 1, 3.0)]
        return share_named(wires, own)

    for result in on_ranks(2, case):
        assert numbers(result.named_losses) == {"a": 7.0, "z": 2.0}
        parts = {name: [float(loss) for loss in losses] for name, losses in result.named_microbatch_losses.items()}
        assert (float(result.loss), parts) == (7.0, {"a": [4.0, 8.0], "z": [1.0, 3.0]})


def test_losses_of_one_name_are_added_up_over_stages_and_ranks_in_the_wider_type():
    def case(wires):
        value = torch.tensor(1.5, dtype=[torch.bfloat16, torch.float32, torch.float32][wires.rank])
        return share_named(wires, [("z", True, b, value) for b in (0, 0, 1)])

    (without,) = on_ranks(1, share_named, [("z", True, 1, 3.0)])
    assert [float(loss) for loss in without.named_microbatch_losses["z"]] == [0.0, 3.0]
    assert numbers(without.named_losses) == {"z": 1.5}
    for result in on_ranks(3, case):
        assert [float(loss) for loss in result.named_microbatch_losses["z"]] == [9.0, 4.5]
        assert result.named_losses["z"].dtype == torch.float32


def test_the_total_has_what_layers_add_and_no_loss_by_that_name_is_reported():
    def case(wires):
        own = [(ALL_TOGETHER, True, b, 0.5) for b in range(2)]
        own += [("a", False, b, 4.0) for b in range(2)] if wires.rank else []
        return share_named(wires, own)

    (alone,) = on_ranks(1, share_named, [("a", False, b, 4.0) for b in (0, 1)])
    assert alone.total is alone.loss
    for result in on_ranks(2, case):
        assert (float(result.loss), float(result.total)) == (4.0, 5.0)
        assert list(result.named_losses) == ["a"]


def test_a_name_of_the_loss_function_and_of_a_layer_is_refused_on_every_rank():
    def case(wires):
        return error_of(share_named, wires, [("a", wires.rank == 0, 0, 4.0), ("a", wires.rank == 0, 1, 8.0)])

    for error in on_ranks(2, case):
        assert type(error) is PipelineError
        assert "both the loss function and an auxiliary loss of a layer are named 'a'; rename one of them" in str(error)


@pytest.mark.feature("X35")
def test_losses_of_any_names_take_one_gather_each_step():
    def case(wires):
        exchange = LossExchange(counted := Counted(wires), CPU)
        steps = [["a"], ["a"], [], ["a", "b"], ["b"], ["b", "a"]]
        found = []
        for names in steps:
            own = [(name, True, 0, 1.0) for name in names] if wires.rank else []
            found.append(sorted(exchange.share(named_losses_of(own)).named_losses))
        return found, counted.count

    for found, num_gathers in on_ranks(2, case):
        assert found == [["a"], ["a"], [], ["a", "b"], ["b"], ["a", "b"]]
        assert num_gathers == 6


class CpuAsGpu(TorchFunctionMode):
    """Lets the CPU stand in for a GPU: notes what is brought to it, and each wait for it."""

    def __init__(self):
        super().__init__()
        self.brought, self.num_waits = [], 0

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        is_pinned = kwargs.pop("pin_memory", False)
        to_gpu = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.device) and each.type == "cuda"]
        if to_gpu:
            is_from_pinned = function is torch.Tensor.to and getattr(args[0], "is_as_pinned", False)
            self.brought.append(bool(is_from_pinned and kwargs.get("non_blocking")))
            args, kwargs = [each for each in args if each not in to_gpu], {"dtype": kwargs.get("dtype")}
            if function is torch.Tensor.to:
                return args[0]
        self.num_waits += function in (torch.Tensor.tolist, torch.Tensor.item, torch.Tensor.__float__)
        value = function(*args, **kwargs)
        if is_pinned:
            value.is_as_pinned = True
        return value


def test_losses_of_a_step_are_brought_to_a_gpu_at_once_and_are_waited_for_once_where_they_are():
    def case(wires):
        own = [(name, False, b, 4.0) for name in ("a", "b") for b in range(2)] if wires.rank else [("z", True, 0, 1.0)]
        with CpuAsGpu() as gpu:
            exchange = LossExchange(Control(wires), torch.device("cuda"))
            result = exchange.share(named_losses_of(own if wires.rank < 2 else []))
        with CpuAsGpu() as without:
            exchange.share(named_losses_of())
        return numbers(result.named_losses), gpu.brought, gpu.num_waits, without.brought, without.num_waits

    results = on_ranks(3, case)

    assert [each[1:] for each in results] == [([True], 1, [], 0), ([True], 1, [], 0), ([True], 0, [], 0)]
    assert [each[0] for each in results] == [{"z": 0.5, "a": 4.0, "b": 4.0}] * 3
