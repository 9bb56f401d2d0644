"""Measure what Penstock adds to the work of a step: next to torch's schedules over gloo, and per instruction alone.

    python bench/overhead.py [--rounds N] [--families gpipe,1f1b] [--gloo] [--output FILE.json]      some two minutes

Two ranks with one thread each train stages of Linear(64, 64), which take next to no time, on 64 microbatches. Penstock
and torch run the same order in turn, so that a busy moment meets both, and every step starts at one time on both ranks.
torch's messages go over gloo; Penstock's, being small and within one host, over sockets of its own. The second table
runs one rank of the same programs alone, whose messages are there at once and whose stages compute nothing, so that
what remains is the time of the calls.
"""

import argparse
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
    ScheduleLoopedBFS,
    ScheduleZBVZeroBubble,
)
from torch.distributed.pipelining.schedules import ScheduleDualPipeV
from torch.nn.functional import mse_loss

from penstock.cli.failure import write_finished
from penstock.cli.launch import connect_store, join_ranks, launch_ranks
from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.compile.program import compile_program
from penstock.execute.control.positions import PositionMemory
from penstock.execute.losses.loss import LossShares
from penstock.execute.losses.step_losses import StepLosses
from penstock.execute.ops.context import CompileContext
from penstock.execute.ops.rows import RankRows
from penstock.execute.parameters.gradient_store import GradientStore, WeightInputs
from penstock.execute.parameters.layout import ParameterLayout
from penstock.execute.rank_parameters import Unit
from penstock.execute.run import run_step
from penstock.execute.stages.passes import PassOptions, SavedForward, StagePasses
from penstock.execute.stages.stage import Stage
from penstock.execute.step import Step
from penstock.execute.transport import Ticket, TorchTransport
from penstock.execute.transport.messages import Messenger
from penstock.execute.transport.rank_names import RankNames
from penstock.execute.values.layouts import encode_layout
from penstock.lowering import lower
from penstock.pipeline import Pipeline
from penstock.schedules import build

NUM_RANKS, NUM_MICROBATCHES, ROWS, WIDTH = 2, 64, 4, 64
NUM_WARM_UP_ROUNDS = 3
NUM_REPETITIONS = 200
INSTRUCTION_BUDGET_S = 6e-6


@dataclass(frozen=True, slots=True)
class Family:
    """A schedule that torch has as well, and the most that a step may take of torch's time."""

    torch: Callable[..., Any]
    stages_per_rank: int
    budget: float
    is_vee: bool = False


FAMILIES = {
    "gpipe": Family(ScheduleGPipe, 1, 0.9),
    "1f1b": Family(Schedule1F1B, 1, 0.9),
    "interleaved-1f1b": Family(ScheduleInterleaved1F1B, 2, 0.4),
    "looped-bfs": Family(ScheduleLoopedBFS, 2, 0.4),
    "interleaved-zb": Family(ScheduleInterleavedZeroBubble, 2, 0.4),
    "zbv": Family(ScheduleZBVZeroBubble, 2, 0.4, is_vee=True),
    "dualpipe-v": Family(ScheduleDualPipeV, 2, 0.4, is_vee=True),
}


# ---- steps over gloo


def layers_of(family: Family) -> list[nn.Module]:
    return [nn.Linear(WIDTH, WIDTH) for _ in range(NUM_RANKS * family.stages_per_rank)]


def penstock_step(name: str, batch: Tensor, *, is_direct: bool = True) -> Callable[[], object]:
    """Make a pipeline, and return a call that runs one step."""
    pipeline = Pipeline(
        layers_of(FAMILIES[name]),
        build(name, ranks=NUM_RANKS, microbatches=NUM_MICROBATCHES, stages_per_rank=FAMILIES[name].stages_per_rank),
        loss=mse_loss,
        transport=TorchTransport(is_direct=is_direct),
    )
    return lambda: pipeline.step(batch, target=batch)


def torch_step(name: str, batch: Tensor) -> Callable[[], object]:
    """Make torch's schedule, and return a call that runs one step."""
    family, rank = FAMILIES[name], dist.get_rank()
    layers = layers_of(family)
    held = [rank, 2 * NUM_RANKS - 1 - rank] if family.is_vee else [*range(rank, len(layers), NUM_RANKS)]
    stages = [PipelineStage(layers[stage], stage, len(layers), torch.device("cpu")) for stage in held]
    schedule = family.torch(stages if len(stages) > 1 else stages[0], NUM_MICROBATCHES, loss_fn=mse_loss)
    arguments = [batch] if 0 in held else []
    losses: list[Tensor] = []
    keywords = {"target": batch, "losses": losses} if len(layers) - 1 in held else {}

    def step() -> object:
        losses.clear()
        return schedule.step(*arguments, **keywords)

    return step


def timed_s(step: Callable[[], object]) -> float:
    """Run a step on all ranks at once; the time until the last one is done."""
    dist.barrier()
    start = time.perf_counter()
    step()
    dist.barrier()
    return time.perf_counter() - start


