"""A run's configuration: typed and frozen, from a TOML file with dotted overrides."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import tomlkit
from pydantic import ValidationError, model_validator
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

from penstock.errors import ConfigError, nearest
from penstock.train.settings.overrides import apply_overrides, read_toml
from penstock.train.settings.rules import Problem, config_error, problems_of
from penstock.train.settings.section import Section, meaning_of
from penstock.train.settings.sections import LISTED, NAMED, Sections, SourceSection
from penstock.train.settings.steps import BatchPlan

MAX_VALUE_CHARACTERS = 80
SYNONYMS = {
    "lr": "optimizer.learning_rate",
    "epochs": "run.steps",
    "seq_len": "batch.length",
    "sequence_length": "batch.length",
    "num_layers": "model.layers",
    "hidden_size": "model.width",
    "world_size": "pipeline.ranks",
    "micro_batch_size": "pipeline.microbatch_size",
    "data_parallel_size": "parallel.data",
    "gradient_accumulation_steps": "batch.accumulate",
    "max_grad_norm": "optimizer.clip_norm",
}
"""The key that a name of other programs means."""


class RunConfig(Sections):
    """Everything that decides what a run does.

    Raises:
        ConfigError: settings contradict each other (all contradictions at once).
        pydantic.ValidationError: a value of the wrong type, when built directly; `config_from_table` names the key.
    """

    @model_validator(mode="before")
    @classmethod
    def _take_the_tokenizer_of_transformers(cls, table: Any) -> Any:
        model, data = (table.get(key, {}) for key in ("model", "data")) if isinstance(table, dict) else ({}, {})
        folder = model.get("transformers") if isinstance(model, dict) else None
        if not isinstance(folder, str) or not folder or not isinstance(data, dict) or "tokenizer" in data:
            return table
        tokenizer_file = Path(folder, "tokenizer.json")
        return {**table, "data": {**data, "tokenizer": str(tokenizer_file)}} if tokenizer_file.is_file() else table

    @model_validator(mode="after")
    def _keep_the_rules(self) -> Self:
        if problems := problems_of(self):
            raise config_error(problems)
        if size := self.pipeline.microbatch_size:
            # The number of microbatches has one home, whichever of the two keys a run file sets.
            number = self.batch.size // self.parallel.data // size
            object.__setattr__(self, "pipeline", self.pipeline.model_copy(update={"microbatches": number}))
        return self

    @property
    def num_processes(self) -> int:
        """The ranks of all replicas."""
        return self.pipeline.ranks * self.parallel.data

    @property
    def max_length(self) -> int:
        """Longest sequence of the model, in tokens."""
        return self.model.length or self.batch.length

    @property
    def recorded_step(self) -> int:
        """The step, counted from 1, whose timeline is recorded; 0 where none is."""
        return min(self.run.record_step, self.run.steps)

    @property
    def batch_plan(self) -> BatchPlan:
        """Which batches each optimizer step adds up."""
        batch = self.batch
        sequences = batch.samples or batch.tokens // batch.length
        full = sequences // batch.size if sequences else batch.accumulate
        return BatchPlan(full, batch.ramp_from or full, batch.ramp_steps)


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML file, apply `section.key=value` overrides, and check everything.

    Raises:
        ConfigError: the file cannot be read, or settings are wrong (all of them in one message).
        FormatError: the file is not TOML; says line and column.
    """
    table = apply_overrides(read_toml(Path(path)), overrides)
    try:
        return config_from_table(table)
    except ConfigError as error:
        if not error.key:
            raise ConfigError(f"{path}: {error}") from error
        raise ConfigError(f"{error.problem} (in {path} and its overrides)", key=error.key) from error


def config_from_table(table: Mapping[str, object]) -> RunConfig:
    """Check nested tables of plain values. Raises: ConfigError, one for all settings that are wrong."""
    try:
        return RunConfig.model_validate(table)
    except ValidationError as error:
        raise config_error(_problems_of(error)) from error


def config_to_toml(config: RunConfig) -> str:
    """Return every setting with its meaning as a comment; `load_config` reads it back to an equal value.

    A key that another one decides is left out, for a file that sets both is refused.
    """
    document = tomlkit.document()
    for name, section in config:
        table = tomlkit.table()
        for key, value in section:
            if value is not None and not _follows(config, name, key):
                table.add(tomlkit.comment(meaning_of(type(section).model_fields[key])))
                table.add(key, _toml_value(value))
        document.add(name, table)
    return tomlkit.dumps(document)


def _follows(config: RunConfig, section: str, key: str) -> bool:
    """Whether another key decides what the value of this one is."""
    return (section, key) == ("pipeline", "microbatches") and config.pipeline.microbatch_size > 0


