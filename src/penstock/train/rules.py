"""Rules between the keys of a configuration, which no single field can know."""

from collections.abc import Iterator
from dataclasses import dataclass

from penstock.errors import ConfigError
from penstock.train.sections import (
    BatchSection,
    DataSection,
    ModelSection,
    PipelineSection,
    RunSection,
)


@dataclass(frozen=True, slots=True)
class Problem:
    """One setting that cannot be used: its dotted key and what is wrong with it."""

    key: str
    text: str


def config_error(problems: list[Problem]) -> ConfigError:
    """Return one error that lists every problem; its `key` is set where there is only one."""
    if len(problems) == 1:
        return ConfigError(problems[0].text, key=problems[0].key)
    lines = [f"  {problem.key}: {problem.text}" for problem in problems]
    return ConfigError("\n".join([f"{len(problems)} settings cannot be used:", *lines]))


def batch_problems(batch: BatchSection, pipeline: PipelineSection) -> Iterator[Problem]:
    if batch.size < pipeline.microbatches:
        yield Problem(
            "batch.size",
            f"{batch.size} sequences cannot fill pipeline.microbatches = {pipeline.microbatches}; "
            "use at least one sequence per microbatch",
        )
    elif batch.size % pipeline.microbatches and not batch.allow_ragged:
        smaller = batch.size - batch.size % pipeline.microbatches
        yield Problem(
            "batch.size",
            f"{batch.size} is not a multiple of pipeline.microbatches = {pipeline.microbatches}; "
            f"use {smaller} or {smaller + pipeline.microbatches}, or set batch.allow_ragged = true",
        )


def pipeline_problems(pipeline: PipelineSection) -> Iterator[Problem]:
    if pipeline.split == ():
        yield Problem("pipeline.split", "the list is empty; give the layers of each stage, or drop the key")


def model_problems(model: ModelSection, batch: BatchSection) -> Iterator[Problem]:
    yield from (Problem(key, text) for key, text in model.problems("model."))
    if 0 < model.length < batch.length:
        yield Problem("batch.length", f"{batch.length} tokens are more than model.length = {model.length}")


def data_problems(data: DataSection, model: ModelSection, run: RunSection) -> Iterator[Problem]:
    if data.corpus == "files" and not data.files:
        yield Problem("data.files", "no file or folder is named; name some, or set data.corpus = 'stdlib'")
    if data.corpus == "stdlib" and data.files:
        yield Problem("data.files", "files are named although data.corpus = 'stdlib'; drop one of the two")
    if not data.suffixes:
        yield Problem("data.suffixes", "the list is empty; name at least one ending, as in ['.txt']")
    if data.tokenizer == "bytes" and 0 < model.vocabulary < 256:
        yield Problem("model.vocabulary", f"{model.vocabulary} is too small for bytes; use 0, or 256 and more")
    if run.evaluate_batches and data.held_out_fraction == 0:
        yield Problem(
            "data.held_out_fraction",
            "0 leaves nothing to evaluate on; use more than 0, or set run.evaluate_batches = 0",
        )
