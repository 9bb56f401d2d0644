"""Pipelines whose ranks are threads, on the emulated device and on the CPU: what they train is to be equal to the bit.

Both run in the kept process, over `TorchTransport`: its sockets between CPUs, its communicators between devices.
"""

import threading
from collections import Counter
from dataclasses import dataclass, field, replace
from pathlib import Path
from runpy import run_path

import torch
from torch import nn

from penstock import Carry
from penstock.execute.transport import TorchTransport
from penstock.pipeline import Pipeline
from penstock.schedules import build
from tests.emulated.rank_threads import store_of_scenario

DEADLINE_S = 20.0
NUM_STEPS = 3
WIDTH = 8
NUM_LAYERS = 8
ROWS, LENGTH = 2, 4  # of a microbatch
SPLIT_WIDTH = 128
"""Weights of smaller layers never wait for W."""
DRAWING = threading.Lock()
"""Rank threads share the generator by which layers are initialized."""


class RankGroup:
    """What a transport asks of a process group, of one rank that is a thread."""

    def __init__(self, rank, num_ranks, store):
        self._rank, self._num_ranks, self._store = rank, num_ranks, store

    def rank(self):
        return self._rank

    def size(self):
        return self._num_ranks

    def get_group_store(self):
        return self._store


def transport_of(rank, num_ranks, device, *, deadline_s=DEADLINE_S, **options):
    """Connect this rank's thread with the others, as processes are connected."""
    group = RankGroup(rank, num_ranks, store_of_scenario())
    return TorchTransport(group, deadline_s=deadline_s, device=device, **options)


# ---- layers


