"""Uses of peft that its documentation does not promise: what it puts into a model, and under which names.

Each function has a test in tests/hugging_face/test_undocumented_peft.py that says which fact changed.

    plain model                  with an adapter
    layers.0.mlp.up.weight       layers.0.mlp.up.base_layer.weight            frozen
                                 layers.0.mlp.up.lora_A.default.weight        trained, in peft's file
    lm_head.weight               lm_head.original_module.weight               frozen
                                 lm_head.modules_to_save.default.weight       trained, in peft's file
"""

import copy
import re
import shutil
from collections.abc import Collection, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.models.cutting.points import saved_tensors

KEY = "adapter"
PREFIX = "base_model.model."
"""The text before the names of a model in peft's files, and in the state of its wrapper."""
STEM, CONFIG = "adapter_model", "adapter_config.json"
"""The names of peft's files: of the tensors, without the suffix, and of the settings."""
WITHOUT_TARGETS = "dummy-target-modules"
"""The word in `target_modules` by which peft puts no adapter anywhere, and `modules_to_save` in their places."""
PROJECTIONS = ("vera_A", "vera_B")
"""The matrices that all layers of VeRA share."""
PATTERNS = ("rank_pattern", "alpha_pattern")
SCALES = ("lora_alpha", "use_rslora", "scaling")
"""The attributes of a module with LoRA that have its scale, by name of an adapter."""
FORMS = ("fan_in_fan_out", "is_feedforward")
"""The attributes of a module with an adapter that say how it applies its tensors, where their shapes may not tell."""


def peft() -> Any:
    """Return the library. Raises: ConfigError, where it is missing."""
    try:
        return import_module("peft")
    except ImportError as error:
        raise ConfigError(
            f'peft cannot be imported ({error}); install it, as by pip install ".[peft]" in Penstock\'s clone', key=KEY
        ) from error


def is_peft_model(source: Any) -> bool:
    """Whether a model is one of peft's wrappers; peft is imported only where it has been already."""
    return isinstance(source, nn.Module) and type(source).__module__.startswith("peft.")


def wrapped(model: Any, config: Any, name: str) -> Any:
    """Put an adapter with this name into a model; return peft's wrapper around it.

    A model on the meta device gets one there. peft's own `low_cpu_mem_usage` does so too, but patches `nn.Module` for
    all threads meanwhile.
    """
    put_in = peft().get_peft_model
    if not any(parameter.is_meta for parameter in model.parameters()):
        return put_in(model, config, adapter_name=name)
    rule = getattr(config, "init_lora_weights", None)
    if rule is not None:
        config.init_lora_weights = False  # rules such as PiSSA decompose the weights, of which there are none
    with torch.device("meta"):
        peft_model = put_in(model, config, adapter_name=name)
    if rule is not None:
        config.init_lora_weights = rule
    return peft_model


def names_without(model: nn.Module) -> dict[str, str]:
    """Return the names without an adapter of a model's own parameters and saved buffers, by their names with it."""
    targets, copied = adapted_modules(model)
    names: dict[str, str] = {}
    for name in saved_tensors(model):
        path = next((path for path in (*targets, *copied) if name.startswith(f"{path}.")), None)
        if path is None:
            names[name] = name
            continue
        own = "original_module" if path in copied else "base_layer"
        if name.startswith(f"{path}.{own}."):
            names[name] = f"{path}.{name.removeprefix(f'{path}.{own}.')}"
    return names


def adapted_modules(model: nn.Module) -> tuple[dict[str, None], dict[str, None]]:
    """Return the names of the modules with an adapter, and of those of which there is a copy to be trained."""
    tuner_layer = import_module("peft.tuners.tuners_utils").BaseTunerLayer
    copied = import_module("peft.utils").ModulesToSaveWrapper
    modules = list(model.named_modules())
    return (
        {name: None for name, module in modules if isinstance(module, tuner_layer)},
        {name: None for name, module in modules if isinstance(module, copied)},
    )


def settings_of_modules(model: nn.Module, config: Any) -> dict[str, dict[str, Any]]:
    """Return, by name of a module with an adapter, the numbers that change what it computes and are in no tensor."""
    # Where VeRA does not save its matrices, they follow from this number.
    seed = {} if getattr(config, "save_projection", True) else {"projection_prng_key": config.projection_prng_key}
    return {name: seed | _settings_of(model.get_submodule(name)) for name in adapted_modules(model)[0]}


def _settings_of(module: nn.Module) -> dict[str, Any]:
    """Return the settings of one module with one adapter, by peft's names."""
    by_adapter = {name: getattr(module, name) for name in SCALES if hasattr(module, name)}
    settings = {name: value for name, values in by_adapter.items() for value in values.values()}
    settings |= {name: getattr(module, name) for name in FORMS if hasattr(module, name)}
    # A number may be a scalar of numpy or torch.
    return {name: value if isinstance(value, bool | int) else float(value) for name, value in settings.items()}


