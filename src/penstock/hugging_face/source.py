"""Where a model of transformers comes from: a folder, a config or a model, checked before any rank builds a layer."""

from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from penstock.errors import ConfigError, described
from penstock.hugging_face.adapters import config_of
from penstock.hugging_face.undocumented import (
    checkpoints_gradients,
    class_of_config,
    copy_of_config,
    device_map_of,
    dtype_of_config,
    is_quantized,
    keep_in_float32,
    made_of_config,
    parameters_on_meta,
    state_names_of_class,
)
from penstock.hugging_face.undocumented_peft import CONFIG as ADAPTER
from penstock.models.cutting.points import saved_tensors

KEY = "source"
OLDEST = 5
"""The first major version whose decoder layers return a tensor."""
CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"
ADALORA = "peft.tuners.adalora"
LAYER_DROP = "layerdrop"


def transformers() -> Any:
    """Return the library. Raises: ConfigError, where it is missing or too old."""
    try:
        library = import_module("transformers")
    except ImportError as error:
        raise ConfigError(
            f'transformers cannot be imported ({error}); install it, as by pip install ".[transformers]" in '
            "Penstock's clone",
            key=KEY,
        ) from error
    if int(library.__version__.split(".")[0]) < OLDEST:
        raise ConfigError(f"transformers is {library.__version__}; expected {OLDEST} or later", key=KEY)
    return library


def folder_of(source: Any) -> Path | None:
    """Return the folder that a source names; None for a config. Raises: ConfigError.

    The name of a model on the hub, such as "Qwen/Qwen3-0.6B", stands for its folder in the cache of huggingface_hub.
    """
    if hasattr(source, "to_dict") and hasattr(source, "model_type"):
        return None
    if not isinstance(source, str | Path):
        raise ConfigError(f"a {type(source).__name__}; expected a folder, a config or a model of transformers", key=KEY)
    folder = Path(source) if Path(source).is_dir() else _cached_folder(str(source))
    if not (folder / CONFIG).is_file():
        raise ConfigError(f"{folder}: holds no {CONFIG}; give a folder that save_pretrained has written", key=KEY)
    return folder


def base_and_adapter(source: Any, adapter: Any) -> tuple[Any, Any]:
    """Return the model and the adapter that arguments mean: the folder of an adapter names its model itself.

    Raises: ConfigError.
    """
    if not isinstance(source, str | Path) or not Path(source, ADAPTER).is_file():
        return source, adapter
    if Path(source, CONFIG).is_file() and adapter is None:
        raise ConfigError(
            f"{source}: holds both a model ({CONFIG}) and an adapter ({ADAPTER}); pass the folder of the model, and "
            "adapter= this one, or put them into folders of their own",
            key=KEY,
        )
    if adapter is not None:
        return source, adapter
    base = config_of(source).base_model_name_or_path
    if not base:
        raise ConfigError(
            f"{source}: its {ADAPTER} names no model (base_model_name_or_path); pass the folder of the model as "
            "source, and this one as adapter=",
            key=KEY,
        )
    return base, source


def _cached_folder(name: str) -> Path:
    """Return where the cache holds a model of the hub. Nothing is downloaded: ranks of one host would do so at once."""
    transformers()  # without which the library of the hub may be missing too
    try:
        return Path(import_module("huggingface_hub").snapshot_download(name, local_files_only=True))
    except (OSError, ValueError) as error:  # it is not there, or the hub has no such names
        raise ConfigError(
            f"{name}: there is no such folder, nor a model of this name in the cache of huggingface_hub; give a folder "
            f"that save_pretrained has written, or download the model first, as by hf download {name}",
            key=KEY,
        ) from error


