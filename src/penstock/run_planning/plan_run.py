"""`ps.plan_run`: which layout of a model on a cluster fits and takes least time, before anything is launched."""

from collections.abc import Callable
from math import isinf
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError
from penstock.proofs import Limit
from penstock.run_planning.clusters import RESERVE_BYTES, cluster_of, link_within
from penstock.run_planning.costs_source import measured_source, roofline_source
from penstock.run_planning.model import planned_model
from penstock.run_planning.model_work import ModelWork
from penstock.run_planning.run_file import run_file_text, settings_of_model
from penstock.run_planning.run_plan import RunPlan
from penstock.searching.layouts.choosing import choose_layouts, say_nothing
from penstock.searching.layouts.problem import LayoutQuestion
from penstock.searching.layouts.searched import search_layout
from penstock.searching.question import require_number
from penstock.simulation.costs.devices import device as device_of
from penstock.simulation.costs.layer_costs import LayerCosts
from penstock.train.settings.config import RunConfig, load_config

NOT_PLANNED = "not planned: tensor, context and expert parallelism, offloading"


def plan_run(
    model: Any,
    *,
    gpus: int,
    nodes: int = 1,
    device: str | None = None,
    memory: int | str | None = None,
    sequence_length: int,
    global_batch: int,
    base: str | Path | None = None,
    costs: LayerCosts | str | Path | None = None,
    seconds: float = 5.0,
    tell: Callable[[str], None] | None = None,
    needs_run_file: bool = False,
) -> RunPlan:
    """Choose the layout of a training: ranks, replicas, shards, microbatches, checkpointing, split and schedule.

    `model` is the folder of a model of Hugging Face (its config.json suffices), a run file, `FILE.py:FUNCTION` that
    makes layers as model.source does, or a list of layers. `device` is the name of a GPU, such as "h100-sxm", of which
    there are `gpus` on `nodes`; `memory`, "80GiB" or bytes, is what each has, where that is less. A step trains
    `global_batch` sequences of `sequence_length` tokens. `base` is a run file whose other settings count: precision,
    optimizer, data. `costs`, per layer, as `penstock profile` writes them, take the place of the device's roofline. The
    best layouts are searched for `seconds` together. `tell` is told what is being done. With `needs_run_file`, a model
    that no run file can name or train is refused before anything is planned.

    Raises:
        ConfigError: nothing fits (it says what would), numbers that do not divide, an unknown device, a model that is
            none, a layer that no device holds.
    """
    _require_numbers(sequence_length, global_batch, seconds)
    text = str(model) if isinstance(model, str | Path) else ""
    say = tell or say_nothing
    cluster = cluster_of(gpus, nodes, device, _memory_bytes(memory))
    if costs is None and device is None:
        raise ConfigError("without one, give the costs of the layers, and the memory of a rank", key="device")
    say("reads the model")
    the_model = planned_model(model, base, sequence_length)
    if needs_run_file:
        if the_model.no_run_file:
            raise ConfigError(the_model.no_run_file, key="model")
        run_file_text(the_model.base_text, settings_of_model(the_model.base_text, the_model.settings, "runs/planned"))
    if costs is None:
        assert device is not None, "refused above"
        source = roofline_source(ModelWork(the_model, sequence_length, say), device, link_within(device))
    else:
        source = measured_source(costs, _run_config(text, base), the_model, sequence_length)
    question = LayoutQuestion(
        cluster=cluster,
        costs_of=source.costs_of,
        global_batch=global_batch,
        sequence_length=sequence_length,
        choices=source.choices,
        seconds_range=source.seconds_range,
    )
    chosen = choose_layouts(question, search=search_layout, seconds=seconds, tell=say)
    peak_flops_per_s = 0.0 if device is None else device_of(device).bf16_flops_per_s
    reserve = f"; reserve {RESERVE_BYTES / 1e9:.1f} GB assumed" if device is not None else ""
    notes = (f"bytes  {source.bytes_note}{reserve}", f"time   {source.time_note}", NOT_PLANNED)
    return RunPlan(chosen, question, the_model, source.sequence_flops * global_batch, peak_flops_per_s, notes)


def _require_numbers(sequence_length: int, global_batch: int, seconds: float) -> None:
    """Refuse numbers with which nothing can be planned, before the model is read. Raises: ConfigError."""
    require_number("sequence_length", sequence_length, at_least=1)
    require_number("global_batch", global_batch, at_least=1)
    require_number("seconds", seconds, at_least=0, is_whole=False)
    if isinf(seconds):
        raise ConfigError("inf; the best layouts are searched one after another, give a number", key="seconds")


def _memory_bytes(memory: int | str | None) -> int | None:
    """Read the memory of a device. Raises: ConfigError."""
    if memory is None:
        return None
    limit = Limit.read(memory, "memory")
    if not limit.in_bytes:
        raise ConfigError(f"{limit} is no number of bytes; give such as 80GiB", key="memory")
    return int(limit.amounts[0])


def _run_config(model: str, base: str | Path | None) -> RunConfig | None:
    """Return the configuration of the run file that is named, None where none is."""
    path = model if model.endswith(".toml") else base
    return None if path is None else load_config(path)
