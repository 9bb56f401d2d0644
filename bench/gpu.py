"""Measure one device alone: Penstock's tokens per second next to those of a plain training loop, in the same run.

    python bench/gpu.py [--device cuda] [--layers 16] [--width 2048] [--rounds 10] [--output FILE.json]

A decoder in bfloat16, 8 microbatches a step, one process. The plain loop runs forward and backward of one microbatch
after another. Penstock runs the same layers as one stage and as several stages of one rank, with whole and with split
backwards: what it takes more is the price of the runtime. They take turns; ratios are medians over the rounds. Without
a GPU, `--device cpu --layers 4 --width 160` tries it out.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from on_ranks import Table, bench_parser, in_turn, paired_ratio, spread_of, with_spread, write_rows
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.execute.accelerator import require_available, synchronize
from penstock.models import DecoderConfig, cross_entropy_loss, decoder_layers
from penstock.pipeline import Pipeline
from penstock.schedules import build

MICROBATCHES = 8
VOCABULARY, HEAD_WIDTH = 32_000, 128
PLAIN = "plain loop"
BUDGET = 0.99
"""Of the plain loop's tokens per second."""
SCHEDULES: dict[str, dict[str, Any]] = {
    "1f1b": {"stages_per_rank": 1},
    "interleaved-1f1b": {"stages_per_rank": 4},
    "zb-h1": {"stages_per_rank": 1},
    "interleaved-zb": {"stages_per_rank": 4},
}
"""What runs on the one rank."""
COLUMNS = {"": 18, "stages": 6, "tokens/s": 16, "over the loop": 13, "verdict": 7}

Step = Callable[[Tensor, Tensor], object]


@dataclass(frozen=True)
class Row:
    """One way of training."""

    name: str
    num_stages: int
    tokens_per_s: float
    spread: float
    """The middle half of the steps, as a share of the median."""
    ratio: float
    """Of the plain loop's tokens per second, the median of the rounds."""


def plain_step(layers: Sequence[nn.Module]) -> Step:
    """Gradient accumulation as everybody writes it."""
    model = nn.Sequential(*layers)

    def step(tokens: Tensor, target: Tensor) -> None:
        for inputs, wanted in zip(tokens.chunk(MICROBATCHES), target.chunk(MICROBATCHES), strict=True):
            (cross_entropy_loss(model(inputs), wanted) / MICROBATCHES).backward()

    return step


def pipeline_step(layers: Sequence[nn.Module], name: str, device: torch.device) -> tuple[int, Step]:
    """A schedule on one rank; the number of its stages and its step."""
    schedule = build(name, ranks=1, microbatches=MICROBATCHES, **SCHEDULES[name])
    pipeline = Pipeline(layers, schedule, loss=cross_entropy_loss, device=device)
    return schedule.num_stages, lambda tokens, target: pipeline.step(tokens, target=target)


def wait_after(step: Step, batch: tuple[Tensor, Tensor]) -> None:
    """Take a step, and wait until its device has done it."""
    step(*batch)
    synchronize(batch[0].device)


def measure(config: DecoderConfig, batch_size: int, device: torch.device, num_rounds: int) -> list[Row]:
    """Measure everything on the same layers: none changes a weight."""
    layers = [spec().to(device, torch.bfloat16) for spec in decoder_layers(config)]
    batch = torch.randint(VOCABULARY, (batch_size, config.length + 1), device=device)
    tokens, target = batch[:, :-1].contiguous(), batch[:, 1:].contiguous()
    turns, counts = {PLAIN: plain_step(layers)}, {PLAIN: 1}
    for name in SCHEDULES:
        counts[name], turns[name] = pipeline_step(layers, name, device)
    seconds = in_turn({name: partial(wait_after, step, (tokens, target)) for name, step in turns.items()}, num_rounds)
    rows = []
    for name, own in seconds.items():
        rate = tokens.numel() / statistics.median(own)
        rows.append(Row(name, counts[name], rate, spread_of(own), paired_ratio(seconds[PLAIN], own)))
    return rows


def main() -> int:
    """Print the table; return 1 when a ratio is below its budget."""
    parser = bench_parser(__doc__)
    parser.add_argument("--device", default="cuda", type=torch.device, help="a GPU, or cpu")
    parser.add_argument("--layers", default=16, type=int)
    parser.add_argument("--width", default=2048, type=int)
    parser.add_argument("--length", default=1024, type=int, help="tokens of a sequence")
    parser.add_argument("--batch", default=64, type=int, help="sequences of a step")
    arguments = parser.parse_args()
    try:
        require_available(arguments.device, "--device")
    except ConfigError as error:
        print(f"{error}; --device cpu --layers 4 --width 160 tries it out", file=sys.stderr)
        return 2
    heads = max(arguments.width // HEAD_WIDTH, 1)
    config = DecoderConfig(
        vocabulary=VOCABULARY,
        width=arguments.width,
        layers=arguments.layers,
        heads=heads,
        key_value_heads=heads,
        hidden=4 * arguments.width,
        length=arguments.length,
    )
    print(f"torch {torch.__version__}, {arguments.device}; {arguments.batch} sequences of {arguments.length} tokens\n")
    rows = measure(config, arguments.batch, arguments.device, arguments.rounds)
    table = Table(COLUMNS)
    for row in rows:
        rate = with_spread(f"{row.tokens_per_s:.0f}", row.spread)
        table.print([row.name, str(row.num_stages), rate, f"{row.ratio:.3f}", "" if row.ratio >= BUDGET else "MISSED"])
    write_rows(arguments.output, [asdict(row) for row in rows])
    return int(any(row.ratio < BUDGET for row in rows))


if __name__ == "__main__":
    sys.exit(main())
