"""Measure both parts of a split backward against a whole one, and against torch's own split, in the same run.

    python bench/split_backward.py            one thread; about a minute
    python bench/split_backward.py --device cuda

A whole backward (B) is measured in a forward made for it; I and W are Penstock's parts of it, or torch's functions
`stage_backward_input` and `stage_backward_weight`. The three take turns, gradients adding up as over the microbatches
of a step; times are medians. `forwards` counts how often checkpointed layers run in a forward and its backward.
"""

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field

import torch
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from penstock.execute.split_backward import backward_input, backward_weight
from penstock.execute.stage import Stage

NUM_WARM_UP_ROUNDS = 3
NUM_ROUNDS = 21
NUM_TINY = 64
NUM_FORWARDS = 2
BUDGETS = {"transformer block": 1.05, "the same, checkpointed": 1.05, f"{NUM_TINY} tiny blocks": 1.15, "conv net": None}


class Block(nn.Module):
    """A transformer block, norms first."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:  # [batch, positions, width]
        parts = self.qkv(self.norms[0](hidden)).unflatten(-1, (3, self.num_heads, -1)).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(*parts, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        return hidden + self.down(F.gelu(self.up(self.norms[1](hidden))))


class Checkpointed(nn.Module):
    """Layers that are run again in the backward, and count it."""

    def __init__(self, layers: nn.Module) -> None:
        super().__init__()
        self.layers, self.num_runs = layers, 0

    def forward(self, hidden: Tensor) -> Tensor:
        return checkpoint(self._run, hidden, use_reentrant=False)

    def _run(self, hidden: Tensor) -> Tensor:
        self.num_runs += 1
        return self.layers(hidden)


class Tiny(nn.Module):
    """Two small layers beside a way around them."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.layers(hidden)


def conv_net(channels: int) -> nn.Module:
    """Four convolutions with batch norms."""
    layers = [
        nn.Sequential(nn.Conv2d(channels, channels, 3, padding=1, bias=False), nn.BatchNorm2d(channels), nn.ReLU())
        for _ in range(4)
    ]
    return nn.Sequential(*layers)


CASES: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "transformer block": (lambda: Block(256, 4), (8, 128, 256)),
    "the same, checkpointed": (lambda: Checkpointed(Block(256, 4)), (8, 128, 256)),
    f"{NUM_TINY} tiny blocks": (lambda: nn.Sequential(*(Tiny(64) for _ in range(NUM_TINY))), (64, 64)),
    "conv net": (lambda: conv_net(32), (8, 32, 28, 28)),
}


@dataclass(slots=True)
class Row:
    """One line of the table."""

    case: str
    whole_s: list[float] = field(default_factory=list)
    input_s: list[float] = field(default_factory=list)
    weight_s: list[float] = field(default_factory=list)
    torch_input_s: list[float] = field(default_factory=list)
    torch_weight_s: list[float] = field(default_factory=list)
    forwards: int | None = None
    torch_forwards: int | None = None

    @property
    def ratio(self) -> float:
        return _median_ratio(self.input_s, self.weight_s, self.whole_s)

    @property
    def torch_ratio(self) -> float:
        return _median_ratio(self.torch_input_s, self.torch_weight_s, self.whole_s)


def _median_ratio(input_s: list[float], weight_s: list[float], whole_s: list[float]) -> float:
    parts_s = [first + second for first, second in zip(input_s, weight_s, strict=True)]
    return statistics.median(parts_s) / statistics.median(whole_s)