class Block(nn.Module):
    """Normalizes, and adds what two products make of it; dropout by a mask that is drawn on the CPU."""

    def __init__(self, width=WIDTH, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = dropout

    def forward(self, hidden):  # [batch, sequence, width]
        added = self.down(nn.functional.gelu(self.up(self.norm(hidden))))
        if self.dropout and self.training:
            mask = (torch.rand(added.shape, device="cpu") >= self.dropout) / (1 - self.dropout)
            if added.device.type != "cpu":
                # Queued: a host that waited here would keep the generators from the other ranks, which are threads.
                mask = mask.pin_memory().to(added.device, non_blocking=True)
            added = added * mask
        return hidden + added


class RunningSum(nn.Module):
    """Adds to every position all positions before it, those of earlier slices too."""

    def __init__(self):
        super().__init__()
        self.block, self.carry = Block(), Carry()

    def forward(self, hidden):
        before, hidden = self.carry.get(), self.block(hidden)
        sums = hidden.cumsum(1) if before is None else before + hidden.cumsum(1)
        self.carry.put(sums[:, -1:])
        return hidden + 0.1 * sums


EXAMPLE = run_path(str(Path(__file__).parents[2] / "examples" / "overlapped_pairs.py"))


class OnTwoStreams(EXAMPLE["OnTwoStreams"]):
    """The hook of the example, which counts its pairs."""

    num_pairs = 0

    def __call__(self, first, second):
        self.num_pairs += 1
        super().__call__(first, second)


def one_by_one(first, second):
    first()
    second()


# ---- features


IN_MEMORY = {
    "device": lambda tensor, device: tensor.to(device),
    "host": lambda tensor, device: tensor,
    "pinned": lambda tensor, device: tensor if device.type == "cpu" else tensor.pin_memory(),
}


@dataclass(frozen=True)
class Feature:
    """What a cell trains, beside its schedule."""

    make: object = lambda: [Block() for _ in range(NUM_LAYERS)]
    options: dict = field(default_factory=dict)
    of_schedule: dict = field(default_factory=dict)
    dtype: torch.dtype = torch.float32
    lengths: tuple = (LENGTH,) * NUM_STEPS
    """Of the sequences, step by step."""
    width: int = WIDTH
    is_overlapped: bool = False


def _tied_layers():
    return [nn.Linear(WIDTH, WIDTH), *(Block() for _ in range(NUM_LAYERS - 2)), nn.Linear(WIDTH, WIDTH)]


FEATURES = {
    "plain": Feature(),
    "dropout": Feature(make=lambda: [Block(dropout=0.3) for _ in range(NUM_LAYERS)], options={"seed": 5}),
    "recompute": Feature(of_schedule={"recompute": True}),
    "ties": Feature(make=_tied_layers, options={"tied": [("0.weight", f"{NUM_LAYERS - 1}.weight")]}),
    "variable shapes": Feature(options={"variable_shapes": True}, lengths=(4, 6, 3)),
    "main gradients": Feature(options={"main_gradients": True}, dtype=torch.bfloat16),
    "late weights": Feature(make=lambda: [Block(SPLIT_WIDTH) for _ in range(NUM_LAYERS)], width=SPLIT_WIDTH),
    "slices": Feature(make=lambda: [RunningSum() for _ in range(NUM_LAYERS)], of_schedule={"slices": 2}),
    "overlapped pairs": Feature(is_overlapped=True),
    "compiled": Feature(options={"compile": "aot_eager"}),
}


@dataclass(frozen=True)
class Cell:
    """One training."""

    family: str
    feature: str
    num_ranks: int
    run_ahead: int | None = 2
    record: bool = False
    memory: str = "device"
    """Where batches are: on the device, in the host's memory, or in pinned memory of the host."""
    messages: str = "posted"
    offloads: bool = False
    """Whether activations of all stages wait in the memory of the host."""
    one_stream: bool = False

    def __str__(self):
        place = "" if self.memory == "device" else f", batches in {self.memory} memory"
        way = "" if self.messages == "posted" else f", messages {self.messages}"
        more = (", offloads" if self.offloads else "") + (", one stream" if self.one_stream else "")
        return f"{self.family}, {self.feature}, {self.num_ranks} ranks, run_ahead={self.run_ahead}{place}{way}{more}"

    @property
    def num_microbatches(self):
        return 2 * self.num_ranks if self.family == "dualpipe-v" else 4


@dataclass
class Trained:
    """What a rank has when its training is over."""

    losses: list
    weights: dict
    calls: Counter
    """Of the code that runs on a device alone, how often it was called on this rank."""


def train(rank, num_ranks, cell, kind):
    """Train a cell on devices of a kind."""
    device = torch.device(kind) if kind == "cpu" else torch.device(kind, rank)
    ways = {"coalesces": cell.one_stream or cell.messages == "coalesced", "one_stream": cell.one_stream}
    return train_over(transport_of(rank, num_ranks, device, **ways), cell, device)


def expect_equal_training(emulated, cell, policy="lazy", seed=0):
    """Compare a training on the device with that on the CPU, bit for bit; return what its ranks have."""
    expected = emulated.run(train, cell, "cpu", num_ranks=cell.num_ranks, timeout_s=60)

    trained = emulated.run(train, cell, "emu", num_ranks=cell.num_ranks, policy=policy, seed=seed, timeout_s=110)

    assert [rank.losses for rank in trained] == [rank.losses for rank in expected]
    assert [rank.weights for rank in trained] == [rank.weights for rank in expected]
    return trained


def train_over(transport, cell, device, *, dtype=None):
    """Train a cell with the ranks of a transport, in the type of its feature unless another is given."""
    feature, calls = FEATURES[cell.feature], Counter()
    feature = feature if dtype is None else replace(feature, dtype=dtype)
    _count_calls(transport.device_queue, calls)
    schedule = build(cell.family, ranks=cell.num_ranks, microbatches=cell.num_microbatches, **feature.of_schedule)
    with DRAWING:
        torch.manual_seed(0)
        layers = [layer.to(feature.dtype) for layer in feature.make()]
    options = {**feature.options, "run_ahead": cell.run_ahead, "frees_other_stages": False}
    options |= {"messages": cell.messages, "one_stream": cell.one_stream}
    options["offload"] = range(schedule.num_stages) if cell.offloads else ()
    if feature.is_overlapped:
        options["overlap"] = one_by_one if device.type == "cpu" else OnTwoStreams(device)
    pipeline = Pipeline(layers, schedule, loss=nn.functional.mse_loss, transport=transport, device=device, **options)
    try:
        losses = _steps(pipeline, feature, device, cell)
        weights = {name: parameter.detach().cpu() for name, parameter in pipeline.named_parameters()}
    finally:
        pipeline.close()
    return Trained(losses, {name: (weight.dtype, weight.double().tolist()) for name, weight in weights.items()}, calls)


def _steps(pipeline, feature, device, cell):
    attribute = "main_grad" if feature.options.get("main_gradients") else "grad"
    parameters = list(pipeline.parameters())
    optimizer = torch.optim.AdamW(parameters, lr=0.01)
    generator = torch.Generator().manual_seed(1)
    losses = []
    for length in feature.lengths:
        shape = ROWS * cell.num_microbatches, length, feature.width
        made = [torch.randn(shape, generator=generator).to(feature.dtype) for _ in range(2)]
        inputs, target = batch = [IN_MEMORY[cell.memory](tensor, device) for tensor in made]
        result = pipeline.step(inputs, target=target, record=cell.record)
        for tensor in batch if cell.memory != "device" else ():
            tensor.fill_(float("nan"))  # the step is over, so the batch is the caller's again
        losses.append(result.loss.item())
        for parameter in parameters:
            gradient = getattr(parameter, attribute)
            parameter.grad = None if gradient is None else gradient.to(parameter.dtype)
            setattr(parameter, attribute, None) if attribute != "grad" else None
        optimizer.step()
        optimizer.zero_grad()
    return losses


def _count_calls(queue, calls):
    if queue is not None:
        follow = queue.follow

        def count_and_follow(ticket, *message):
            calls["follow"] += 1
            follow(ticket, *message)

        queue.follow = count_and_follow