def on_meta(
    source: Any, folder: Path | None, dtype: torch.dtype | None = None, attn_implementation: str | None = None
) -> Any:
    """Return the transformers model with its generation config; its parameters take up no memory, being on meta.

    `source` is a config object if `folder` is None; otherwise the folder's config.json is read. The model is of the
    class that the config names, else a causal language model. No code of the folder is run, nothing is downloaded, and
    no weights are read.

    Raises:
        ConfigError: transformers makes no model of it, or none that a pipeline can run.
    """
    library = transformers()
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"{described(dtype)}; expected a floating-point torch.dtype, or None", key="dtype")
    config_words = "the config" if folder is None else str(folder / CONFIG)
    try:
        if folder is None:  # as a copy: which attention computes is a setting of the config object
            config = copy_of_config(source)
        else:
            config = library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        _refuse_quantized(config, config_words)
        settings: dict[str, Any] = {"dtype": dtype or dtype_of_config(config)}
        if attn_implementation is not None:
            settings["attn_implementation"] = attn_implementation
        with parameters_on_meta():
            model = made_of_config(library, config, **settings)
        if folder is not None:
            keep_in_float32(model)
        if folder is not None:
            model.name_or_path = str(source)  # as a hub calls it, which adapters say, and not its place in the cache
        if folder is not None and (folder / GENERATION_CONFIG).is_file():
            model.generation_config = library.GenerationConfig.from_pretrained(folder, local_files_only=True)
    except ConfigError:
        raise
    except Exception as error:  # transformers raises what it likes for a wrong config
        raise ConfigError(
            f"{config_words}: transformers makes no model of it: {str(error).rstrip('.')}. Expected a config whose "
            "architectures name a class of transformers, or one of a causal language model",
            key=KEY,
        ) from error
    return checked(model)


def checked(model: Any) -> Any:
    """Return `model` if a pipeline can run it: a model of transformers with settings that can be cut.

    Raises:
        ConfigError: it names what cannot be run, and what to do.
    """
    # An adapter around a model has all attributes of the model.
    if not isinstance(model, transformers().PreTrainedModel):
        raise ConfigError(
            f"a {type(model).__name__}; expected a model of transformers, without an adapter around it (of peft: "
            "adapted.base_model.model). ps.cut may cut it",
            key=KEY,
        )
    _refuse_quantized(model.config, type(model).__name__)
    if checkpoints_gradients(model):
        raise ConfigError(
            "gradient_checkpointing_enable() was called, but a pipeline has recompute=True for it, an option of its "
            "schedule; call gradient_checkpointing_disable()",
            key=KEY,
        )
    if device_map_of(model):
        raise ConfigError("the model has a device map, but each rank places its stages; load it without", key=KEY)
    _refuse_layer_drop(model)
    adaptive = [name for name, module in model.named_modules() if type(module).__module__.startswith(ADALORA)]
    if adaptive:
        raise ConfigError(
            f"{adaptive[0]!r} is of AdaLoRA, whose ranks and loss the wrapper around the model changes, which a "
            "pipeline does not run; take LoraConfig",
            key=KEY,
        )
    return model


def _refuse_layer_drop(model: Any) -> None:
    """Refuse a model that leaves out blocks at random. Raises: ConfigError."""
    rates = {name: getattr(module, LAYER_DROP) for name, module in model.named_modules() if hasattr(module, LAYER_DROP)}
    rates = rates or {"config": getattr(model.config, LAYER_DROP, 0)}
    for name, rate in rates.items():
        if rate:
            raise ConfigError(
                f"{name!r} has layerdrop={rate}: layer drop leaves out blocks at random, but each block of a pipeline "
                "runs in every microbatch. Make the model of a config with layerdrop (or encoder_layerdrop and "
                "decoder_layerdrop) of 0",
                key=KEY,
            )


def names_beside_class(model: Any) -> list[str]:
    """Return the names of a model's state that its class would not have: `from_pretrained` makes the class alone."""
    class_names = state_names_of_class(model)
    if class_names is None:  # a class of the user's own, which takes more than a config
        return []
    return [name for name in saved_tensors(model) if name not in class_names]


def _refuse_quantized(config: Any, where: str) -> None:
    """Refuse a config with quantized weights. Raises: ConfigError."""
    if is_quantized(config):
        raise ConfigError(
            f"{where}: its weights are quantized (quantization_config), and such are not trained; give the model that "
            "it was made from",
            key=KEY,
        )


def with_values(folder: str | Path, dtype: torch.dtype | None = None) -> Any:
    """Return the whole model of a folder with its weights, as transformers makes it. Raises: ConfigError."""
    library = transformers()
    path = folder_of(folder)
    settings: dict[str, Any] = {"trust_remote_code": False, "local_files_only": True}
    has_bar = library.logging.is_progress_bar_enabled()
    library.logging.disable_progress_bar()
    try:
        model_class = class_of_config(library, library.AutoConfig.from_pretrained(path, **settings))
        return model_class.from_pretrained(path, dtype=dtype or "auto", **settings)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{folder}: transformers cannot load the model: {error}", key=KEY) from error
    finally:
        if has_bar:
            library.logging.enable_progress_bar()
