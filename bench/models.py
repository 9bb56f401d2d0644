"""Measure models of transformers: steps against wrappers by hand, and what ranks read and hold when they load one.

    python bench/models.py --parts speed,folder,shape

speed    Llamas of 256 and 512 features on 2 ranks, `ps.from_transformers` and the wrappers of llama_wrappers.py in
         turns: tokens per second
folder   a folder of some 400 MB on 4 ranks: bytes read by each rank, and its peak of memory while it loads
shape    Llama-3-8B on the meta device, split over 8 ranks: bytes of each rank's layers

Budgets: 0.98 of the tokens per second of the wrappers; 1 % more read than a rank's own bytes; a peak of its bytes and
the largest tensor; 1 % more allocated than its parameters.
"""

import os
import statistics
import sys
import tempfile
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from llama_wrappers import wrapped
from on_ranks import (
    Table,
    become_rank,
    bench_parser,
    comma_separated,
    give_rows,
    in_turn,
    paired_ratio,
    rows_of_ranks,
    spread_of,
    write_rows,
)
from transformers import AutoModelForCausalLM, LlamaConfig

import penstock as ps
from penstock.partition.split import split_over
from penstock.placement import Placement

PARTS = ("speed", "folder", "shape")
TINY = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 4}
SMALL = {"vocab_size": 4000, "num_hidden_layers": 8}
WIDTHS = {256: 704, 512: 1408}
"""Features of the models of `speed`, with those of their feed-forward layers."""
FOLDER = {"vocab_size": 8000, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 8}
LLAMA_3_8B = {"vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 8}
HEADS_8B = {"num_attention_heads": 32, "num_key_value_heads": 8}
ROWS, LENGTH, MICROBATCHES = 8, 128, 4
LEAST_SPEED, MOST_READ, MOST_ALLOCATED, MOST_PEAK = 0.98, 1.01, 1.01, 1.1


def speed(words: Namespace) -> Iterator[dict[str, Any]]:
    """Both pipelines of a width train the same modules, so what differs is how they call them."""
    pipelines: dict[tuple[int, str], ps.Pipeline] = {}
    for width, inner_width in WIDTHS.items():
        torch.manual_seed(0)
        shape = {**SMALL, **HEADS, "hidden_size": width, "intermediate_size": inner_width}
        llama: Any = AutoModelForCausalLM.from_config(LlamaConfig(**shape))
        model = ps.from_transformers(llama)
        options: dict[str, Any] = {"count": model.count, "frees_other_stages": False}
        for name, layers in {"wrappers": wrapped(llama), "from_transformers": model}.items():
            pipelines[width, name] = ps.Pipeline(layers, "1f1b", MICROBATCHES, model.loss, **options)
    tokens = torch.randint(SMALL["vocab_size"], (ROWS, LENGTH))

    def step(pipeline: ps.Pipeline) -> None:
        for parameter in pipeline.parameters():
            parameter.grad = None
        pipeline.step(tokens, target=tokens)

    turns = {f"{width} {name}": partial(step, pipeline) for (width, name), pipeline in pipelines.items()}
    seconds = in_turn(turns, words.rounds)
    for pipeline in pipelines.values():
        pipeline.close()
    for width in WIDTHS:
        by_name = {name: seconds[f"{width} {name}"] for name in ("wrappers", "from_transformers")}
        yield {"part": "speed", "width": width, "ranks": dist.get_world_size(), "seconds": by_name}


def folder(words: Namespace) -> Iterator[dict[str, Any]]:
    """Each rank makes its pipeline of the folder; what Python and torch have read before does not count."""
    tiny = ps.from_transformers(LlamaConfig(**TINY, **HEADS))  # loads what every pipeline needs
    ps.Pipeline(tiny, "1f1b", MICROBATCHES, tiny.loss, count=tiny.count).close()
    model = ps.from_transformers(words.folder)
    read_before, held_before = _bytes_read(), _resident("VmRSS")
    pipeline = ps.Pipeline(model, "1f1b", MICROBATCHES, model.loss, count=model.count)
    own = [parameter.numel() * parameter.element_size() for parameter in pipeline.parameters()]
    found = {"own": sum(own), "largest": max(own), "read": _bytes_read() - read_before}
    found["peak"] = _resident("VmHWM") - held_before
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, found)
    pipeline.close()
    yield {"part": "folder", "ranks": everyone}


