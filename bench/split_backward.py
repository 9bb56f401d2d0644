"""Measure both parts of a split backward against a whole one, and against torch's own split, in the same run.

    python bench/split_backward.py            one thread; about a minute
    python bench/split_backward.py --device cuda

A whole backward (B) is measured after a forward made for it; I and W are Penstock's parts of it, or torch's functions
`stage_backward_input` and `stage_backward_weight`. `F'/F` is the forward made for two parts over the one made for a
whole, and `all` is (F' + I + W) / (F + B). The three take turns, in a new order each round, gradients adding up as over
the microbatches of a step; times are medians, on the CPU those of this thread's work, whatever else runs there.
`forwards` counts how often checkpointed layers run in a forward and its backward, `waits` is the share of the
multiplications for weight gradients that is in W.

Penstock does not defer the small weights of the tiny blocks. `--border` shows where to defer a weight begins to pay, in
chains of layers of one width that are always deferred: where `all` is 1.33, it takes as long as the gradient itself.
"""

import argparse
import itertools
import json
import math
import statistics
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
from split_cases import CASES, NUM_TINY, Checkpointed
from torch import Tensor, nn
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight
from torch.utils.flop_counter import FlopCounterMode

from penstock.execute.accelerator import synchronize
from penstock.execute.losses.step_losses import StepLosses
from penstock.execute.parameters.gradient_store import GradientStore
from penstock.execute.split.planner import SplitPlanner
from penstock.execute.stages.passes import PassOptions, SavedForward, StagePasses
from penstock.execute.stages.stage import Stage
from penstock.execute.step import Step

NUM_WARM_UP_ROUNDS = 3
NUM_ROUNDS = 21
NUM_FORWARDS = 2
NUM_CHAINED = 16
FORWARD_BUDGET = 1.05
TINY = f"{NUM_TINY} tiny blocks"
BUDGETS = {
    "transformer block": 1.05,
    "the same, checkpointed": 1.05,
    "two decoder blocks": 1.15,
    "block of width 512": 1.05,
    "the same with LoRA": 1.05,
    "with a custom function": 1.05,
    "compiled, aot_eager": 1.05,
    "compiled, inductor": 1.05,
    TINY: 1.15,
    "conv net": 1.15,
}
REFUSED_BY_TORCH = ("compiled, aot_eager", "compiled, inductor")
MIN_SHARE = 0.95
"""Of the multiplications for weights, but for those of the tiny blocks, which are not worth a wait."""


@dataclass(slots=True)
class Row:
    """One line of the table."""

    case: str
    whole_forward_s: list[float] = field(default_factory=list)
    whole_s: list[float] = field(default_factory=list)
    forward_s: list[float] = field(default_factory=list)
    input_s: list[float] = field(default_factory=list)
    weight_s: list[float] = field(default_factory=list)
    torch_input_s: list[float] = field(default_factory=list)
    torch_weight_s: list[float] = field(default_factory=list)
    share: float = 0.0
    """Of the multiplications for weight gradients, those that wait for W."""
    forwards: int | None = None
    torch_forwards: int | None = None

    @property
    def ratio(self) -> float:
        return _ratio([self.input_s, self.weight_s], [self.whole_s])

    @property
    def torch_ratio(self) -> float | None:
        """None where torch's functions raise an error."""
        if not self.torch_input_s:
            return None
        return _ratio([self.torch_input_s, self.torch_weight_s], [self.whole_s])

    @property
    def forward_ratio(self) -> float:
        return _ratio([self.forward_s], [self.whole_forward_s])

    @property
    def total_ratio(self) -> float:
        return _ratio([self.forward_s, self.input_s, self.weight_s], [self.whole_forward_s, self.whole_s])


def _ratio(parts: list[list[float]], wholes: list[list[float]]) -> float:
    """The median over the rounds of what was measured in one moment: the machine's speed drifts between them."""
    sums = [map(sum, zip(*columns, strict=True)) for columns in (parts, wholes)]
    return statistics.median(part_s / whole_s for part_s, whole_s in zip(*sums, strict=True))


