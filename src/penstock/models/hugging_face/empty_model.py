"""The transformers model that a folder describes, without values: names, shapes and configuration."""

from pathlib import Path
from typing import Any

import torch

from penstock.errors import ConfigError

CONFIG = "config.json"
GENERATION_CONFIG = "generation_config.json"


def empty_model(folder: Path) -> Any:
    """Return the causal language model of a folder's config.json on the meta device, and its generation config.

    No code of the folder is run, nothing is downloaded and no weights are read.

    Raises: ConfigError: transformers is not installed, or it knows no such model; or the folder has no config.json.
    """
    if not (folder / CONFIG).is_file():
        what = f"{folder} holds no {CONFIG}" if folder.is_dir() else f"{folder}: there is no such folder"
        raise ConfigError(f"{what}; expected a folder that `save_pretrained` of transformers wrote")
    try:
        from transformers import AutoConfig, AutoModelForCausalLM, GenerationConfig
    except ImportError as error:
        raise ConfigError(
            f"{folder} needs the transformers package: pip install '.[transformers]' in Penstock's clone"
        ) from error
    make: Any = AutoModelForCausalLM
    try:
        config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        with torch.device("meta"):
            model = make.from_config(config, trust_remote_code=False)
        if (folder / GENERATION_CONFIG).is_file():
            model.generation_config = GenerationConfig.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises what it likes for a wrong config
        raise ConfigError(
            f"{folder / CONFIG}: transformers makes no causal language model of it: {error}. Use a model that "
            "AutoModelForCausalLM knows"
        ) from error
    return model