def config_for(config: Any, targets: Collection[str], copied: Collection[str]) -> Any:
    """Return the config of an adapter with exactly these modules, of those that it has in the whole model."""
    if not targets:  # VeRA refuses to have no target; copies are the same for all methods
        return peft().LoraConfig(target_modules=WITHOUT_TARGETS, modules_to_save=list(copied))
    local_config = copy.deepcopy(config)
    local_config.target_modules = set(targets)
    local_config.modules_to_save = list(copied) or None
    local_config.inference_mode = False
    local_config.task_type = None  # peft's wrappers for a task want methods of a whole model
    for setting in ("base_model_name_or_path", "exclude_modules", "layers_to_transform", "layers_pattern"):
        if hasattr(local_config, setting):
            setattr(local_config, setting, None)
    for setting in PATTERNS:  # peft warns of patterns that name nothing
        patterns = getattr(local_config, setting, None) or {}
        matching = {key: value for key, value in patterns.items() if any(_is_named(key, name) for name in targets)}
        if hasattr(local_config, setting):
            setattr(local_config, setting, matching)
    return local_config


def _is_named(pattern: str, name: str) -> bool:
    return re.match(rf"(.*\.)?({pattern})$", name) is not None


def require_clear_patterns(config: Any, targets: Collection[str]) -> None:
    """Refuse ranks and alphas by pattern that depend on the order of the patterns, since peft's file sorts them.

    A module takes the first pattern that means it. Read from the file, it would take another one. Raises: ConfigError.
    """
    for setting in PATTERNS:
        patterns = getattr(config, setting, None) or {}
        for name in targets:
            keys = [key for key in patterns if _is_named(key, name)]
            if keys and patterns[keys[0]] != patterns[min(keys)]:
                raise ConfigError(
                    f"{setting}: {keys[0]!r} and {min(keys)!r} both mean {name!r}, which takes the first, "
                    f"{patterns[keys[0]]}; but peft's file has them sorted, and is read with {patterns[min(keys)]}. "
                    "Give patterns of which one means a module",
                    key=KEY,
                )


def names_in_file(peft_model: Any, adapter_name: str) -> dict[str, str]:
    """Return the names in peft's file of the tensors of an adapter, by their names in the model."""
    state = saved_tensors(peft_model)  # the same tensors, not views of them: peft renames, and copies nothing
    file_state = peft().get_peft_model_state_dict(peft_model, state_dict=state, adapter_name=adapter_name)
    file_names = {id(tensor): file_name for file_name, tensor in file_state.items()}
    return {
        name.removeprefix(PREFIX): file_names[id(tensor)]
        for name, tensor in state.items()
        if name.startswith(PREFIX) and id(tensor) in file_names
    }


def projections_of(peft_model: Any, adapter_name: str) -> dict[str, Tensor]:
    """Return the matrices that all layers of VeRA share, by name, as peft draws them for a whole model; else none.

    They are as large as its largest module wants them, so that a part of the model would draw others.
    """
    holder = peft_model.base_model
    if not hasattr(holder, PROJECTIONS[0]):
        return {}
    draw = import_module("peft.tuners.vera.model")._kaiming_init
    generator = torch.Generator().manual_seed(peft_model.peft_config[adapter_name].projection_prng_key)
    shapes = {name: tuple(getattr(holder, name)[adapter_name].shape) for name in PROJECTIONS}
    with torch.device("cpu"):
        return {name: draw(shape, generator=generator) for name, shape in shapes.items()}


def share_projections(module: nn.Module, adapter_name: str, projections: Mapping[str, Tensor]) -> None:
    """Let all layers of VeRA in a module have these matrices."""
    for item in module.modules():
        for name, projection in projections.items():
            if hasattr(item, name):
                getattr(item, name)[adapter_name] = projection


def merged(module: Any, adapter_name: str) -> nn.Module:
    """Return the module that a module with an adapter, or with a trained copy, stands for; it is changed."""
    if hasattr(module, "merge"):
        module.merge(safe_merge=True, adapter_names=[adapter_name])
        base: nn.Module = module.get_base_layer()
        return base
    trained: nn.Module = module.modules_to_save[adapter_name]
    return trained


def write_settings(peft_model: Any, adapter_name: str, folder: Path) -> None:
    """Write what peft saves beside the tensors of an adapter, by peft itself, into a new folder."""
    state = {name: torch.empty(0) for name in saved_tensors(peft_model)}
    peft_model.save_pretrained(str(folder), state_dict=state, selected_adapters=[adapter_name])
    own = folder if adapter_name == "default" else folder / adapter_name
    (own / f"{STEM}.safetensors").unlink()
    if own != folder:
        for path in own.iterdir():
            path.rename(folder / path.name)
        shutil.rmtree(own)