@dataclass(slots=True)
class Case:
    """A model with a batch on a device."""

    stage: Stage
    inputs: Tensor
    gradient: Tensor

    def begin(self, *, is_split: bool) -> tuple[StagePasses, Step]:
        """Begin a step."""
        passes = StagePasses(self.stage, PassOptions(is_split=is_split), GradientStore(self.stage.parameters))
        step = Step([], StepLosses(1, 1))
        passes.begin()
        passes.gradients.begin_step()
        return passes, step

    def whole(self) -> Iterator[None]:
        """A forward and its whole backward."""
        passes, step = self.begin(is_split=False)
        leaf = self.inputs.clone().requires_grad_()
        yield
        saved = saved_by(passes, step, leaf)
        yield
        passes.backward(saved, [self.gradient])
        yield

    def parts(self) -> Iterator[None]:
        """A forward and Penstock's two parts of its backward."""
        passes, step = self.begin(is_split=True)
        leaf = self.inputs.clone().requires_grad_()
        yield
        saved = saved_by(passes, step, leaf)
        yield
        _, inputs = passes.backward_input(saved, [self.gradient])
        yield
        passes.gradients.add(inputs)
        yield

    def parts_in_torch(self) -> Iterator[None]:
        """A forward and torch's two parts of its backward."""
        passes, step = self.begin(is_split=False)
        leaf = self.inputs.clone().requires_grad_()
        weights = [parameter for _, parameter in self.stage.named_parameters()]
        yield
        output, _ = passes.forward(step, (0, 0), (leaf,), {})
        yield
        _, groups = stage_backward_input([output], [self.gradient], [leaf], iter(weights))
        yield
        stage_backward_weight(iter(weights), groups)
        yield


def saved_by(passes: StagePasses, step: Step, leaf: Tensor) -> SavedForward:
    """Run a forward, and return what it saved."""
    _, saved = passes.forward(step, (0, 0), (leaf,), {})
    assert saved is not None
    return saved


def times_s(steps: Iterator[None], device: torch.device) -> list[float]:
    """Return the time of each step but the first, which prepares."""
    found = []
    next(steps)
    synchronize(device)
    start = read(device)
    for _ in steps:
        synchronize(device)
        found.append(read(device) - start)
        start = read(device)
    return found


def read(device: torch.device) -> float:
    """Seconds of this thread's own work on the CPU, which runs backwards in it, too; elsewhere of the clock."""
    return time.thread_time() if device.type == "cpu" else time.perf_counter()


def measure(name: str, device: torch.device, num_rounds: int) -> Row:
    """Measure one case, all three ways in turn."""
    torch.manual_seed(0)
    make, shape = CASES[name]
    stage = Stage(0, {"0": make().to(device)})
    inputs = torch.randn(shape, device=device)
    case, row = Case(stage, inputs, torch.randn_like(inputs)), Row(name, share=waiting_share(name, shape))
    runs = {"whole": case.whole, "parts": case.parts}
    if name not in REFUSED_BY_TORCH and runs_in_torch(case):
        runs["torch"] = case.parts_in_torch
    order = list(runs)
    for number in range(-NUM_WARM_UP_ROUNDS, num_rounds):
        times, forwards = {}, {}
        for way in order:
            before = num_runs(stage)
            times[way] = times_s(runs[way](), device)
            forwards[way] = num_runs(stage) - before
        order = [*order[1:], order[0]]
        if number >= 0:
            note(row, times)
            if isinstance(stage.layers["0"], Checkpointed):
                row.forwards, row.torch_forwards = forwards["parts"], forwards.get("torch")
    return row


def runs_in_torch(case: Case) -> bool:
    """Whether torch's functions run; those of torch 2.11 fail where a node of a function in Python has weights."""
    try:
        list(case.parts_in_torch())
    except RuntimeError:
        return False
    return True


def note(row: Row, times: Mapping[str, list[float]]) -> None:
    """Add one round."""
    columns = {
        "whole": (row.whole_forward_s, row.whole_s),
        "parts": (row.forward_s, row.input_s, row.weight_s),
        "torch": ([], row.torch_input_s, row.torch_weight_s),
    }
    for way, own in times.items():
        for column, value in zip(columns[way], own, strict=True):
            column.append(value)


def waiting_share(name: str, shape: tuple[int, ...]) -> float:
    """Return which share of the multiplications for weight gradients is in W, once it is known what can wait.

    All of them are what a whole backward has more than one of the same model without trained weights.
    """
    make, _ = CASES[name]
    model = make()
    case = Case(Stage(0, {"0": model}), torch.randn(shape), torch.randn(shape))
    for _ in range(NUM_WARM_UP_ROUNDS):
        list(case.parts())
    *_, num_late = multiplications(case.parts())
    *_, num_whole = multiplications(case.whole())
    model.requires_grad_(False)
    *_, num_of_inputs = multiplications(case.whole())
    return num_late / (num_whole - num_of_inputs)


