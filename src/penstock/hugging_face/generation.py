"""Text behind prompts, token by token: every rank keeps what its layers have read in a cache of transformers.

    prompt    evaluate(tokens [rows, length])    fills the caches of all ranks
    token     evaluate(tokens [rows, 1])         each row reads the token that it has got last

The rank of the last stage draws, for all rows at once, and one exchange brings the tokens to all ranks. Microbatches of
rows follow one another through the stages, as in every evaluation; each has a cache of its own.
"""

import hashlib
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from penstock.errors import ConfigError, PenstockError, described
from penstock.execute.batch.microbatch import PreSplit
from penstock.execute.control.handshake import Rule, require_equal
from penstock.execute.stages.evaluation import evaluating
from penstock.execute.transport.calls import collective
from penstock.hugging_face.cached_rows import CACHED_ROWS, CachedRows
from penstock.hugging_face.sampling import Sampling, require_number
from penstock.hugging_face.undocumented_caches import (
    cache_argument,
    inputs_of_forward,
    longest_text,
    rank_cache,
    takes_dynamic_cache,
    unstretched_text,
)
from penstock.models.cutting.part import CutPart
from penstock.pipeline import Pipeline

Choose = Callable[[Tensor], Tensor]
"""Returns a token for each row of logits [rows, vocabulary]."""
SAME_ON_ALL = {
    **dict.fromkeys(("max_new_tokens", "temperature", "top_k", "top_p", "seed"), Rule("Pass the same on all ranks")),
    **dict.fromkeys(
        ("eos_token_id", "pad_token_id"),
        Rule("Pass the same, or give all ranks the same model.whole.generation_config"),
    ),
}
"""What has one value on all ranks of all replicas: fields of a request, and ids that its model says otherwise."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("num_beams", "repetition_penalty", "encoder_repetition_penalty", "guidance_scale"), (None, 1)),
    **dict.fromkeys(("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "min_new_tokens"), (None, 0)),
    "min_length": (None, 0, 1),  # which every prompt has
    **dict.fromkeys(("bad_words_ids", "suppress_tokens", "begin_suppress_tokens", "stop_strings"), (None, [])),
    "sequence_bias": (None, [], {}),
    "remove_invalid_values": (None, False),
    **dict.fromkeys(("forced_bos_token_id", "forced_eos_token_id"), (None,)),
    **dict.fromkeys(("exponential_decay_length_penalty", "watermarking_config"), (None,)),
}
"""Settings of a `generation_config` by which transformers takes other tokens, with the values by which it does not."""
NEUTRAL_DRAWN: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("min_p", "epsilon_cutoff", "eta_cutoff"), (None, 0)),
    "typical_p": (None, 1),
    "top_h": (None,),
}
"""The same, of the settings that count where tokens are drawn."""
MOST_LAYERS = 3
"""Layers that a message about a cache lists."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Request:
    """What a user asks for."""

    tokens: Any
    """Prompts, [rows, length], padded on the left."""
    mask: Any = None
    """Ones where there are tokens, zeros at padding, of the shape of `tokens`; None: as the ids of padding say."""
    max_new_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    eos_token_id: Any = None
    """One or several tokens that end a row; None: those of the model's generation_config."""


@collective
def generate(pipeline: Pipeline, model: Any, request: Request) -> Tensor:
    """Return prompts and what follows them, [rows, length], the same on every rank of a replica.

    Every rank calls it. `model` is the transformers model, on the meta device or not. Rows that have ended are filled
    up with padding.

    Raises:
        ConfigError: on every rank: the model keeps no cache that its stages can fill, or the request is wrong.
        PipelineError: a rank asks for something else, or is lost.
    """
    request = _agreed(pipeline, model, request)
    sampling = Sampling(temperature=request.temperature, top_k=request.top_k, top_p=request.top_p)
    generator = torch.Generator(pipeline.device).manual_seed(request.seed)
    padding = _padding(model, request.eos_token_id)
    texts, is_open = [request.tokens], torch.ones(len(request.tokens), dtype=torch.bool, device=pipeline.device)
    ends = torch.tensor(request.eos_token_id, dtype=torch.int64, device=pipeline.device)

    def choose(logits: Tensor) -> Tensor:
        tokens = sampling.draw(logits, generator)
        return tokens if padding is None else torch.where(is_open, tokens, padding)

    with closing(next_tokens(pipeline, model, request, choose)) as tokens_of_steps:
        for tokens in tokens_of_steps:
            texts.append(tokens[:, None])
            is_open &= ~torch.isin(tokens, ends)
            # Replicas take their steps together, so one that has ended waits for the others.
            if not any(pipeline.control.all_gather_object(bool(is_open.any()))):
                break
    return torch.cat(texts, 1)


