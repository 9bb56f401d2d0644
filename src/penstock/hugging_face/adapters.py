"""Adapters of peft on models of transformers: found once on the whole model without values, made by each layer.

    whole model on meta ──► peft puts the adapter in ──► names: targets, trained parameters, tensors of files
    layer, from files   ──► peft puts its own part of the adapter in, with first values by the layer's seed, or read

All that an adapter computes is peft's own code.
"""

import copy
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from penstock.checkpoints.shards import read_tensors, shapes_of
from penstock.errors import CheckpointError, ConfigError, described, listed, nearest
from penstock.hugging_face.undocumented_peft import (
    CONFIG,
    KEY,
    STEM,
    adapted_modules,
    config_for,
    names_in_file,
    names_without,
    peft,
    projections_of,
    require_clear_patterns,
    settings_of_modules,
    share_projections,
    wrapped,
)
from penstock.models.cutting.part import CutPart
from penstock.models.cutting.points import saved_tensors

FILE = f"{STEM}.safetensors"
NAME = "default"
"""peft's name of an adapter that is the only one."""
SETTINGS = {
    "LORA": (
        *("r", "target_modules", "exclude_modules", "lora_alpha", "lora_dropout", "fan_in_fan_out", "bias"),
        *("use_rslora", "use_dora", "modules_to_save", "init_lora_weights", "lora_bias"),
        *("layers_to_transform", "layers_pattern", "rank_pattern", "alpha_pattern"),
    ),
    "IA3": (
        *("target_modules", "exclude_modules", "feedforward_modules", "fan_in_fan_out", "modules_to_save"),
        "init_ia3_weights",
    ),
    "VERA": (
        *("r", "target_modules", "projection_prng_key", "save_projection", "vera_dropout", "d_initial"),
        *("fan_in_fan_out", "bias", "modules_to_save", "init_weights", "layers_to_transform", "layers_pattern"),
    ),
}
"""The methods that train in a pipeline, by peft's names, with the settings of each that may differ from peft's own."""
DESCRIPTIVE = ("task_type", "peft_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision")
"""Settings of all methods that say where an adapter belongs."""
FIRST_VALUES = (True, False, "gaussian", "olora", "orthogonal", "pissa")
"""The rules for first values of LoRA that need the weights of a module alone; also pissa_niter_N."""


def config_of(adapter: Any) -> Any:
    """Return the settings of an adapter: a config of peft, or a folder that peft has written. Raises: ConfigError."""
    library = peft()
    if isinstance(adapter, library.PeftConfig):
        return copy.deepcopy(adapter)
    if not isinstance(adapter, str | Path):
        raise ConfigError(f"{described(adapter)}; expected a config of peft, or a folder of an adapter", key=KEY)
    folder = Path(adapter)
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder}: holds no {CONFIG}; give a folder that save_pretrained of peft wrote", key=KEY)
    try:
        return library.PeftConfig.from_pretrained(str(folder))
    except Exception as error:  # peft raises what it likes for a wrong file
        raise ConfigError(
            f"{folder / CONFIG}: peft cannot read it: {type(error).__name__}: {error}", key=KEY
        ) from error


def new_config(kind: str, settings: Mapping[str, Any]) -> Any:
    """Return a config of a method of peft for causal language models, by its name. Raises: ConfigError."""
    library = peft()
    config_class = {"lora": library.LoraConfig, "ia3": library.IA3Config, "vera": library.VeraConfig}[kind]
    known = SETTINGS[kind.upper()]
    unknown = [name for name in settings if name not in known]
    if unknown:
        hint = nearest(unknown[0], known)
        raise ConfigError(
            f"{config_class.__name__} has no setting {unknown[0]!r} that a pipeline trains.{hint} Known here: "
            f"{', '.join(known)}",
            key=KEY,
        )
    try:
        return config_class(task_type="CAUSAL_LM", **settings)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"{config_class.__name__} of peft refuses its settings: {error}", key=KEY) from error


def require_supported(config: Any) -> None:
    """Refuse methods and settings of peft that do not train in a pipeline as they do in one process.

    Raises: ConfigError.
    """
    method = getattr(config.peft_type, "value", str(config.peft_type))
    if method not in SETTINGS:
        raise ConfigError(
            f"{method} of peft {_reason(config, method)}; take LoraConfig, IA3Config or VeraConfig", key=KEY
        )
    allowed = {*SETTINGS[method], *DESCRIPTIVE, "inference_mode"}
    plain = type(config)()
    for setting in fields(config):
        value = getattr(config, setting.name)
        if setting.name not in allowed and value and value != getattr(plain, setting.name):
            raise ConfigError(
                f"{type(config).__name__}({setting.name}={value!r}) is not supported in a pipeline; leave it out",
                key=KEY,
            )
    rule = getattr(config, "init_lora_weights", True)
    if rule not in FIRST_VALUES and not str(rule).startswith("pissa_niter_"):
        raise ConfigError(
            f"init_lora_weights={rule!r} needs data, or weights of another form; expected one of "
            f"{', '.join(map(repr, FIRST_VALUES))}, or 'pissa_niter_4'",
            key=KEY,
        )


