"""Print how far seconds from a data sheet are from those that others measured on GPUs, with every setting tried.

    python bench/roofline.py [--output FILE.json]

`measured / bare` is a time over that of the bare formula; `error` is how far the formula times `CALIBRATION` is off.
Rows of `set` gave `CALIBRATION`, so their errors test nothing; rows of `test` were not looked at for it. Rows of
`limited` ran below the power of the data sheet, so its peak does not hold for them. A row has one line for each way of
counting that was tried, and `*` marks the one that its scripts, or its paper, name: which kernels ran, and the share of
the peak in `devices.toml`. Rows of Automodel with tensor or expert parallelism are left out. GPT-OSS has none in its
table, but in its configurations (`ep_size: 8` and `64`): `experts` counts one device's work without the exchanges, and
is no test. Nor is `unknown`: two pipelines whose checkpointing nobody published. No GPU is needed: the work is in
`decoder_work.py` and `expert_work.py`, by hand.
"""

import argparse
import json
import statistics
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from decoder_work import Decoder, Run, block_of, head_of, works_of
from expert_work import ExpertRun, expert_works

from penstock.lowering import lower
from penstock.schedules import build
from penstock.simulation import simulate
from penstock.simulation.costs.devices import Device, device, link
from penstock.simulation.costs.layer_work import LayerWork
from penstock.simulation.costs.roofline import CALIBRATION, layer_costs, pass_s

BUDGET = 0.25
A100, H100, H200 = device("a100-sxm-80gb"), device("h100-sxm"), device("h200-sxm")
H100_500W = replace(H100, name="H100 of 2.4 TB/s, 500 W", memory_bytes_per_s=2.4e12)
LLAMA_8B = Decoder(
    layers=32, hidden=4096, heads=32, key_value_heads=8, feed_forward=14336, vocabulary=128_256
)  # fmt: skip
LLAMA_70B = replace(LLAMA_8B, layers=80, hidden=8192, heads=64, feed_forward=28672)
LLAMA2_13B = Decoder(layers=40, hidden=5120, heads=40, feed_forward=13824, vocabulary=32_000)
LLAMA2_70B = replace(LLAMA_70B, vocabulary=32_000)
QWEN_7B = Decoder(layers=28, hidden=3584, heads=28, key_value_heads=4, feed_forward=18944, vocabulary=152_064)
TITAN_A100 = "set", "torchtitan, docs/performance.md of 2024, 64 A100, FSDP2; its preset for them compiles nothing"
TITAN_H100 = "limited", "torchtitan, benchmarks/llama3_h100_202412, 8 H100 with 2.4 TB/s, held at 500 of 700 W, FSDP2"
AUTOMODEL = (
    "test",
    "NeMo Automodel, performance summary of 2026-08, H100; kernels of Transformer Engine, Triton, compiled",
)
OWN = "test", "docs/performance.md, plain loop on one H200, torch 2.11"
DECODER = Decoder(layers=16, hidden=2048, heads=16, feed_forward=8192, vocabulary=32_000)
QWEN_32B = replace(QWEN_7B, layers=64, hidden=5120, heads=40, key_value_heads=8, feed_forward=27648)
KINDS = ("forward", "backward_input", "backward_weight")


@dataclass(frozen=True, kw_only=True)
class Line:
    """One time that others measured, and the formula's for one way of counting."""

    use: str
    source: str
    row: str
    setting: str
    is_named: bool
    measured_s: float
    bare_s: float

    @property
    def ratio(self) -> float:
        return self.measured_s / self.bare_s

    @property
    def error(self) -> float:
        return CALIBRATION * self.bare_s / self.measured_s - 1


def seconds(layers: Sequence[LayerWork], machine: Device, kinds: Sequence[str] = KINDS) -> float:
    """Return the seconds of some passes of layers by the bare formula."""
    kinds_of_layers = ((getattr(layer, kind), kind) for layer in layers for kind in kinds)
    return sum(pass_s(work, machine, is_backward=kind == "backward_input") for work, kind in kinds_of_layers)