@dataclass(slots=True)
class Case:
    """A model with a batch on a device."""

    stage: Stage
    inputs: Tensor
    gradient: Tensor

    def whole(self) -> Iterator[None]:
        """A whole backward."""
        self.stage.is_split = False
        leaf = self.inputs.clone().requires_grad_()
        saved = self.stage.save((leaf,), self.stage.forward((leaf,), {}))
        yield
        self.stage.backward(saved, [self.gradient])
        yield

    def parts(self) -> Iterator[None]:
        """Penstock's two parts."""
        self.stage.is_split = True
        leaf = self.inputs.clone().requires_grad_()
        saved = self.stage.save((leaf,), self.stage.forward((leaf,), {}))
        yield
        backward_input(self.stage, saved, [self.gradient])
        yield
        backward_weight(self.stage, saved)
        yield

    def parts_in_torch(self) -> Iterator[None]:
        """torch's two parts."""
        self.stage.is_split = False
        leaf = self.inputs.clone().requires_grad_()
        output = self.stage.forward((leaf,), {})
        weights = [parameter for _, parameter in self.stage.named_parameters()]
        yield
        _, groups = stage_backward_input([output], [self.gradient], [leaf], iter(weights))
        yield
        stage_backward_weight(iter(weights), groups)
        yield


def times_s(steps: Iterator[None], device: torch.device) -> list[float]:
    """Return the time of each step but the first, which prepares."""
    found = []
    next(steps)
    _wait(device)
    start = time.perf_counter()
    for _ in steps:
        _wait(device)
        found.append(time.perf_counter() - start)
        start = time.perf_counter()
    return found


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def measure(name: str, device: torch.device) -> Row:
    """Measure one case, all three ways in turn."""
    torch.manual_seed(0)
    make, shape = CASES[name]
    stage = Stage(0, {"0": make().to(device)})
    inputs = torch.randn(shape, device=device)
    case, row = Case(stage, inputs, torch.randn_like(inputs)), Row(name)
    for number in range(-NUM_WARM_UP_ROUNDS, NUM_ROUNDS):
        whole = times_s(case.whole(), device)
        before = num_runs(stage)
        ours = times_s(case.parts(), device)
        between = num_runs(stage)
        theirs = times_s(case.parts_in_torch(), device)
        if number < 0:
            continue
        row.whole_s += whole
        row.input_s.append(ours[0])
        row.weight_s.append(ours[1])
        row.torch_input_s.append(theirs[0])
        row.torch_weight_s.append(theirs[1])
        if isinstance(stage.layers["0"], Checkpointed):
            row.forwards, row.torch_forwards = between - before, num_runs(stage) - between
    return row


def num_runs(stage: Stage) -> int:
    """How often checkpointed layers have run so far."""
    return sum(layer.num_runs for layer in stage.layers.values() if isinstance(layer, Checkpointed))


def is_within(row: Row) -> bool:
    """Whether a row keeps its budget."""
    budget = BUDGETS[row.case]
    return (budget is None or row.ratio <= budget) and row.forwards in (None, NUM_FORWARDS)


def line(row: Row) -> str:
    """One row, drawn."""
    medians_ms = [f"{1e3 * statistics.median(each):8.2f}" for each in (row.whole_s, row.input_s, row.weight_s)]
    forwards = "" if row.forwards is None else f"   forwards {row.forwards} (torch {row.torch_forwards})"
    budget = "" if BUDGETS[row.case] is None else f"   budget {BUDGETS[row.case]:.2f}"
    verdict = "ok" if is_within(row) else "MISSED"
    return f"{row.case:<24}{''.join(medians_ms)}{row.ratio:8.2f}{row.torch_ratio:8.2f}{budget}{forwards}   {verdict}"


def main() -> int:
    """Print the table and its data; return 1 when a median is above its budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device, help="where to measure (default: cpu)")
    device = parser.parse_args().device
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {device}; medians of {NUM_ROUNDS} rounds; ms")
    print(f"{'':<24}{'B':>8}{'I':>8}{'W':>8}{'(I+W)/B':>8}{'torch':>8}")
    rows = []
    for name in CASES:
        rows.append(measure(name, device))
        print(line(rows[-1]), flush=True)
    print(json.dumps([asdict(row) | {"ratio": row.ratio, "torch_ratio": row.torch_ratio} for row in rows]))
    return 0 if all(map(is_within, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