def next_tokens(pipeline: Pipeline, model: Any, request: Request, choose: Choose) -> Generator[Tensor]:
    """Yield the next token of each row, [rows], at most `max_new_tokens` times; every rank iterates alike.

    `choose` is called on the rank of the last stage alone. A caller that ends early closes the iterator.
    """
    reader = _CachedReader(pipeline, model, request.tokens, request.mask)
    tokens = request.tokens
    # Once for all tokens, since each evaluation would change the modes of all modules, and change them back.
    with evaluating(pipeline.stages), closing(reader):
        for _ in range(request.max_new_tokens):
            logits = reader.read(tokens)
            tokens = shared_tokens(pipeline, logits, choose)
            yield tokens
            tokens = tokens[:, None]


def cached_model(pipeline: Pipeline, length: int) -> Any:
    """Return the transformers model that a pipeline can read so many tokens of with a cache; None where it cannot."""
    module = pipeline.stages[0].modules[0]
    model: Any = module.whole_model if isinstance(module, CutPart) else None
    if not hasattr(model, "prepare_inputs_for_generation") or obstacle_to_cache(model):
        return None
    limits = filter(None, (longest_text(model.config), unstretched_text(model.config)))
    return model if length <= min(limits, default=length) else None


def obstacle_to_cache(model: Any) -> str:
    """Return why stages cannot keep caches of a transformers model; empty where they can."""
    name = type(model).__name__
    if model.config.is_encoder_decoder:
        return f"{name} has an encoder, whose outputs its decoder reads anew for each token; call its own generate"
    if not model.can_generate():
        return f"{name} has no generate of transformers either; take a model with a head for the next token"
    if model.config.get_text_config() is not model.config:  # the config of several models
        return f"{name} is no decoder of text alone; call its own generate"
    if not cache_argument(model):
        return f"the forward of {name} takes no cache of transformers; call its own generate"
    if not takes_dynamic_cache(model):
        return f"{name} takes no cache but one of a class of its own; call its own generate"
    return ""


class _CachedReader:
    """Reads tokens by a pipeline whose ranks keep what they have read."""

    def __init__(self, pipeline: Pipeline, model: Any, tokens: Tensor, mask: Tensor) -> None:
        self._pipeline, self._model = pipeline, model
        # As an evaluation cuts them, so that each microbatch meets its own cache again.
        rule = replace(pipeline.options.batch_rule(pipeline.schedule), takes_any_size=True)
        self._sizes = [microbatch.size for microbatch in rule.microbatches((tokens,), {}, None)]
        self._caches = [rank_cache(model.config) for _ in self._sizes]
        self._text, self._mask = tokens[:, :0], mask

    def read(self, tokens: Tensor) -> Tensor | None:
        """Read tokens, [rows, length]; return the logits behind them, [rows, vocabulary], where the last stage is."""
        self._text = torch.cat([self._text, tokens], 1)
        num_new = self._text.shape[1] - self._mask.shape[1]
        self._mask = torch.cat([self._mask, self._mask.new_ones(len(tokens), num_new)], 1)
        is_first = not self._caches[0].seen
        parts = zip(
            torch.split(self._text, self._sizes), torch.split(self._mask, self._sizes), self._caches, strict=True
        )
        rows = [CachedRows(inputs_of_forward(self._model, *part)) for part in parts]
        # Consumed, so that no step holds a cache for longer than it runs.
        keyword: dict[str, Any] = {CACHED_ROWS: PreSplit(rows, is_consumed=True)}
        outputs = self._pipeline.evaluate(tokens, return_outputs=True, **keyword).outputs
        for cache in self._caches:
            cache.advance(tokens.shape[1])
        if is_first:
            self._require_filled()
        return None if outputs is None else _last_logits(outputs, len(tokens))

    def close(self) -> None:
        """Let go of the caches, which the layers may still have in their hands."""
        for cache in self._caches:
            cache.release()

    def _require_filled(self) -> None:
        """Refuse a model whose blocks keep less than they read. Raises: ConfigError, on every rank alike."""
        local_layers = [cache.filled_layers() for cache in self._caches]
        layers_by_rank: Any = self._pipeline.control.within.all_gather_object(local_layers)
        for index, cache in enumerate(self._caches):
            filled = {layer for layers_by_cache in layers_by_rank for layer in layers_by_cache[index]}
            missing = [str(layer) for layer in cache.expected_layers() if layer not in filled]
            if missing or not filled:
                raise ConfigError(
                    f"{type(self._model).__name__} keeps nothing in the cache of its layers "
                    f"{', '.join(missing[:MOST_LAYERS]) or 'at all'}, so that stages would read each token without "
                    "those before it; call its own generate",
                    key="model",
                )