def _reason(config: Any, method: str) -> str:
    if method == "ADALORA":
        return "changes its ranks and adds a loss in the wrapper around the model, which a pipeline does not run"
    if config.is_prompt_learning:
        return "puts its prompt before the batch in the wrapper around the model, which a pipeline does not run"
    return "has not been compared with one process"


@dataclass(frozen=True, eq=False)
class Adapter:
    """An adapter on a whole model, neither of which has values, unless the model is used in place."""

    peft_model: Any
    """peft's wrapper around the model with the adapter."""
    name: str = NAME
    file: Path | None = None
    """The file with the adapter's values; None where they are drawn, or in the model that is used in place."""

    @classmethod
    def on(cls, plain: Any, adapter: Any) -> "Adapter":
        """Put an adapter into a copy of a model on the meta device; `adapter` is a config of peft or a folder.

        Raises:
            ConfigError: the adapter is not one that a pipeline trains, or its targets are not in the model.
            CheckpointError: the folder has no values of this adapter.
        """
        config = config_of(adapter)
        folder = Path(adapter) if isinstance(adapter, str | Path) else None
        require_supported(config)
        _require_targets(plain, config, is_new=folder is None)
        base_name, config.base_model_name_or_path = config.base_model_name_or_path, None
        config.inference_mode = False
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FutureWarning)  # peft's own, of transformers
                peft_model = wrapped(copy.deepcopy(plain), config, NAME)
        except Exception as error:  # peft raises what it likes for a target that is not there
            raise ConfigError(
                f"peft cannot put the adapter into {type(plain).__name__}: {type(error).__name__}: "
                f"{str(error).rstrip('.')}. Give target_modules that are in the model",
                key=KEY,
            ) from error
        _require_modules(plain, config)
        if base_name is not None:
            config.base_model_name_or_path = base_name
        adapter_on_model = cls(peft_model, file=None if folder is None else folder / FILE)
        require_clear_patterns(config, adapter_on_model.modules[0])
        if folder is not None:
            _require_same_model(adapter_on_model, folder)
        return adapter_on_model

    @classmethod
    def around(cls, source: Any) -> "Adapter":
        """Return the adapter of a model with peft's wrapper around it. Raises: ConfigError."""
        if not isinstance(source, peft().PeftModel):
            raise ConfigError(
                f"a {type(source).__name__}; expected a model with one adapter, as get_peft_model(model, config) makes "
                "it, without mixed=True",
                key=KEY,
            )
        names = list(source.peft_config)
        for name in names:
            require_supported(source.peft_config[name])
        if len(names) > 1:
            raise ConfigError(
                f"the model has the adapters {listed(names, quoted=repr)}; expected one. Remove others by "
                "delete_adapter()",
                key=KEY,
            )
        if any(getattr(module, "merged", False) for module in source.modules()):
            raise ConfigError("the adapter is merged into the model; call unmerge_adapter() first", key=KEY)
        adapter = cls(source, names[0])
        require_clear_patterns(adapter.config, adapter.modules[0])
        return adapter

    @property
    def model(self) -> Any:
        """The model of transformers with the adapter in it."""
        return self.peft_model.get_base_model()

    @property
    def folder_name(self) -> str:
        """The name of the folder in which peft saves the adapter; empty for an adapter of the default name."""
        return "" if self.name == NAME else self.name

    @property
    def config(self) -> Any:
        """The settings of the adapter, as peft has completed them for this model."""
        return self.peft_model.peft_config[self.name]

    @cached_property
    def modules(self) -> tuple[dict[str, None], dict[str, None]]:
        """The names of the modules with an adapter, and of those of which a copy is trained."""
        return adapted_modules(self.model)

    @cached_property
    def base_names(self) -> dict[str, str]:
        """The names without the adapter of the model's own parameters and buffers, by their names with it."""
        return names_without(self.model)

    @cached_property
    def trained_names(self) -> frozenset[str]:
        """The names of the parameters that are trained."""
        return frozenset(name for name, parameter in self.model.named_parameters() if parameter.requires_grad)

    @cached_property
    def file_names(self) -> dict[str, str]:
        """The names in peft's file of the adapter's tensors, by their names in the model."""
        return names_in_file(self.peft_model, self.name)

    def module_of(self, name: str) -> str:
        """Return the name of the module with an adapter, or with a trained copy, that has a tensor; else nothing."""
        steps = name.split(".")
        paths = (".".join(steps[:length]) for length in range(1, len(steps)))
        return next((path for path in paths if any(path in group for group in self.modules)), "")

    @cached_property
    def projections(self) -> dict[str, Tensor]:
        """The matrices that all layers of VeRA share, by name."""
        return projections_of(self.peft_model, self.name)

    def put_into(self, part: CutPart) -> None:
        """Put the adapter's part into a layer that has the names of the model, and freeze all but what is trained.

        First values are drawn from torch's generator, or read from the folder. Raises: CheckpointError.
        """
        names = {name for name, _ in part.named_modules()}
        targets, copied = ([name for name in group if name in names] for group in self.modules)
        if targets or copied:
            wrapped(part, config_for(self.config, targets, copied), self.name)
            device = next(part.parameters()).device
            projections = {name: item.to(device, copy=True) for name, item in self.projections.items()}
            share_projections(part, self.name, projections)  # a copy: ranks of one process change no tensor together
        for name, parameter in part.named_parameters():
            parameter.requires_grad_(name in self.trained_names)
        self.mark(part)
        if self.file is not None:
            _fill(part, self.file, self.file_names)

    def mark(self, part: CutPart) -> None:
        """Note what of a layer a checkpoint has not, and by what its adapters compute beside tensors.

        A checkpoint has no frozen parameters, and nothing that all layers of VeRA share.
        """
        part.module_settings = partial(settings_of_modules, part, self.config)
        part.rebuilt_names = frozenset(
            name
            for name, tensor in saved_tensors(part).items()
            if name not in self.trained_names and (isinstance(tensor, nn.Parameter) or name in self.file_names)
        )


