"""Optional packages that a run file asks for: each is looked up before any process starts.

A package that is missed only where it is first used ends a run at its first save, or after its last step.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any

from penstock.errors import ConfigError
from penstock.train.settings.config import RunConfig
from penstock.train.settings.rules import config_error


@dataclass(frozen=True, slots=True)
class OptionalPackage:
    """A package that only some settings need."""

    name: str
    key: str
    """The setting that asks for it."""
    is_needed: Callable[[RunConfig], bool]
    alternative: str
    """The setting that does without it."""
    other_module: str = ""
    """The module to import, where it is not the one of the package's name."""
    other_extra: str = ""
    """The extra that installs it, where it has another name."""

    @property
    def module(self) -> str:
        """The module that is imported."""
        return self.other_module or self.name

    @property
    def extra(self) -> str:
        """The extra of Penstock that installs it."""
        return self.other_extra or self.name

    def problem(self) -> str:
        """Say why it cannot be imported, and how to install it; empty where it can."""
        try:
            import_module(self.module)
        except ImportError as error:
            install = f"pip install '.[{self.extra}]' in Penstock's clone"
            return f"needs the {self.name} package ({error}): {install}, or {self.alternative}"
        return ""

    def load(self) -> Any:
        """Return the module. Raises: ConfigError, as `problem` says."""
        if problem := self.problem():
            raise ConfigError(problem, key=self.key)
        return import_module(self.module)


TENSORBOARD = OptionalPackage(
    "tensorboard",
    "metrics.tensorboard",
    lambda config: config.metrics.tensorboard,
    "set metrics.tensorboard = false",
    other_module="torch.utils.tensorboard",
)
WANDB = OptionalPackage(
    "wandb", "metrics.wandb", lambda config: config.metrics.wandb != "off", "set metrics.wandb = 'off'"
)
TOKENIZERS = OptionalPackage(
    "tokenizers", "data.tokenizer", lambda config: config.data.tokenizer != "bytes", "set data.tokenizer = 'bytes'"
)
TRANSFORMERS = OptionalPackage(
    "transformers",
    "model.transformers",
    lambda config: bool(config.model.transformers),
    "leave it out to train the decoder",
)
PEFT = OptionalPackage(
    "peft", "adapter.kind", lambda config: config.adapter.is_used, "leave [adapter] out to train the model itself"
)
DATASETS = OptionalPackage(
    "datasets",
    "data.corpus",
    lambda config: any(source.corpus == "datasets" for source in config.data.all_sources),
    "save the texts as files",
)
CHAT_TEMPLATES = OptionalPackage(
    "transformers", "data.corpus", lambda config: config.data.has_chats, "write the conversations as texts"
)
OPTIONAL_PACKAGES = (TENSORBOARD, WANDB, TOKENIZERS, TRANSFORMERS, PEFT, DATASETS, CHAT_TEMPLATES)
"""A setting that needs another package has an entry here."""
PICTURES = OptionalPackage(
    "matplotlib",
    "run.record_step",
    lambda config: config.recorded_step > 0,
    "set run.record_step = 0",
    other_module="matplotlib.figure",
    other_extra="plot",
)
"""No run needs it: without it, one has no picture of its recorded step."""
PARQUET = OptionalPackage(
    "pyarrow",
    "data.files",
    lambda config: False,
    "save the chats as JSONL",
    other_module="pyarrow.parquet",
    other_extra="datasets",
)
"""Which files there are is known only when they are looked for."""


def require_packages(config: RunConfig) -> None:
    """Refuse a run that asks for packages which cannot be imported. Raises: ConfigError, for all of them at once."""
    needed_packages = [package for package in OPTIONAL_PACKAGES if package.is_needed(config)]
    problems = [(package.key, problem) for package in needed_packages if (problem := package.problem())]
    if problems:
        raise config_error(problems)


def describe_missing_pictures(config: RunConfig) -> str:
    """Say that a run will have no picture, where that is so."""
    problem = PICTURES.problem() if PICTURES.is_needed(config) else ""
    return f"note: there will be no picture of step {config.recorded_step}: {problem}" if problem else ""