def _last_logits(outputs: Any, num_rows: int) -> Tensor:
    if not isinstance(outputs, Tensor) or outputs.dim() != 3 or len(outputs) != num_rows:
        raise PenstockError(
            f"the pipeline returns {_form(outputs)}, which are no logits of {num_rows} rows [rows, length, "
            "vocabulary]; leave out merge="
        )
    return outputs[:, -1]


def shared_tokens(pipeline: Pipeline, logits: Tensor | None, choose: Choose) -> Tensor:
    """Return the tokens of this replica's rows, which the rank of the last stage chooses, on every rank of it."""
    control, num_ranks = pipeline.control, pipeline.transport.num_ranks
    tokens_by_rank = control.together(lambda: None if logits is None else choose(logits).tolist())
    begin = pipeline.replica * num_ranks
    tokens = next(tokens for tokens in tokens_by_rank[begin : begin + num_ranks] if tokens is not None)
    return torch.tensor(tokens, dtype=torch.int64, device=pipeline.device)


# ---- what is asked for


def _agreed(pipeline: Pipeline, model: Any, request: Request) -> Request:
    """Return a request with all that it leaves out, as all ranks agree on it. Raises: ConfigError, PipelineError."""
    checked: list[Request] = []

    def check() -> dict[str, str]:
        _require_same_model(pipeline, model)
        checked.append(_checked(model, request, pipeline.device))
        # Where a request has no ids, each rank has those of its own model.
        padding = {"pad_token_id": _padding(model, checked[0].eos_token_id)}
        return {name: str(padding[name] if name in padding else getattr(checked[0], name)) for name in SAME_ON_ALL}

    control = pipeline.control
    require_equal(control.together(check), control.names, SAME_ON_ALL)
    # Each replica has prompts of its own, of which all ranks of it have the same.
    tensors = {"input_ids": checked[0].tokens, "attention_mask": checked[0].mask}
    reports: Any = control.within.all_gather_object({name: _digest(tensor) for name, tensor in tensors.items()})
    rule = Rule("Pass the same prompts on all ranks", "values")
    require_equal(reports, control.within.names, dict.fromkeys(tensors, rule))
    return checked[0]


def _checked(model: Any, request: Request, device: torch.device) -> Request:
    """Return a request with its mask and ends, on the device of the stages. Raises: ConfigError."""
    obstacle = obstacle_to_cache(model)
    if obstacle:
        raise ConfigError(obstacle, key="model")
    Sampling(temperature=request.temperature, top_k=request.top_k, top_p=request.top_p)
    for name, neutral_values in (NEUTRAL | (NEUTRAL_DRAWN if request.temperature else {})).items():
        value = getattr(model.generation_config, name, None)
        if value not in neutral_values:
            raise ConfigError(
                f"{value!r}, by which transformers takes other tokens, is not applied here; set it to None in "
                "model.whole.generation_config, or call the model's own generate",
                key=f"generation_config.{name}",
            )
    require_number("seed", request.seed, int, 0, 2**63 - 1)
    tokens, ends = _checked_tokens(model, request), _checked_ends(model, request)
    mask = _checked_mask(tokens, request.mask, None if (padding := _padding(model, ends)) in ends else padding)
    return replace(request, tokens=tokens.to(device, torch.int64), mask=mask.to(device), eos_token_id=ends)


