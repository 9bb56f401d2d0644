"""Generating text: the trained model reads what there is so far, and one of its likely next tokens is added.

Every token takes an evaluation of the pipeline, so this works on any number of ranks. Those of a model of transformers
keep what they have read. Any other model reads the context again, filled up behind its end to one length, so that the
ranks agree on its shapes once: no position reads those behind it.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from penstock.checkpoints.pretrained import load_weights
from penstock.errors import ConfigError, described
from penstock.hugging_face.generation import Choose, Request, cached_model, next_tokens, shared_tokens
from penstock.hugging_face.sampling import Sampling
from penstock.pipeline import Pipeline
from penstock.train.data.tokenizer import Tokenizer, tokenizer_of
from penstock.train.devices import device_of_rank
from penstock.train.model_source import build_layers
from penstock.train.optimizing.precision import Precision
from penstock.train.settings.config import RunConfig
from penstock.train.settings.sections import SampleSection

UNKNOWN = "\N{REPLACEMENT CHARACTER}"
PADDING = 0


def prompt_tokens(tokenizer: Tokenizer, prompt: str, *, key: str) -> list[int]:
    """Return the tokens of a prompt. Raises: ConfigError, naming `key`, if there are none."""
    tokens: list[int] = tokenizer.encode(prompt.encode()).tolist()
    if not tokens:
        raise ConfigError(f"{prompt!r} has no tokens; give a text that the tokenizer knows", key=key)
    return tokens


def generate(
    pipeline: Pipeline,
    prompt: Sequence[int],
    tokenizer: Tokenizer,
    section: SampleSection,
    *,
    length: int,
    seed: int = 0,
    precision: Precision | None = None,
) -> Iterator[int]:
    """Yield the tokens that follow a prompt, at most `section.tokens`, up to the end of the document.

    Every rank iterates to the end, and gets the same tokens. A model of transformers reads each token once, where it
    has positions for all of them. Any other reads the last `length` tokens of the text so far for each token. `section`
    has the temperature and the like.
    """
    generator = torch.Generator(pipeline.device).manual_seed(seed)
    sampling = Sampling(temperature=section.temperature, top_k=section.top_k, top_p=section.top_p)

    def choose(logits: Tensor) -> Tensor:
        return sampling.draw(logits[:, : tokenizer.vocabulary], generator)

    with closing(_tokens(pipeline, prompt, section.tokens, length, choose, precision or Precision())) as tokens:
        for token in tokens:
            if token == tokenizer.end_of_document:
                return
            yield token


def _tokens(
    pipeline: Pipeline, prompt: Sequence[int], number: int, length: int, choose: Choose, precision: Precision
) -> Generator[int]:
    """Yield tokens, by a cache where the model keeps one."""
    model = cached_model(pipeline, len(prompt) + number)
    if model is not None:
        cached_tokens = _tokens_with_cache(pipeline, model, prompt, number, choose, precision)
        try:
            first_token = next(cached_tokens)
        except ConfigError:  # some of its layers keep nothing
            pass
        else:
            yield first_token
            yield from cached_tokens
            return
    yield from _tokens_without_cache(pipeline, prompt, number, length, choose, precision)


def _tokens_with_cache(
    pipeline: Pipeline, model: Any, prompt: Sequence[int], number: int, choose: Choose, precision: Precision
) -> Generator[int]:
    """Yield tokens, of which a model of transformers reads each once."""
    rows = torch.tensor([list(prompt)], device=pipeline.device)
    request = Request(tokens=rows, mask=torch.ones_like(rows), max_new_tokens=number)
    with closing(next_tokens(pipeline, model, request, choose)) as steps:
        for _ in range(number):
            with precision.region(pipeline.device):
                token = next(steps)
            yield int(token)


def _tokens_without_cache(
    pipeline: Pipeline, prompt: Sequence[int], number: int, length: int, choose: Choose, precision: Precision
) -> Generator[int]:
    """Yield tokens, each from a whole forward over the last `length` tokens of the text so far."""
    text = list(prompt)
    for _ in range(number):
        context = text[-length:]
        rows = torch.tensor([context + [PADDING] * (length - len(context))], device=pipeline.device)
        with precision.region(pipeline.device):
            outputs = pipeline.evaluate(rows, return_outputs=True).outputs
        logits = None if outputs is None else outputs[:, len(context) - 1]
        text.append(int(shared_tokens(pipeline, logits, choose)))
        yield text[-1]


def obstacle_to_sampling(config: RunConfig, pipeline: Pipeline) -> str:
    """Return why a model cannot write text; empty where it can. Every rank calls it, and gets the same.

    It has to return logits of every position, which must not depend on later tokens.
    """
    if not config.model.place:
        return ""  # the decoder can
    length, vocabulary = config.batch.length, tokenizer_of(config).vocabulary
    rows = torch.zeros(2, 1, length, dtype=torch.int64, device=pipeline.device)
    rows[1, :, length // 2 :] = 1
    precision, outputs = Precision(config.precision), []
    for tokens in rows:
        with precision.region(pipeline.device):
            outputs.append(pipeline.evaluate(tokens, return_outputs=True).outputs)
    local_reason = "" if outputs[0] is None else _obstacle_in(outputs[0], outputs[1], vocabulary)
    reasons: list[Any] = pipeline.control.all_gather_object(local_reason)
    return next((reason for reason in reasons if reason), "")


def _obstacle_in(logits: Any, other_logits: Any, vocabulary: int) -> str:
    """Say why the logits of two texts with an equal first half cannot be sampled from; empty where they can."""
    shape = tuple(logits.shape) if isinstance(logits, Tensor) else described(logits)
    if not isinstance(logits, Tensor) or logits.dim() != 3 or logits.shape[-1] < vocabulary:
        return f"it returns {shape}, which are no logits of {vocabulary} tokens [batch, length, vocabulary]"
    half = logits.shape[1] // 2
    if not torch.allclose(logits[:, :half].float(), other_logits[:, :half].float(), rtol=1e-3, atol=1e-5):
        return "a position of it reads tokens behind it, which are not there yet when a text is written"
    return ""


def sample(config: RunConfig, pipeline: Pipeline, prompt: Sequence[int]) -> Iterator[str]:
    """Yield the run's sample piece by piece, on every rank: the text that follows a prompt."""
    obstacle = obstacle_to_sampling(config, pipeline)
    if obstacle:
        return iter([f" ... the model of {config.model.place} writes no text: {obstacle}"])
    tokenizer = tokenizer_of(config)
    length = config.batch.length  # of the sequences that it was trained on
    seed, precision = config.run.seed, Precision(config.precision)
    tokens = generate(pipeline, prompt, tokenizer, config.sample, length=length, seed=seed, precision=precision)
    return as_text(tokens, tokenizer.decode)