def multiplications(steps: Iterator[None]) -> list[int]:
    """Return the multiplications of each step but the first, which prepares."""
    found = []
    next(steps)
    while True:
        with FlopCounterMode(display=False) as counter:
            if next(steps, steps) is steps:
                return found
        found.append(counter.get_total_flops() // 2)


def num_runs(stage: Stage) -> int:
    """How often checkpointed layers have run so far."""
    return sum(layer.num_runs for layer in stage.layers.values() if isinstance(layer, Checkpointed))


def is_within(row: Row) -> bool:
    """Whether a row keeps its budget."""
    budget = BUDGETS[row.case]
    is_cheap = row.ratio <= budget and row.forward_ratio <= FORWARD_BUDGET
    waits = row.case == TINY or row.share >= MIN_SHARE
    return is_cheap and waits and row.forwards in (None, NUM_FORWARDS)


def line(row: Row) -> str:
    """One row, drawn."""
    columns = (row.whole_forward_s, row.whole_s, row.forward_s, row.input_s, row.weight_s)
    medians_ms = [f"{1e3 * statistics.median(each):8.2f}" for each in columns]
    ratios = [f"{each:8.2f}" for each in (row.forward_ratio, row.ratio, row.total_ratio)]
    ratios.append(f"{'refuses':>8}" if row.torch_ratio is None else f"{row.torch_ratio:8.2f}")
    ratios.append(f"{row.share:8.0%}")
    forwards = "" if row.forwards is None else f"   forwards {row.forwards} (torch {row.torch_forwards})"
    budget = f"   budget {BUDGETS[row.case]:.2f}"
    verdict = "ok" if is_within(row) else "MISSED"
    return f"{row.case:<24}{''.join(medians_ms)}{''.join(ratios)}{budget}{forwards}   {verdict}"


def show_border(device: torch.device) -> None:
    """Print what it costs to defer weights over sizes of weights."""
    print(f"{'multiplications':<24}{'all':>8}")
    for num_rows, width in itertools.product((64, 256), (32, 64, 96, 128, 192, 256)):
        layer = nn.Sequential(*(nn.Linear(width, width) for _ in range(NUM_CHAINED))).to(device)
        stage = Stage(0, {"0": layer})
        stage.split_planner = SplitPlanner(small=0)
        inputs = torch.randn(num_rows, width, device=device)
        case, row = Case(stage, inputs, torch.randn_like(inputs)), Row("")
        for number in range(-NUM_WARM_UP_ROUNDS, 3 * NUM_ROUNDS):
            times = {"whole": times_s(case.whole(), device), "parts": times_s(case.parts(), device)}
            if number >= 0:
                note(row, times | {"torch": [0.0] * 3})
        print(f"2**{math.log2(num_rows * width**2):<5.1f} {num_rows:>5} x {width:<8}{row.total_ratio:8.2f}", flush=True)


def main() -> int:
    """Print the table; return 1 when a median is above its budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu", type=torch.device, help="where to measure (default: cpu)")
    parser.add_argument("--rounds", default=NUM_ROUNDS, type=int, help=f"measurements of each (default: {NUM_ROUNDS})")
    parser.add_argument("--output", help="a JSON file for the times and ratios")
    parser.add_argument("--border", action="store_true", help="show from which size on to defer a weight pays")
    args = parser.parse_args()
    device = args.device
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {device}; medians of {args.rounds} rounds, and of their ratios; ms")
    if args.border:
        show_border(device)
        return 0
    names = ("F", "B", "F'", "I", "W", "F'/F", "(I+W)/B", "all", "torch", "waits")
    print(f"{'':<24}{''.join(f'{each:>8}' for each in names)}")
    rows = []
    for name in CASES:
        rows.append(measure(name, device, args.rounds))
        print(line(rows[-1]), flush=True)
    if args.output:
        ratios = [{"ratio": row.ratio, "total_ratio": row.total_ratio, "torch_ratio": row.torch_ratio} for row in rows]
        table = [asdict(row) | each for row, each in zip(rows, ratios, strict=True)]
        Path(args.output).write_text(json.dumps(table, indent=2))
    return 0 if all(map(is_within, rows)) else 1


if __name__ == "__main__":
    sys.exit(main())
