"""Measure what Penstock adds to the work of a step: next to torch's own schedules over gloo, and per instruction alone.

    python bench/overhead.py [--rounds N] [--families gpipe,1f1b] [--gloo] [--output FILE.json]      some two minutes

Two ranks with one thread each train stages of Linear(64, 64), which take next to no time, on 64 microbatches. Penstock
and torch run the same order in turn, so that a busy moment meets both, and every step starts at one time on both ranks.
torch's messages go over gloo; Penstock's, being small and within one host, over sockets of its own. The second table
runs one rank of the same programs alone, whose messages are there at once and whose stages compute nothing, so that
what remains is the time of the interpreter.
"""

import argparse
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
from in_torch import COUNTERPARTS, torch_step
from on_ranks import become_rank, bench_parser, comma_separated, give_rows, in_turn, rows_of_ranks
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock.execute.batch.microbatch import Microbatch
from penstock.execute.batch.step import Step
from penstock.execute.failures.positions import PositionBoard
from penstock.execute.interpreter import Hooks, Interpreter
from penstock.execute.losses.loss import LossShares
from penstock.execute.messages import Messenger
from penstock.execute.stages.stage import SavedForward, Stage
from penstock.execute.transport import Ticket, TorchTransport
from penstock.execute.tree import encode_layout
from penstock.ir.schedule import Schedule
from penstock.lower import lower
from penstock.pipeline import Pipeline
from penstock.schedules import build

NUM_RANKS, NUM_MICROBATCHES, ROWS, WIDTH = 2, 64, 4, 64
NUM_REPETITIONS = 200
INSTRUCTION_BUDGET_S = 6e-6
ONE_STAGE_BUDGET, TWO_STAGES_BUDGET = 0.9, 0.4
"""The most that a step may take of torch's time, by the stages that a rank holds."""
FAMILIES = ("gpipe", "1f1b", "interleaved-1f1b", "looped-bfs", "interleaved-zb", "zbv", "dualpipe-v")


def schedule_of(name: str) -> Schedule:
    """The schedule that orders as torch's does, with the stages per rank that are its family's own."""
    return build(name, ranks=NUM_RANKS, microbatches=NUM_MICROBATCHES, **COUNTERPARTS[name].options)


# ---- steps of two ranks


def measure(names: Sequence[str], num_rounds: int, *, is_direct: bool) -> Iterator[dict[str, Any]]:
    """Measure a step of each family in both on this rank; all ranks get the same rows."""
    batch = torch.randn(NUM_MICROBATCHES * ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    turns: dict[str, Callable[[], object]] = {}
    for name in names:
        schedule = schedule_of(name)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(schedule.num_stages)]
        pipeline = Pipeline(layers, schedule, loss=mse_loss, transport=TorchTransport(is_direct=is_direct))
        turns[name] = partial(pipeline.step, batch, target=batch)
        turns[in_torch(name)] = partial(
            torch_step(name, schedule, layers, pipeline.layers_of_stage, mse_loss), batch, batch
        )
    seconds = in_turn(turns, num_rounds)
    yield from (step_row(name, seconds[name], seconds[in_torch(name)]) for name in names)


def in_torch(name: str) -> str:
    return f"{name} in torch"


def step_row(name: str, ours_s: Sequence[float], theirs_s: Sequence[float]) -> dict[str, Any]:
    penstock_s, torch_s = (statistics.median(times_s) / NUM_MICROBATCHES for times_s in (ours_s, theirs_s))
    budget = ONE_STAGE_BUDGET if COUNTERPARTS[name].takes_one_stage else TWO_STAGES_BUDGET
    return {
        "family": name,
        "penstock_s": penstock_s,
        "torch_s": torch_s,
        "ratio": penstock_s / torch_s,
        "budget": budget,
        "is_kept": penstock_s / torch_s <= budget,
        "times_s": {"penstock": ours_s, "torch": theirs_s},
    }


def run_before_others() -> None:
    """Have the system prefer this process, if that is allowed: else what is measured is how busy the machine is.

    Not as a real-time process: then threads of one rank never interrupt each other, which is where gloo's time goes.
    """
    with suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, 0, -20)
        Path("/proc/self/autogroup").write_text("-20")  # Linux weighs whole sessions against each other


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