def training_lines() -> Iterator[Line]:
    """Yield whole steps: tokens per second of one device, whose exchanges are taken as hidden."""
    longer = Run(sequence=8192, accumulates=False, style="eager")
    llama2 = replace(longer, sequence=4096, microbatch=2)
    operations, full = replace(longer, checkpointing="half"), replace(longer, checkpointing="full")
    for row, model, run, tokens_per_s in [
        ("Llama3 8B, layers", LLAMA_8B, replace(longer, checkpointing="layers"), 2904),
        ("Llama3 8B, operations", LLAMA_8B, operations, 2973),
        ("Llama3 70B, full", LLAMA_70B, full, 331),
        ("Llama2 13B, none", LLAMA2_13B, llama2, 2162),
        ("Llama2 70B, full", LLAMA2_70B, replace(llama2, checkpointing="full"), 353),
    ]:
        yield from step_lines(TITAN_A100, row, A100, (model, run), tokens_per_s)
    pair = replace(operations, microbatch=2)
    yield from step_lines(TITAN_H100, "Llama3.1 8B, operations", H100_500W, (LLAMA_8B, pair), 5762)
    compiled = replace(pair, style="fused")
    yield from step_lines(TITAN_H100, "Llama3.1 8B, operations, compiled", H100_500W, (LLAMA_8B, compiled), 6667)
    lora = Run(sequence=4096, microbatch=2, lora_rank=16)
    dropped = replace(lora, has_dropout=True)
    yield from step_lines(AUTOMODEL, "Llama3 8B, LoRA, 1 GPU", H100, (LLAMA_8B, dropped), 12472.87)
    yield from step_lines(AUTOMODEL, "Qwen2.5 7B, LoRA, 1 GPU", H100, (QWEN_7B, lora), 14110.05)
    shared = Run(sequence=8192, checkpointing="full", context_parallel=2)
    yield from step_lines(AUTOMODEL, "Llama3 70B, full, 64 GPUs", H100, (LLAMA_70B, shared), 866.77)
    own = Run(sequence=1024, microbatch=8, style="own")
    yield from step_lines(OWN, "decoder of bench/gpu.py, 1 GPU", H200, (DECODER, own), 67_885)


def step_lines(
    source: tuple[str, str], row: str, machine: Device, work: tuple[Decoder, Run], tokens_per_s: float
) -> Iterator[Line]:
    """Yield a line for each style of kernels, and for shares of the peak that attention may reach."""
    model, run = work
    shares = (0.5, 0.7) if machine is A100 else (0.35, 0.6)
    for style in dict.fromkeys((run.style, "eager", "fused")):
        for changed in (machine, *(with_attention(machine, share) for share in shares)):
            yield Line(
                use=source[0],
                source=source[1],
                row=row,
                setting=f"{style}, attention {changed.kernels.attention_share:.2f}",
                is_named=changed is machine and style == run.style,
                measured_s=run.tokens / tokens_per_s,
                bare_s=seconds(works_of(model, replace(run, style=style)), changed),
            )


def with_attention(machine: Device, share: float) -> Device:
    kernels = replace(machine.kernels, attention_share=share, attention_backward_share=round(share * 0.63 / 0.73, 2))
    return replace(machine, kernels=kernels)


def pipeline_lines() -> Iterator[Line]:
    """Yield simulated steps of two pipelines of 4 stages; nobody says whether their forwards ran again."""
    schedule = lower(build("interleaved-1f1b", ranks=4, microbatches=8, stages_per_rank=8))
    for style in ("fused", "eager"):
        for checkpointing in ("none", "full"):
            run = Run(sequence=4096, lora_rank=16, style=style, checkpointing=checkpointing)
            costs = layer_costs(works_of(QWEN_32B, run), H100, link=link(H100.link_within_node))
            makespan_s = simulate(schedule, costs.of_stages([3, *[2] * 30, 3])).makespan_s
            for row, num_rounds, measured_s in (("8 GPUs", 2, 8.40), ("16 GPUs", 1, 4.48)):
                yield Line(
                    use="unknown",
                    source="NeMo Automodel, performance summary before 2026-04, H100; its configurations are gone",
                    row=f"Qwen2.5 32B, LoRA, pipeline of 4, {row}",
                    setting=f"{style}, checkpointing {checkpointing}",
                    is_named=False,
                    measured_s=measured_s,
                    bare_s=num_rounds * makespan_s / CALIBRATION,
                )


def expert_lines() -> Iterator[Line]:
    """Yield steps of GPT-OSS, whose exchanges between experts the formula does not have."""
    for row, run, tokens_per_s in [
        ("GPT-OSS 20B, 8 devices share experts", ExpertRun(layers=24, experts=32, devices=8, microbatch=2), 13_058),
        ("GPT-OSS 120B, 64 devices share experts", ExpertRun(layers=36, experts=128, devices=64, microbatch=2), 7_626),
    ]:
        for machine in (H100, with_attention(H100, 0.35), with_attention(H100, 0.6)):
            yield Line(
                use="experts",
                source=AUTOMODEL[1],
                row=row,
                setting=f"fused, attention {machine.kernels.attention_share:.2f}",
                is_named=machine is H100,
                measured_s=run.tokens / tokens_per_s,
                bare_s=seconds(expert_works(run), machine),
            )