def shape() -> dict[str, Any]:
    """A rank's layers, built without memory, have the bytes that it would allocate."""
    model = ps.from_transformers(LlamaConfig(**LLAMA_3_8B, **HEADS_8B), dtype=torch.bfloat16)
    with torch.device("meta"):
        layers = [layer() for layer in model]  # type: ignore[operator]
    parameters = [sum(each.numel() * each.element_size() for each in layer.parameters()) for layer in layers]
    all_bytes = [
        own + sum(each.numel() * each.element_size() for each in layer.buffers())
        for own, layer in zip(parameters, layers, strict=True)
    ]
    stages = split_over(Placement.line(8), len(layers), weights=list(map(float, parameters)))
    ranks = [
        {"own": sum(parameters[index] for index in stage), "allocated": sum(all_bytes[index] for index in stage)}
        for stage in stages
    ]
    return {"part": "shape", "whole": sum(parameters), "ranks": ranks}


def _bytes_read() -> int:
    return int(Path("/proc/self/io").read_text().split("rchar: ")[1].split()[0])


def _resident(key: str) -> int:
    """Bytes of memory of this process: VmRSS now, VmHWM at most."""
    return 1024 * int(Path("/proc/self/status").read_text().split(f"{key}:")[1].split()[0])


def print_rows(rows: list[dict[str, Any]]) -> list[str]:
    """Print what was found; return the budgets that are missed."""
    missed = []
    table = Table({"part": 30, "found": 10, "budget": 8})

    def tell(part: str, found: float, budget: float, *, is_most: bool = True) -> None:
        table.print([part, f"{found:.4f}", f"{budget:.2f}"])
        if (found > budget) if is_most else (found < budget):
            missed.append(part)

    for row in rows:
        if row["part"] == "speed":
            ratio = paired_ratio(row["seconds"]["wrappers"], row["seconds"]["from_transformers"])
            tell(f"speed, {row['width']}, of the wrappers'", ratio, LEAST_SPEED, is_most=False)
            for name, seconds in row["seconds"].items():
                rate = ROWS * LENGTH / statistics.median(seconds)
                print(f"  {name}: {rate:,.0f} tokens/s, spread {100 * spread_of(seconds):.1f} %")
        elif row["part"] == "folder":
            tell("folder, read of own", max(each["read"] / each["own"] for each in row["ranks"]), MOST_READ)
            peaks = [each["peak"] / (each["own"] + each["largest"]) for each in row["ranks"]]
            tell("folder, peak of own + largest", max(peaks), MOST_PEAK)
        else:
            tell("shape, allocated of own", max(e["allocated"] / e["own"] for e in row["ranks"]), MOST_ALLOCATED)
            print(
                f"  largest rank: {100 * max(each['own'] for each in row['ranks']) / row['whole']:.1f} % of the model"
            )
    return missed


def main() -> int:
    parser = bench_parser(__doc__)
    parser.set_defaults(rounds=20)
    parser.add_argument("--parts", type=comma_separated, default=list(PARTS), help=f"of {','.join(PARTS)}")
    parser.add_argument("--folder", help="the folder of the ranks")
    words = parser.parse_args()
    if words.rows:
        become_rank(measures_time=words.parts == ["speed"])
        give_rows(words.rows, (speed if words.parts == ["speed"] else folder)(words))
        return 0
    rows = []
    if "speed" in words.parts:
        rows += rows_of_ranks(__file__, ["--parts", "speed", "--rounds", str(words.rounds)], num_ranks=2)
    if "folder" in words.parts:
        with tempfile.TemporaryDirectory() as made:
            AutoModelForCausalLM.from_config(LlamaConfig(**FOLDER, **HEADS)).save_pretrained(made)
            print(f"folder of {sum(path.stat().st_size for path in Path(made).iterdir()) / 1e6:.0f} MB", flush=True)
            rows += rows_of_ranks(__file__, ["--parts", "folder", "--folder", made], num_ranks=4)
    if "shape" in words.parts:
        rows.append(shape())
    missed = print_rows(rows)
    write_rows(words.output, rows)
    print(f"missed: {', '.join(missed) or 'nothing'}")
    return 1 if missed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