@contextmanager
def load_trained(config: RunConfig) -> Iterator[Pipeline]:
    """Make the model of a run on this rank alone: with its weights, or those of its newest checkpoint.

    Raises:
        CheckpointError: there are none, or they cannot be read, or are another model's.
    """
    vocabulary = config.model.vocabulary or tokenizer_of(config).vocabulary
    layers = build_layers(config, vocabulary)
    with closing(Pipeline(layers, "gpipe", 1, ranks=1, device=device_of_rank(config))) as pipeline:
        load_weights(Path(config.run.folder), pipeline)
        yield pipeline


def as_text(tokens: Iterable[int], decode: Callable[[Sequence[int]], str]) -> Iterator[str]:
    """Yield the text of tokens piece by piece, with control characters replaced.

    A character may take several tokens, so a text that ends in an unknown one waits for the next token.
    """
    known_tokens: list[int] = []
    shown_text = text = ""
    for token in tokens:
        known_tokens.append(token)
        text = decode(known_tokens)
        if not text.endswith(UNKNOWN):
            yield _printable(text[len(shown_text) :])
            shown_text = text
    yield _printable(text[len(shown_text) :])


def _printable(text: str) -> str:
    """Replace what would move a terminal's cursor or change its colours."""
    return "".join(character if character in "\n\t" or character.isprintable() else UNKNOWN for character in text)