def zero_bubble_lines() -> Iterator[Line]:
    """Yield F, I, W and their sum of a stage, from table 6; the paper keeps 5as bytes of scores: no FlashAttention."""
    source = "arXiv 2401.10241, table 6, A100; microbatch sizes of its table 3"
    rows = [
        ("1.5B", 3, 2304, 24, 6, (18.522, 18.086, 9.337)),
        ("6.2B", 4, 4096, 32, 3, (29.718, 29.444, 19.927)),
        ("14.6B", 3, 5120, 40, 1, (11.307, 11.254, 8.101)),
        ("28.3B", 2, 6144, 48, 1, (10.419, 10.207, 7.715)),
    ]
    for name, count, hidden, heads, microbatch, measured_ms in rows:
        model = Decoder(
            layers=count, hidden=hidden, heads=heads, feed_forward=4 * hidden, vocabulary=1, is_gated=False
        )  # fmt: skip
        run = Run(sequence=1024, microbatch=microbatch, style="megatron", has_dropout=True, data_type="float16")
        for has_flash in (False, True):
            block = block_of(model, replace(run, has_flash_attention=has_flash))
            bare = [count * seconds([block], A100, [kind]) for kind in KINDS]
            for what, measured, bare_s in [
                *zip("FIW", measured_ms, bare, strict=True),
                ("F+I+W", sum(measured_ms), sum(bare)),
            ]:
                yield Line(
                    use="test",
                    source=source,
                    row=f"{name} {what}",
                    setting="FlashAttention" if has_flash else "scores kept",
                    is_named=not has_flash,
                    measured_s=measured / 1e3,
                    bare_s=bare_s,
                )


def vocabulary_lines() -> Iterator[Line]:
    """Yield the forward and backward of a middle rank, and of the last one with its head."""
    data = Path(__file__).parents[1] / "tests" / "data" / "measured_gpu_1f1b.json"
    measured = json.loads(data.read_text(encoding="utf-8"))
    for run in measured["runs"]:
        if run["split"] != "even":
            continue
        model = Decoder(
            layers=4, hidden=3072, heads=24, feed_forward=12288, vocabulary=run["vocabulary"], is_gated=False
        )  # fmt: skip
        choice = Run(sequence=run["sequence"], style="megatron", data_type="float16")
        blocks = [block_of(model, choice)] * 4
        for name, rank, layers in (("middle", 3, blocks), ("last", 7, [*blocks, head_of(model, choice)])):
            for what, key, kinds in (("F", "forward_us", KINDS[:1]), ("B", "backward_us", KINDS[1:])):
                yield Line(
                    use="test",
                    source=f"{measured['source']}, {measured['devices']}",
                    row=f"{name} rank, {run['sequence']} tokens, {run['vocabulary']} words, {what}",
                    setting="FlashAttention",
                    is_named=True,
                    measured_s=run[key][rank] / 1e6,
                    bare_s=seconds(layers, A100, kinds),
                )


def shown(line: Line) -> str:
    mark = "*" if line.is_named else " "
    times = (
        f"{1e3 * line.measured_s:>9.2f} ms {1e3 * line.bare_s:>9.2f} ms {line.ratio:>6.2f} {100 * line.error:>+6.1f} %"
    )
    return f"{line.use:<7} {line.row:<46} {line.setting:<22}{mark} {times}"


def main() -> int:
    """Print one line for each time and setting; return 1 when a named one of a test is further off than the budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="a JSON file for the lines")
    arguments = parser.parse_args()
    lines = [*training_lines(), *pipeline_lines(), *expert_lines(), *zero_bubble_lines(), *vocabulary_lines()]
    source = ""
    for line in lines:
        if line.source != source:
            source = line.source
            print(f"\n{source}\n{'':<78}  measured         bare  ratio    error")
        print(shown(line))
    named = [line for line in lines if line.is_named]
    ratios = [line.ratio for line in named if line.use == "set"]
    print(f"\nset: {len(ratios)} rows took {min(ratios):.2f} to {max(ratios):.2f} times the bare formula", end="")
    print(f", {statistics.median(ratios):.2f} in the middle; a run is taken to take {CALIBRATION:g} times")
    errors = [abs(line.error) for line in named if line.use == "test"]
    near = sum(error <= BUDGET for error in errors)
    print(f"test: {near} of {len(errors)} within {100 * BUDGET:.0f} %; ", end="")
    print(f"median {100 * statistics.median(errors):.1f} %, largest {100 * max(errors):.1f} %")
    if arguments.output:
        rows = [asdict(line) | {"ratio": line.ratio, "error": line.error} for line in lines]
        arguments.output.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    return 0 if near == len(errors) else 1


if __name__ == "__main__":
    sys.exit(main())