def _toml_value(value: Any) -> Any:
    """Return a value as the right side of `key = value`: tables within a section are inline ones."""
    if isinstance(value, tuple):
        return [_toml_value(item) for item in value]
    if not isinstance(value, (dict, Section)):
        return value
    table = tomlkit.inline_table()
    for key, inner in dict(value).items():
        table.add(key, _toml_value(inner))
    return table


def _problems_of(error: ValidationError) -> list[Problem]:
    # A union reports one error per member, all for the same key: the first speaks for them.
    text_by_key: dict[str, str] = {}
    for detail in error.errors(include_url=False):
        names, field = _resolve(detail["loc"])
        key = "".join(f"[{name}]" if isinstance(name, int) else f".{name}" for name in names).lstrip(".")
        text_by_key.setdefault(key, _describe(detail, names, field))
    return list(text_by_key.items())


def _resolve(location: tuple[int | str, ...]) -> tuple[tuple[int | str, ...], FieldInfo | None]:
    """Return the names that a user wrote, without pydantic's names of union members, and the field they mean."""
    names = tuple(name for name in location if name not in (NAMED, LISTED))
    if names[1:2] == ("sources",) and len(names) > 3:
        return names[:4], SourceSection.model_fields.get(str(names[3]))
    names = names[:3]
    fields = _fields_of(str(names[0]))
    return names, fields.get(str(names[1])) if len(names) > 1 else None


def _fields_of(section: str) -> dict[str, FieldInfo]:
    """Return the fields of a section by name; none for an unknown one."""
    field = RunConfig.model_fields.get(section)
    if field is None or not isinstance(field.annotation, type) or not issubclass(field.annotation, Section):
        return {}
    return field.annotation.model_fields


def _describe(detail: ErrorDetails, names: tuple[int | str, ...], field: FieldInfo | None) -> str:
    if detail["type"] == "extra_forbidden":
        return f"unknown key.{_known_keys(names)}"
    meaning = f" ({meaning_of(field)})" if field else ""
    if detail["type"] == "missing":
        return f"is missing{meaning}; set it"
    expected = _expected(detail, names)
    value = detail["input"]
    shown = repr(value)
    if len(shown) > MAX_VALUE_CHARACTERS:
        shown = shown[:MAX_VALUE_CHARACTERS] + "..."
    hint = nearest(value, _choices(detail)) if isinstance(value, str) else ""
    return f"got {shown}, expected {expected}{meaning}" + (f".{hint}" if hint else "")


def _expected(detail: ErrorDetails, names: tuple[int | str, ...]) -> str:
    """Return in TOML's words what pydantic expected."""
    if names[1:2] == ("options",) and len(names) == 3:
        return "a string, a number, true or false"
    match detail["type"]:
        case "model_type" | "dict_type":
            return "a table of settings"
        case "tuple_type":
            return "a list, such as ['a.txt', 'b.txt']" if names[-1] == "files" else "a list"
        case _:
            return detail["msg"].removeprefix("Input should be ").removeprefix("Input should have ")


def _choices(detail: ErrorDetails) -> list[str]:
    """Return the quoted words of pydantic's list of allowed values."""
    if detail["type"] != "literal_error":
        return []
    return str(detail.get("ctx", {}).get("expected", "")).split("'")[1::2]


def _known_keys(names: tuple[int | str, ...]) -> str:
    """Return a hint on an unknown key: a near neighbour, the same name elsewhere, or all neighbours."""
    leaf = str(names[-1])
    if len(names) > 3:
        return nearest(leaf, SourceSection.model_fields) or f" Known here: {', '.join(SourceSection.model_fields)}."
    keys = {section: list(_fields_of(section)) for section in RunConfig.model_fields}
    dotted_keys = [f"{section}.{key}" for section, section_keys in keys.items() for key in section_keys]
    matching_keys = [key for key in dotted_keys if key.replace(".", "") == leaf.replace("_", "").lower()]
    matching_keys += [SYNONYMS[leaf]] if leaf in SYNONYMS else []
    if matching_keys:
        return f" Did you mean {' or '.join(repr(key) for key in matching_keys)}?"
    siblings = list(keys) if len(names) == 1 else keys[str(names[0])]
    elsewhere = [f"{section}.{leaf}" for section, section_keys in keys.items() if leaf in section_keys]
    if elsewhere:
        return f" Did you mean {' or '.join(repr(key) for key in elsewhere)}?"
    prefix = "" if len(names) == 1 else f"{names[0]}."
    near = nearest(leaf, siblings)
    if near and prefix:
        return near.replace(" '", f" '{prefix}")
    return near or f" Known here: {', '.join(siblings)}."