def compare(names: Sequence[str], num_rounds: int, *, is_direct: bool) -> dict[str, dict[str, list[float]]]:
    """Return, per family, the times of a step of both."""
    batch = torch.randn(NUM_MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    steps = {
        name: {"penstock": penstock_step(name, batch, is_direct=is_direct), "torch": torch_step(name, batch)}
        for name in names
    }
    times: dict[str, dict[str, list[float]]] = {name: {"penstock": [], "torch": []} for name in names}
    for number in range(NUM_WARM_UP_ROUNDS + num_rounds):
        gc.collect()
        for name, both in steps.items():
            for who, step in both.items():
                taken_s = timed_s(step)
                if number >= NUM_WARM_UP_ROUNDS:
                    times[name][who].append(taken_s)
    return times


def run_before_others() -> None:
    """Have the system prefer this process, if that is allowed: else what is measured is how busy the machine is.

    Not as a real-time process: then threads of one rank never interrupt each other, which is where gloo's time goes.
    """
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        Path("/proc/self/autogroup").write_text("-20")  # Linux weighs whole sessions against each other


def run_as_rank(arguments: argparse.Namespace) -> int:
    """Be one rank; rank 0 writes the times."""
    run_before_others()
    torch.set_num_threads(1)
    join_ranks(os.environ)
    times = compare(arguments.families, arguments.rounds, is_direct=not arguments.gloo)
    if os.environ["RANK"] == "0":
        Path(arguments.times).write_text(json.dumps(times))
    dist.barrier()
    write_finished(connect_store(os.environ, timedelta(seconds=2)), dist.get_rank())
    return 0


def on_ranks(names: Sequence[str], num_rounds: int, *, is_direct: bool) -> dict[str, dict[str, list[float]]]:
    """Run the comparison on processes of this machine."""
    with tempfile.TemporaryDirectory() as folder:
        times = Path(folder, "times")
        words = ["--as-rank", "--families", ",".join(names), "--rounds", str(num_rounds), "--times", str(times)]
        words += [] if is_direct else ["--gloo"]
        failure = launch_ranks([sys.executable, __file__, *words], num_ranks=NUM_RANKS)
        if failure is not None:
            raise SystemExit(f"the ranks failed: {failure.shown}")
        found: dict[str, dict[str, list[float]]] = json.loads(times.read_text())
        return found


# ---- instructions alone


class InstantTransport:
    """One rank's wires whose messages are there at once; what is received is whatever the memory holds."""

    def __init__(self, rank: int, num_ranks: int, header: bytes) -> None:
        self.rank, self.num_ranks, self.deadline_s = rank, num_ranks, 60.0
        self._header = torch.frombuffer(bytearray(header), dtype=torch.uint8)

    def post_send(self, peer: int, tensor: Tensor) -> Ticket:
        return Ticket(peer, True, 0, is_over=True)

    def post_receive(self, peer: int, tensor: Tensor) -> Ticket:
        if tensor.dtype == torch.int64:
            tensor.fill_(len(self._header))
        elif tensor.dtype == torch.uint8:
            tensor.copy_(self._header)
        return Ticket(peer, False, 0)

    def wait(self, ticket: Ticket) -> None:
        """There is nothing to wait for."""


class IdlePasses(StagePasses):
    """A stage that computes nothing: its output and the gradient of its input are there already."""

    def __init__(self, index: int, *, is_last: bool) -> None:
        super().__init__(Stage(index, {}), PassOptions(is_last=is_last), GradientStore(list))
        self._output = torch.zeros(ROWS, WIDTH, requires_grad=True)
        self._saved = SavedForward([], [], [])
        self._gradients = [torch.zeros(ROWS, WIDTH)]
        self._left = WeightInputs([])

    def forward(self, step: Step, place: Any, inputs: Any, keywords: Any) -> tuple[Any, SavedForward]:
        if self.options.is_last:
            step.losses.compute(place, self._output, None, is_training=True)
        return self._output, self._saved

    def backward(self, saved: SavedForward, gradients: Sequence[Tensor]) -> list[Tensor]:
        return self._gradients

    def backward_input(self, saved: SavedForward, gradients: Sequence[Tensor]) -> tuple[list[Tensor], WeightInputs]:
        return self._gradients, self._left


class NoParameters:
    """What a program asks of the parameters of stages that have none."""

    reduce_stage = None

    def __init__(self, passes: Mapping[int, StagePasses]) -> None:
        self.unit_of = {
            stage: Unit([own.stage], own.gradients, ParameterLayout(), (), own.gradients)
            for stage, own in passes.items()
        }

    def step_optimizer(self) -> None:
        """There is nothing to step."""


def instruction_times_s(name: str) -> list[float]:
    """Return seconds per instruction of rank 1 in each of some steps; it holds the last or a middle stage."""
    family, rank = FAMILIES[name], 1
    schedule = build(name, ranks=NUM_RANKS, microbatches=NUM_MICROBATCHES, stages_per_rank=family.stages_per_rank)
    tensor = torch.zeros(ROWS, WIDTH, requires_grad=True)
    transport: Any = InstantTransport(rank, NUM_RANKS, encode_layout(tensor))
    with PositionMemory(RankNames.plain(NUM_RANKS)) as memory:
        board = memory.board(rank, [""] * NUM_RANKS, [memory.path] * NUM_RANKS)
    messenger = Messenger(transport, torch.device("cpu"))
    placement = schedule.placement
    passes = {
        stage: IdlePasses(stage, is_last=placement.next_stage[stage] < 0) for stage in placement.stages_of_rank[rank]
    }
    loss = torch.zeros((), requires_grad=True)
    program, parameters = lower(schedule), cast(Any, NoParameters(passes))
    rows = RankRows.of(program, rank)
    compiled = compile_program(CompileContext(program, rank, rows, passes, messenger, parameters))
    parts = [[Microbatch(index, (tensor,), {}, tensor, ROWS)] for index in range(NUM_MICROBATCHES)]
    found = []
    for _ in range(NUM_REPETITIONS):
        shares = LossShares([1.0] * NUM_MICROBATCHES, [[1.0]] * NUM_MICROBATCHES)
        step = Step(parts, StepLosses(NUM_MICROBATCHES, 1, lambda output, target: loss, shares))
        start = time.perf_counter()
        messenger.begin("batch")
        run_step(compiled, step, board.note)
        messenger.finish()
        found.append((time.perf_counter() - start) / len(rows.rows))
    return found[1:]


# ---- the tables


def step_row(name: str, times: dict[str, list[float]]) -> dict[str, Any]:
    ours_s, torch_s = (statistics.median(times[who]) / NUM_MICROBATCHES for who in ("penstock", "torch"))
    budget = FAMILIES[name].budget
    return {
        "family": name,
        "penstock_s": ours_s,
        "torch_s": torch_s,
        "ratio": ours_s / torch_s,
        "budget": budget,
        "is_kept": ours_s / torch_s <= budget,
        "times_s": times,
    }


def middle_half(times_s: list[float]) -> str:
    """Say between which times the middle half of sorted ones lies, per microbatch."""
    low_ms, high_ms = (1e3 * times_s[index] / NUM_MICROBATCHES for index in (len(times_s) // 4, -1 - len(times_s) // 4))
    return f"{low_ms:5.2f} to {high_ms:.2f}"


def step_line(row: dict[str, Any]) -> str:
    ours_s, torch_s = (sorted(each) for each in row["times_s"].values())
    spread = "  ".join(middle_half(each) for each in (ours_s, torch_s))
    figures = f"{1e3 * row['penstock_s']:9.3f}{1e3 * row['torch_s']:9.3f}{row['ratio']:8.2f}{row['budget']:8.2f}"
    return f"{row['family']:<18}{figures}   {spread}   {'ok' if row['is_kept'] else 'TOO SLOW'}"


def main() -> int:
    """Print both tables; return 1 when a budget is not kept."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=21, help="how often every step is measured")
    parser.add_argument("--families", type=lambda text: text.split(","), default=list(FAMILIES), help="which ones")
    parser.add_argument("--gloo", action="store_true", help="have gloo carry Penstock's messages too")
    parser.add_argument("--output", help="a JSON file for the rows")
    parser.add_argument("--as-rank", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--times", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.as_rank:
        return run_as_rank(arguments)
    run_before_others()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {NUM_RANKS} gloo ranks, {NUM_MICROBATCHES} microbatches; ms per microbatch")
    print(f"{'':<18}{'penstock':>9}{'torch':>9}{'ratio':>8}{'budget':>8}   middle halves")
    measured = on_ranks(arguments.families, arguments.rounds, is_direct=not arguments.gloo)
    steps = [step_row(name, times) for name, times in measured.items()]
    print("\n".join(map(step_line, steps)))
    print(f"\none rank alone, stages that compute nothing; microseconds per instruction\n{'':<18}{'median':>9}")
    alone = {name: statistics.median(instruction_times_s(name)) for name in arguments.families}
    for name, time_s in alone.items():
        print(f"{name:<18}{1e6 * time_s:9.2f}   {'ok' if time_s <= INSTRUCTION_BUDGET_S else 'TOO SLOW'}")
    print(f"load of this machine: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    if arguments.output:
        rows = {"steps": steps, "instruction_s": alone, "load": os.getloadavg(), "cores": os.cpu_count()}
        Path(arguments.output).write_text(json.dumps(rows, indent=2))
    is_kept = all(row["is_kept"] for row in steps) and max(alone.values()) <= INSTRUCTION_BUDGET_S
    return int(not is_kept)


if __name__ == "__main__":
    sys.exit(main())