def _checked_tokens(model: Any, request: Request) -> Tensor:
    """Return the prompts of a request. Raises: ConfigError."""
    tokens, vocabulary = request.tokens, model.config.get_text_config(decoder=True).vocab_size
    if not isinstance(tokens, Tensor) or tokens.dim() != 2 or tokens.dtype not in (torch.int32, torch.int64):
        raise ConfigError(f"{_form(tokens)}; expected prompts, a tensor of ids [rows, length]", key="input_ids")
    if not tokens.numel():
        raise ConfigError(f"the shape is {tuple(tokens.shape)}; expected a token in each row", key="input_ids")
    low, high = int(tokens.min()), int(tokens.max())
    if low < 0 or high >= vocabulary:
        wrong = low if low < 0 else high
        raise ConfigError(f"the id {wrong} is none of the {vocabulary} tokens of the model", key="input_ids")
    require_number("max_new_tokens", request.max_new_tokens, int, 1)
    longest = longest_text(model.config)
    room = longest - tokens.shape[1]
    if longest and request.max_new_tokens > room:
        raise ConfigError(
            f"{request.max_new_tokens} tokens behind prompts of {tokens.shape[1]} are more than the {longest} "
            f"positions of {type(model).__name__}; {f'ask for {room} at most' if room > 0 else 'cut the prompts'}",
            key="max_new_tokens",
        )
    _require_one_rotation(model, tokens.shape[1], request.max_new_tokens)
    return tokens


def _require_one_rotation(model: Any, length: int, number: int) -> None:
    """Refuse a text beyond the positions up to which a model with two sets of rotary factors takes the first one.

    Raises: ConfigError.
    """
    shortest = unstretched_text(model.config)
    if shortest and length + number > shortest:
        fix = f"ask for {shortest - length} at most, or " if length < shortest else ""
        raise ConfigError(
            f"{number} tokens behind prompts of {length} go beyond the {shortest} positions up to which "
            f"{type(model).__name__} takes its first rotary factors (longrope), and a cache has no others; {fix}call "
            "the model's own generate",
            key="max_new_tokens",
        )


def _checked_ends(model: Any, request: Request) -> tuple[int, ...]:
    """Return the tokens that end a row. Raises: ConfigError."""
    ends = model.generation_config.eos_token_id if request.eos_token_id is None else request.eos_token_id
    ends = () if ends is None else (ends,) if isinstance(ends, int) else ends
    if not isinstance(ends, list | tuple) or not all(type(end) is int for end in ends):
        raise ConfigError(f"{described(ends)}; expected an id of a token, or a list of such", key="eos_token_id")
    return tuple(ends)


def _padding(model: Any, ends: Sequence[int]) -> int | None:
    """Return the token behind the end of a row; None where no row ends."""
    padding: int | None = model.generation_config.pad_token_id
    return next(iter(ends), None) if padding is None else padding


def _checked_mask(tokens: Tensor, mask: Any, padding: int | None) -> Tensor:
    """Return the mask of prompts, [rows, length] of int64; by default there are none where there is padding.

    Raises: ConfigError.
    """
    if mask is None:
        mask = torch.ones_like(tokens) if padding is None else tokens.ne(padding)
    if not isinstance(mask, Tensor) or mask.shape != tokens.shape:
        raise ConfigError(f"{_form(mask)}; expected a tensor of shape {tuple(tokens.shape)}", key="attention_mask")
    if ((mask != 0) & (mask != 1)).any():
        raise ConfigError("has other numbers than 0 (padding) and 1 (tokens)", key="attention_mask")
    last = mask[:, -1] == 0
    if last.any():
        raise ConfigError(
            f"row {int(last.nonzero()[0])} ends with padding, behind which nothing can follow; pad on the left "
            "(tokenizer.padding_side = 'left')",
            key="attention_mask",
        )
    return mask.long()


def _form(value: Any) -> str:
    return f"{value.dtype} of shape {tuple(value.shape)}" if isinstance(value, Tensor) else described(value)


def _require_same_model(pipeline: Pipeline, model: Any) -> None:
    """Refuse a pipeline with parameters that a model does not have. Raises: ConfigError."""
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, parameter in pipeline.named_parameters():
        if shapes.get(name) != tuple(parameter.shape):
            raise ConfigError(
                f"its parameter {name!r} of shape {tuple(parameter.shape)} is none of {type(model).__name__}; pass the "
                "pipeline of this model",
                key="pipeline",
            )


def _digest(tensor: Tensor) -> str:
    return hashlib.sha256(f"{tuple(tensor.shape)}".encode() + tensor.cpu().contiguous().numpy().tobytes()).hexdigest()
