"""`PlannedModel`: the layers of a folder, a run file, a function or a list, and what they are trained in.

Meta-Llama-3-8B         a folder of Hugging Face: its config.json suffices, no weights are read
run.toml                the model of a run file, in its precision and with its optimizer
layers.py:make          a function that makes layers, as model.source of a run file names one
[layer, layer, ...]     layers, as `Pipeline` takes them
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.errors import ConfigError, described
from penstock.execute.losses.model_loss import LayersWithLoss
from penstock.hugging_face.from_transformers import from_transformers
from penstock.hugging_face.source import folder_of, transformers
from penstock.models import cross_entropy_loss
from penstock.models.layer import built_on_meta
from penstock.run_planning.run_file import new_run_settings
from penstock.train.data.tokenizer import tokenizer_of
from penstock.train.model_source import adapter_of, build_layers, pipeline_loss
from penstock.train.optimizing.precision import Precision
from penstock.train.settings.config import RunConfig, config_from_table, load_config
from penstock.train.settings.sections import OptimizerSection, PrecisionSection

KEY = "model"
DEFAULT_PRECISION = PrecisionSection(compute="bfloat16")
WEIGHTS = ("*.safetensors", "*.safetensors.index.json")


@dataclass(frozen=True, slots=True, eq=False)
class PlannedModel:
    """Layers to plan for, what they train in, and how a run file names them."""

    layers: Sequence[Any]
    loss: Any = None
    """The loss behind the last layer; None: that which layers of transformers bring along."""
    precision: PrecisionSection = DEFAULT_PRECISION
    optimizer: OptimizerSection = field(default_factory=OptimizerSection)
    settings: Mapping[str, Any] = field(default_factory=dict)
    """The keys of [model] by which a run file names it; empty where those of the base do."""
    base_text: str = ""
    """The text of a run file whose other keys stay; empty: none."""
    no_run_file: str = ""
    """Why no run file can name it, with the way out; empty where one can."""

    @property
    def module_names(self) -> list[list[str]]:
        """The names of each layer's modules, by which other trainers know them, the layer's own first."""
        return [_module_names(layer, index) for index, layer in enumerate(self.layers)]


def _module_names(layer: Any, index: int) -> list[str]:
    """Return the names of the modules of a layer: a layer of a cut model may have some beside that of its name.

    So the layer `lm_head` has `model.norm` as well. A trainer that keeps the named modules alone would leave it out.
    """
    name = str(getattr(layer, "name", index))
    if not getattr(layer, "has_full_names", False):
        return [name]
    owners = (parameter.rpartition(".")[0] for parameter, _ in built_on_meta(layer).named_parameters())
    return list(dict.fromkeys([name, *(owner for owner in owners if not f"{owner}.".startswith(f"{name}."))]))


def planned_model(model: Any, base: str | Path | None, sequence_length: int) -> PlannedModel:
    """Return the model that an argument of `plan_run` means; `base` is a run file with other settings.

    Raises:
        ConfigError: there is no such model, run file or function.
    """
    if not isinstance(model, str | Path):
        return _of_layers(model, None if base is None else load_config(base), base)
    place = str(model)
    if place.endswith(".toml"):
        if base is not None:
            raise ConfigError(f"{place} is a run file, and so is {base}; give one of them as the model", key="base")
        return _of_run_file(Path(place), sequence_length)
    config = None if base is None else load_config(base)
    if ".py:" in place:
        return _of_source(place, config, base, sequence_length)
    settings = {"transformers": place}
    if config is not None:
        config = _with_model(config, settings | {"source": "", "loss": ""})
    return _of_transformers(place, config, base, settings)


def _with_model(config: RunConfig, settings: Mapping[str, Any]) -> RunConfig:
    """Return a configuration whose [model] has other values."""
    return config.model_copy(update={"model": config.model.model_copy(update=settings)})


def _of_layers(model: Any, config: RunConfig | None, base: str | Path | None) -> PlannedModel:
    if not isinstance(model, Iterable):
        raise ConfigError(f"{described(model)}; expected a folder, a run file, or a list of layers", key=KEY)
    layers = model if isinstance(model, LayersWithLoss) else list(model)
    if not layers:
        raise ConfigError("the list has no layers; give those of the model, in order", key=KEY)
    reason = "layers that are given as such have no name in a run file; give FILE.py:FUNCTION that makes them"
    own_loss = None if isinstance(model, LayersWithLoss) else cross_entropy_loss
    return PlannedModel(
        layers,
        own_loss if config is None else _loss_of(config, own_loss),
        DEFAULT_PRECISION if config is None else config.precision,
        OptimizerSection() if config is None else config.optimizer,
        base_text=_text(base),
        no_run_file=reason,
    )


def _loss_of(config: RunConfig, own_loss: Any) -> Any:
    """Return the loss of layers that a run of this configuration gets, where it names none: their own."""
    is_named = bool(config.model.loss) or config.loss.chunk != "none"
    return pipeline_loss(config, config.model.vocabulary) if is_named else own_loss


def _of_run_file(path: Path, sequence_length: int) -> PlannedModel:
    config = load_config(path)
    if config.model.transformers:
        return _of_transformers(config.model.transformers, config, path, {})
    return _built(config, path, {}, sequence_length)


def _of_source(place: str, config: RunConfig | None, base: Any, sequence_length: int) -> PlannedModel:
    settings = {"source": place}
    if config is None:
        config = config_from_table(new_run_settings(".", settings))
    else:
        config = _with_model(config, settings | {"transformers": ""})
    return _built(config, base, settings, sequence_length)


def _built(config: RunConfig, base: Any, settings: Mapping[str, Any], sequence_length: int) -> PlannedModel:
    """Return the layers that a run of this configuration would build, for sequences of a length."""
    longer = config.model_copy(update={"batch": config.batch.model_copy(update={"length": sequence_length})})
    vocabulary = config.model.vocabulary or tokenizer_of(config).vocabulary
    return PlannedModel(
        build_layers(longer, vocabulary),
        pipeline_loss(config, vocabulary),
        config.precision,
        config.optimizer,
        settings,
        _text(base),
    )


def _of_transformers(place: str, config: RunConfig | None, base: Any, settings: Mapping[str, Any]) -> PlannedModel:
    """Return the layers of a folder of transformers, by its config.json alone."""
    folder = folder_of(place)
    assert folder is not None, "a text names a folder"
    source = transformers().AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    precision = DEFAULT_PRECISION if config is None else config.precision
    dtype = Precision(precision).dtype if Precision(precision).has_main_weights else None
    if dtype is None and config is not None:
        dtype = config.model.torch_dtype
    adapter = None if config is None else adapter_of(config)
    layers = from_transformers(source, dtype=dtype, adapter=adapter)
    has_weights = any(next(folder.glob(pattern), None) for pattern in WEIGHTS)
    reason = (
        ""
        if has_weights
        else f"{place} has no weights, with which a run of it begins; put its safetensors files there, or plan without "
        "writing a run file"
    )
    optimizer = OptimizerSection() if config is None else config.optimizer
    loss = None if config is None else _loss_of(config, None)
    return PlannedModel(layers, loss, precision, optimizer, settings, _text(base), reason)


def _text(base: str | Path | None) -> str:
    return "" if base is None else Path(base).read_text(encoding="utf-8")
