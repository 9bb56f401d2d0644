"""The model of a run, and its loss: the decoder, one of transformers, or layers that a user's function returns."""

import hashlib
from collections.abc import Callable, Collection, Iterable
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, PenstockError, described, shortened
from penstock.execute.losses.chunked import chunked_cross_entropy
from penstock.hugging_face.adapters import new_config
from penstock.hugging_face.from_transformers import from_transformers
from penstock.models import LayerSpec, cross_entropy_loss, decoder_layers
from penstock.schedules.third_party import run_third_party
from penstock.train.optimizing.precision import Precision
from penstock.train.settings.config import RunConfig
from penstock.train.settings.user_function import load_function

KEY = "model.source"
TRANSFORMERS = "model.transformers"
KEYS_OF_CODE = (KEY, "model.loss", "data.source")
ALL_LINEAR = "all-linear"
"""The word of peft for all linear modules but the head."""
FUNCTION = "--function"
EXPECTED = "a list of torch.nn.Module or of LayerSpec, in the order in which they run"
Loss = Callable[[Any, Any], Tensor]


def build_layers(config: RunConfig, vocabulary: int) -> list[LayerSpec]:
    """Describe the model's layers, in the type that they compute in; of the decoder, nothing is allocated.

    Raises:
        ConfigError: the user's function cannot be found, fails, or returns something else; or its file has changed
            since the run began.
    """
    if config.model.source:
        layers = _layers_of_source(config, vocabulary)
    elif config.model.transformers:
        layers = _layers_of_transformers(config, vocabulary)
    else:
        sizes = {"vocabulary": vocabulary, "length": config.max_length}
        model = config.model.model_copy(update=sizes)
        layers = decoder_layers(model, seed=config.run.seed, takes_positions=config.data.packs.separates)
    return Precision(config.precision).cast(layers)


def loss_of(config: RunConfig, vocabulary: int) -> Loss:
    """Return the loss of a run, a mean over tokens unless it is a user's own. Raises: ConfigError."""
    if config.model.loss:
        return load_function(config.model.loss, "model.loss")
    return partial(_token_loss, vocabulary, config.model.place_key) if config.model.place else cross_entropy_loss


def pipeline_loss(config: RunConfig, vocabulary: int) -> Loss:
    """Return the loss that a run's pipeline computes: that of the run, in chunks if it says so. Raises: ConfigError."""
    chunk = config.loss.chunk
    return loss_of(config, vocabulary) if chunk == "none" else partial(chunked_cross_entropy, chunk=chunk)


def source_digest(config: RunConfig) -> str:
    """Return the digest of the files that say what another model is; empty for the decoder.

    Raises:
        ConfigError: one cannot be read.
    """
    model = config.model
    if not model.place:
        return ""
    digest = hashlib.sha256()
    files = {KEY: model.source.rpartition(":")[0], "model.loss": model.loss.rpartition(":")[0]}
    if model.transformers:
        files = {TRANSFORMERS: str(Path(model.transformers, "config.json"))}
        if config.adapter.folder:  # the scale of an adapter is in its settings, and not in a checkpoint
            files["adapter.folder"] = str(Path(config.adapter.folder, "adapter_config.json"))
    for key, file in files.items():
        try:
            digest.update(Path(file).read_bytes() if file else b"")
        except OSError as error:
            expected = "a folder of a Hugging Face model" if model.transformers else "FILE.py:FUNCTION"
            raise ConfigError(f"{file}: cannot be read ({error.strerror}); give {expected}", key=key) from error
    return digest.hexdigest()


def require_named_code(config: RunConfig, functions: Collection[str], *, runs: Collection[str] = KEYS_OF_CODE) -> None:
    """Refuse a run folder whose configuration names code that its reader has not named on the command line.

    A folder may come from anyone, and so may a digest in it: the code that it names runs only where the reader has
    named it too. `runs` are the keys whose code is about to run. Raises: ConfigError.
    """
    model, data = config.model, config.data
    places = {KEY: model.source, "model.loss": model.loss, "data.source": data.source}
    needed_places = {key: places[key] for key in runs if places[key]}
    untrusted_places = {key: place for key, place in needed_places.items() if place not in functions}
    if untrusted_places:
        listing = ", ".join(f"{shortened(place)} ({key})" for key, place in untrusted_places.items())
        flags = " ".join(f"{FUNCTION} {place}" for place in dict.fromkeys(needed_places.values()))
        is_single = len(needed_places) == 1
        raise ConfigError(
            f"this run uses Python code, {listing}, and a run folder may come from anyone: no code that it names is "
            f"run. If you trust {'that file' if is_single else 'these files'}, name {'it' if is_single else 'them'}: "
            f"{flags}",
            key=next(iter(untrusted_places)),
        )
    unused_places = [place for place in functions if place not in places.values()]
    if unused_places:
        raise ConfigError(f"got {shortened(unused_places[0])}, which the run does not use; leave it out", key=FUNCTION)