def _require_targets(plain: Any, config: Any, *, is_new: bool) -> None:
    """Refuse a target that is nowhere in a model, where peft may be content with the others.

    A wrapper for a task adds the names that heads of classifiers may have to `modules_to_save` of a saved adapter.

    Raises: ConfigError, with the nearest names.
    """
    module_names = [name for name, _ in plain.named_modules() if name]
    for setting in ("target_modules", "feedforward_modules", "modules_to_save") if is_new else ("target_modules",):
        targets = getattr(config, setting, None)
        for target in sorted(targets) if isinstance(targets, list | set | tuple) else ():
            if any(name == target or name.endswith(f".{target}") for name in module_names):
                continue
            ends = dict.fromkeys(name.rpartition(".")[2] for name in module_names)
            choices = [end for end in ends if not end.isdigit()]
            raise ConfigError(
                f"{setting} has {target!r}, which names no module of {type(plain).__name__}, so that no stage would "
                f"have it.{nearest(target.rpartition('.')[2], choices)} Give ends of names of its modules: "
                f"{listed(choices)}",
                key=KEY,
            )


def _require_modules(plain: Any, config: Any) -> None:
    """Refuse targets that peft has turned into single parameters, as those of experts and routers.

    Raises: ConfigError.
    """
    parameters = getattr(config, "target_parameters", None)
    if parameters:
        rest = sorted(config.target_modules or ()) if not isinstance(config.target_modules, str) else ()
        raise ConfigError(
            f"target_modules also means {listed(sorted(parameters), quoted=repr)} of {type(plain).__name__}: "
            "parameters of experts or routers and not modules, which peft adapts by target_parameters, and a pipeline "
            f"does not. Name the modules instead, such as target_modules={rest or ['q_proj', 'v_proj']}",
            key=KEY,
        )


def _fill(part: nn.Module, file: Path, file_names: Mapping[str, str]) -> None:
    """Read the tensors of an adapter's part, by their names in the model and in the file. Raises: CheckpointError."""
    state = saved_tensors(part)
    names = {name: file_names[name] for name in state if name in file_names and not state[name].is_meta}
    values = read_tensors(file, dict.fromkeys(names.values())) if names else {}
    for name, file_name in names.items():
        state[name].detach().copy_(values[file_name])


def _require_same_model(adapter: Adapter, folder: Path) -> None:
    """Compare the file of an adapter with the model that it is put into. Raises: CheckpointError."""
    file, whole = folder / FILE, adapter.model
    if not file.is_file():
        raise CheckpointError(f"{folder}: holds no {FILE}; give a folder that save_pretrained of peft wrote")
    stored, state = shapes_of(file), saved_tensors(whole)
    shapes = {file_name: tuple(state[name].shape) for name, file_name in adapter.file_names.items()}
    missing, surplus = sorted(shapes.keys() - stored.keys()), sorted(stored.keys() - shapes.keys())
    other = [name for name in sorted(shapes.keys() & stored.keys()) if stored[name][1] != shapes[name]]
    if missing:
        problem = f"it has no {missing[0]!r}.{nearest(missing[0], stored)}"
    elif surplus:
        problem = f"it also has {surplus[0]!r}.{nearest(surplus[0], shapes)}"
    elif other:
        problem = f"{other[0]!r} has the shape {stored[other[0]][1]}; expected {shapes[other[0]]}."
    else:
        return
    raise CheckpointError(
        f"{folder}: is an adapter for another model than {type(whole).__name__}: {problem} Its {CONFIG} names "
        f"{adapter.config.base_model_name_or_path!r}; give that model, or an adapter for this one"
    )
