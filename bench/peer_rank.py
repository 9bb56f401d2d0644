"""One rank of one system under bench/peers.py: builds its part of the model, and runs a step whenever it is asked."""

import os
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

import torch
import torch.distributed as dist
from in_deepspeed import deepspeed_step
from in_megatron import megatron_step
from in_torch import torch_step
from memory import peak_and_rest_bytes
from on_ranks import put_threads_before_others
from peer_cases import CASES, NUM_BLOCKS, Case, sgd
from torch import Tensor, nn

from penstock.errors import PenstockWarning
from penstock.ir.schedule import Schedule
from penstock.pipeline import Pipeline
from penstock.schedules import build

Step = Callable[[], float | None]
"""Forward, backward and the optimizer's step of one batch; returns the loss where this rank knows it."""


@dataclass(frozen=True, slots=True)
class RankSpec:
    """What one process runs, and as which rank."""

    system: str
    family: str
    case: str
    rank: int
    num_ranks: int
    port: int


@dataclass(frozen=True, slots=True)
class StepTime:
    """When one step began and ended on one rank, on the clock that all processes share."""

    begin_s: float
    end_s: float
    processor_s: float
    """In user and system mode, of all threads."""


def plain_step(case: Case, family: str) -> Step:
    """The whole model in one process, microbatch after microbatch: the work itself, and what the losses must be."""
    model, microbatches = case.part(0, 1), case.microbatches()
    optimizer = sgd(list(model.parameters()))

    def step() -> float:
        optimizer.zero_grad()
        total = 0.0
        for tokens, target in microbatches:
            loss = case.loss(model(tokens), target)
            (loss / len(microbatches)).backward()
            total += loss.item()
        optimizer.step()
        return total / len(microbatches)

    return step


def penstock_step(case: Case, family: str) -> Step:
    """Penstock, with SGD."""
    schedule = build(family, ranks=case.num_ranks, microbatches=case.num_microbatches)
    split = [len(blocks) for blocks in _split(schedule)]
    pipeline = Pipeline(case.blocks(), schedule, loss=case.loss, split=split)
    optimizer, (batch, target) = sgd(list(pipeline.parameters())), case.batch()

    def step() -> float:
        optimizer.zero_grad()
        result = pipeline.step(batch, target=target)
        optimizer.step()
        return float(result.loss)

    return step


def pytorch_step(case: Case, family: str) -> Step:
    """torch.distributed.pipelining, which orders as our family of that name does."""
    schedule = build(family, ranks=case.num_ranks, microbatches=case.num_microbatches)
    split = _split(schedule)
    own = {index for stage in schedule.placement.stages_of_rank[dist.get_rank()] for index in split[stage]}
    layers = [build_block() if index in own else nn.Identity() for index, build_block in enumerate(case.blocks())]
    losses: list[Tensor] = []
    run = torch_step(family, schedule, layers, split, case.loss, losses=losses, return_outputs=False)
    optimizer, (batch, target) = sgd([*nn.ModuleList(layers).parameters()]), case.batch()

    def step() -> float | None:
        optimizer.zero_grad()
        losses.clear()
        run(batch, target)
        optimizer.step()
        return sum(loss.item() for loss in losses) / len(losses) if losses else None

    return step


def _split(schedule: Schedule) -> list[range]:
    size = NUM_BLOCKS // schedule.num_stages
    return [range(stage * size, (stage + 1) * size) for stage in range(schedule.num_stages)]


MAKERS: dict[str, Callable[[Case, str], Step]] = {
    "one process": plain_step,
    "torch": pytorch_step,
    "Megatron-core": megatron_step,
    "DeepSpeed": deepspeed_step,
    "Penstock": penstock_step,
}


def run_rank(spec: RankSpec, connection: Connection) -> None:
    """Run each command that arrives and send its result, or the text of an error."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the table has the output for itself
    try:
        commands = _prepare(spec)
        connection.send("ready")
        while (command := connection.recv()) != "end":
            connection.send(commands[command]())
    except EOFError:
        pass  # the bench is gone
    except Exception:
        connection.send(RuntimeError(traceback.format_exc()))
    finally:
        os._exit(0)  # threads of a runtime must not keep it


def _prepare(spec: RankSpec) -> dict[str, Callable[[], Any]]:
    os.environ |= {
        "RANK": str(spec.rank),
        "LOCAL_RANK": str(spec.rank),
        "WORLD_SIZE": str(spec.num_ranks),
        "LOCAL_WORLD_SIZE": str(spec.num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(spec.port),
        "GLOO_SOCKET_IFNAME": "lo",
    }
    torch.set_num_threads(1)
    warnings.simplefilter("ignore", PenstockWarning)  # few microbatches are meant here
    dist.init_process_group("gloo")
    step, losses = MAKERS[spec.system](CASES[spec.case], spec.family), list[float | None]()

    def counted() -> int:
        return peak_and_rest_bytes(lambda: losses.append(step()))[0]

    def timed() -> StepTime:
        dist.barrier()
        begin_s, begin_processor_s = time.monotonic(), time.process_time()
        losses.append(step())
        return StepTime(begin_s, time.monotonic(), time.process_time() - begin_processor_s)

    return {"count": counted, "prefer": put_threads_before_others, "step": timed, "losses": lambda: losses}