class IdleStage(Stage):
    """A stage that computes nothing: its output and the gradient of its input are there already."""

    def __init__(self, index: int) -> None:
        super().__init__(index, {})
        self._output = torch.zeros(ROWS, WIDTH, requires_grad=True)
        self._saved = SavedForward([], [], [])
        self._gradients = [torch.zeros(ROWS, WIDTH)]

    def forward(self, inputs: tuple[Any, ...], keywords: Mapping[str, Any]) -> Any:
        return self._output

    def save(self, inputs: Any, outputs: Any) -> SavedForward:
        return self._saved

    def save_loss(self, inputs: Any, loss: Tensor | None) -> SavedForward:
        return self._saved

    def backward(self, saved: SavedForward, gradients: Sequence[Tensor]) -> list[Tensor]:
        return self._gradients

    def backward_input(self, saved: SavedForward, gradients: Sequence[Tensor]) -> list[Tensor]:
        return self._gradients

    def backward_weight(self, saved: SavedForward) -> None:
        """There is nothing to add."""


def instruction_times_s(name: str) -> list[float]:
    """Return seconds per instruction of rank 1 in each of some steps; it holds the last or a middle stage."""
    rank, schedule = 1, schedule_of(name)
    tensor = torch.zeros(ROWS, WIDTH, requires_grad=True)
    transport: Any = InstantTransport(rank, NUM_RANKS, encode_layout(tensor))
    board = PositionBoard.in_process(NUM_RANKS)[rank]
    messenger = Messenger(transport, torch.device("cpu"))
    stages = [IdleStage(stage) for stage in schedule.placement.stages_of_rank[rank]]
    hooks = Hooks(lambda stage: None, lambda group: None, lambda: None)
    interpreter = Interpreter(lower(schedule), rank, stages, messenger, hooks)
    parts = [[Microbatch(index, (tensor,), {}, tensor, ROWS)] for index in range(NUM_MICROBATCHES)]
    loss = torch.zeros((), requires_grad=True)
    times_s = []
    for _ in range(NUM_REPETITIONS):
        shares = LossShares([1.0] * NUM_MICROBATCHES, [[1.0]] * NUM_MICROBATCHES)
        step = Step(parts, shares, lambda output, target: loss, keeps_outputs=False)
        start = time.perf_counter()
        messenger.begin("batch")
        interpreter.run(step, board.note)
        messenger.finish()
        times_s.append((time.perf_counter() - start) / interpreter.num_rows)
    return times_s[1:]


# ---- the tables


def middle_half(times_s: list[float]) -> str:
    """Say between which times the middle half of sorted ones lies, per microbatch."""
    low_ms, high_ms = (1e3 * times_s[index] / NUM_MICROBATCHES for index in (len(times_s) // 4, -1 - len(times_s) // 4))
    return f"{low_ms:5.2f} to {high_ms:.2f}"


def step_line(row: dict[str, Any]) -> str:
    spread = "  ".join(middle_half(sorted(times_s)) for times_s in row["times_s"].values())
    figures = f"{1e3 * row['penstock_s']:9.3f}{1e3 * row['torch_s']:9.3f}{row['ratio']:8.2f}{row['budget']:8.2f}"
    return f"{row['family']:<18}{figures}   {spread}   {'ok' if row['is_kept'] else 'TOO SLOW'}"


def words_of(arguments: argparse.Namespace) -> list[str]:
    words = ["--families", ",".join(arguments.families), "--rounds", str(arguments.rounds)]
    return [*words, "--gloo"] if arguments.gloo else words


def main() -> int:
    """Print both tables; return 1 when a budget is not kept."""
    parser = bench_parser(__doc__)
    parser.add_argument("--families", type=comma_separated, default=list(FAMILIES), help="which ones")
    parser.add_argument("--gloo", action="store_true", help="have gloo carry Penstock's messages too")
    arguments = parser.parse_args()
    run_before_others()
    if arguments.rows:
        become_rank(measures_time=False)  # in its own way, see above
        give_rows(arguments.rows, measure(arguments.families, arguments.rounds, is_direct=not arguments.gloo))
        return 0
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {NUM_RANKS} gloo ranks, {NUM_MICROBATCHES} microbatches; ms per microbatch")
    print(f"{'':<18}{'penstock':>9}{'torch':>9}{'ratio':>8}{'budget':>8}   middle halves")
    steps = rows_of_ranks(__file__, words_of(arguments), num_ranks=NUM_RANKS)
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
