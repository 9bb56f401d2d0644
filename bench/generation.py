"""Measure tokens per second behind a text of 1,024 tokens: read by a cache on each rank, and read again for each token.

    python bench/generation.py
    python bench/generation.py --rounds 20 --output rows.json

Llamas of 512 features and 8 layers, and of 768 and 12, one row, on 1 rank and on 2, in turns:

cached      a token by `model.generate`, whose ranks keep what they have read
uncached    an evaluation of the whole text for one token, as texts were written before
alone       a token by the `generate` of transformers with its own cache, on one process; for comparison

Budget: with 768 features on 1 rank, as `penstock generate` runs, a cache gives at least 20 times the tokens per
second.
"""

import os
import statistics
import sys
from argparse import Namespace
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from on_ranks import (
    Table,
    become_rank,
    bench_parser,
    give_rows,
    in_turn,
    paired_ratio,
    put_threads_before_others,
    rows_of_ranks,
    spread_of,
    write_rows,
)
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

import penstock as ps
from penstock.hugging_face.generation import Request, next_tokens, shared_tokens

SHAPES = (
    {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8},
    {"hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12},
)
VOCABULARY = 4000
LENGTH, MOST_TOKENS = 1024, 400
LEAST_RATIO, BUDGETED = 20.0, (768, 1)
WAYS = ("cached", "uncached", "alone")


def likeliest(logits: torch.Tensor) -> torch.Tensor:
    return logits.argmax(-1)


def read_again(pipeline: ps.Pipeline, text: torch.Tensor) -> None:
    outputs = pipeline.evaluate(text, return_outputs=True).outputs
    shared_tokens(pipeline, None if outputs is None else outputs[:, -1], likeliest)


class Alone:
    """The model itself, which reads one token after another."""

    def __init__(self, model: Any, text: torch.Tensor) -> None:
        self._model, self._cache = model, DynamicCache(config=model.config)
        self._token = text[:, -1:]
        self._read(text)

    def __call__(self) -> None:
        self._read(self._token)

    @torch.no_grad()
    def _read(self, tokens: torch.Tensor) -> None:
        logits = self._model(tokens, past_key_values=self._cache, use_cache=True, logits_to_keep=1).logits
        self._token = likeliest(logits)


def tokens_of_ranks(words: Namespace) -> Iterator[dict[str, Any]]:
    for shape in SHAPES:
        torch.manual_seed(0)
        config = LlamaConfig(**shape, vocab_size=VOCABULARY, max_position_embeddings=4096)
        llama: Any = AutoModelForCausalLM.from_config(config).eval()
        model = ps.from_transformers(llama)
        pipeline = ps.Pipeline(model, "1f1b", 1, frees_other_stages=False)
        text = torch.randint(VOCABULARY, (1, LENGTH))
        request = Request(tokens=text, mask=torch.ones_like(text), max_new_tokens=MOST_TOKENS)
        tokens = next_tokens(pipeline, llama, request, likeliest)
        next(tokens)  # reads the text
        put_threads_before_others()
        turns = {
            "cached": partial(next, tokens),
            "uncached": partial(read_again, pipeline, text),
            "alone": Alone(llama, text),
        }
        seconds = in_turn(turns, words.rounds)
        tokens.close()
        pipeline.close()
        yield {"width": config.hidden_size, "length": LENGTH, "ranks": dist.get_world_size(), "seconds": seconds}


def print_rows(rows: list[dict[str, Any]]) -> list[str]:
    """Print what was found; return the budgets that are missed."""
    missed = []
    table = Table({"ranks": 5, "features": 10, "way": 10, "tokens/s": 10, "spread, %": 10, "of uncached": 12})
    for row in rows:
        seconds = row["seconds"]
        for way in WAYS:
            ratio = paired_ratio(seconds["uncached"], seconds[way])
            rate = 1 / statistics.median(seconds[way])
            spread = f"{100 * spread_of(seconds[way]):.1f}"
            table.print([str(row["ranks"]), str(row["width"]), way, f"{rate:.2f}", spread, f"{ratio:.1f}"])
            if way == "cached" and (row["width"], row["ranks"]) == BUDGETED and ratio < LEAST_RATIO:
                missed.append(f"{ratio:.1f} times the tokens per second; expected {LEAST_RATIO:g}")
    return missed


def main() -> int:
    words = bench_parser(__doc__).parse_args()
    if words.rows:
        become_rank()
        give_rows(words.rows, tokens_of_ranks(words))
        return 0
    rows = []
    for num_ranks in (1, 2):
        rows += rows_of_ranks(__file__, ["--rounds", str(words.rounds)], num_ranks=num_ranks)
    missed = print_rows(rows)
    write_rows(words.output, rows)
    print(f"missed: {', '.join(missed) or 'nothing'}")
    return 1 if missed else 0


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    sys.exit(main())