def _layers_of_transformers(config: RunConfig, vocabulary: int) -> list[LayerSpec]:
    model = config.model
    _require_unchanged(config)
    try:
        layers = from_transformers(
            model.transformers, adapter=adapter_of(config), dtype=model.torch_dtype, seed=config.run.seed
        )
    except ConfigError as error:
        key = "adapter" if error.key == "adapter" else TRANSFORMERS
        raise ConfigError(error.problem, key=key) from error
    if not layers.is_decoder:
        raise ConfigError(
            f"{model.transformers} is a {type(layers.whole).__name__}; a run file trains causal decoders on text. "
            "Train others by a Pipeline in a script of yours",
            key=TRANSFORMERS,
        )
    if layers.config.vocab_size < vocabulary:
        raise ConfigError(
            f"{model.transformers} is for {layers.config.vocab_size} token ids, but the tokenizer has {vocabulary}; "
            "name its own in data.tokenizer",
            key=TRANSFORMERS,
        )
    return [layer for layer in layers if isinstance(layer, LayerSpec)]


def adapter_of(config: RunConfig) -> Any:
    """Return the adapter of a run as `from_transformers` takes it; None where there is none. Raises: ConfigError."""
    adapter = config.adapter
    if adapter.folder or not adapter.is_used:
        return adapter.folder or None
    settings: dict[str, Any] = {"target_modules": _targets(adapter.targets), "modules_to_save": list(adapter.train)}
    if adapter.kind == "lora":
        settings |= {"r": adapter.rank, "lora_alpha": adapter.alpha, "lora_dropout": adapter.dropout}
    if adapter.kind == "vera":
        settings |= {"r": adapter.rank, "vera_dropout": adapter.dropout}
    settings = {name: value for name, value in settings.items() if value or name == "target_modules"}
    return new_config(adapter.kind, settings | adapter.options)


def _targets(targets: tuple[str, ...]) -> str | list[str] | None:
    return ALL_LINEAR if targets == (ALL_LINEAR,) else list(targets) or None


def _require_unchanged(config: RunConfig) -> None:
    if config.model.source_digest not in ("", source_digest(config)):
        places = " or ".join(filter(None, (config.model.place, config.adapter.folder)))
        raise ConfigError(
            f"the files of {places} have changed since the run began; put them back, or begin another run",
            key=config.model.place_key,
        )


def _layers_of_source(config: RunConfig, vocabulary: int) -> list[LayerSpec]:
    place, options = config.model.source, config.model.options
    _require_unchanged(config)
    function = load_function(place, KEY)
    call = partial(function, vocabulary=vocabulary, length=config.max_length, **options)
    # Modules are made at once, so every rank draws the same numbers for all of them.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(config.run.seed)
        returned: object = run_third_party(place, call)
        if not isinstance(returned, Iterable):
            raise ConfigError(f"{place} returned {described(returned)}; expected {EXPECTED}", key=KEY)
        layers: list[Any] = run_third_party(place, lambda: list(returned))
    if not layers:
        raise ConfigError(f"{place} returned no layers; expected {EXPECTED}", key=KEY)
    if all(isinstance(layer, LayerSpec) for layer in layers):
        return [replace(layer, seed=layer.seed + config.run.seed) for layer in layers]
    for index, layer in enumerate(layers):
        if not isinstance(layer, nn.Module):
            raise ConfigError(f"{place} returned {described(layer)} as layer {index}; expected {EXPECTED}", key=KEY)
    return _specs_of_modules(layers)


def _specs_of_modules(modules: list[nn.Module]) -> list[LayerSpec]:
    """Name modules by their place, as nn.Sequential does; a parameter that two of them share is tied."""
    name_of_id: dict[int, str] = {}  # of each parameter in the first module that has it
    layers = []
    for index, module in enumerate(modules):
        param_ids = {name: id(param) for name, param in module.named_parameters()}
        tied = tuple((name, name_of_id[param_id]) for name, param_id in param_ids.items() if param_id in name_of_id)
        for name, param_id in param_ids.items():
            name_of_id.setdefault(param_id, f"{index}.{name}")
        # A copy each time: measuring a layer, or another type, must not change the one that is trained.
        layers.append(LayerSpec(str(index), partial(deepcopy, module), tied=tied))
    return layers


def _token_loss(vocabulary: int, key: str, logits: Any, target: Tensor) -> Tensor:
    """Check what the user's last layer returns, then take the loss of the decoder."""
    if not isinstance(logits, Tensor) or logits.shape[:-1] != target.shape or logits.shape[-1] < vocabulary:
        shape = tuple(logits.shape) if isinstance(logits, Tensor) else described(logits)
        raise PenstockError(
            f"{key}: the last layer returned {shape}; the loss of next tokens needs logits of shape "
            f"{(*target.shape, vocabulary)} [batch, length, vocabulary]. Return these, or name your own model.loss"
        )
    return cross_entropy_loss(logits, target)
