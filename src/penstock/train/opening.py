"""The first lines of a run: where it computes, what is trained on how much text, and how the model is split."""

from collections.abc import Iterator, Sequence

from penstock.errors import count_of
from penstock.models import LayerSpec, count_parameters
from penstock.pipeline import Pipeline
from penstock.planning import few_microbatches
from penstock.tables import Screen
from penstock.train.devices import describe_devices, device_of_rank
from penstock.train.optimizing.precision import Precision, note_on_speed
from penstock.train.settings.config import RunConfig
from penstock.train.settings.optional_packages import describe_missing_pictures


def device_line(config: RunConfig) -> str:
    """Say where a run computes, and in which types. Raises: ConfigError; see `device_of_rank`."""
    precision = Precision(config.precision).describe(config.model)
    return describe_devices(device_of_rank(config), config.num_processes, precision)


def opening_lines(
    config: RunConfig,
    layers: Sequence[LayerSpec],
    num_tokens: int | None,
    pipeline: Pipeline,
    note: str,
    screen: Screen,
) -> Iterator[str]:
    """Yield what is said when the pipeline is made; `note` says where its split comes from, if there is one."""
    yield screen.wrapped(_summary(config, count_parameters(layers), num_tokens))
    yield pipeline.describe_split(width=screen.width).removesuffix("\n")
    if note:
        yield screen.wrapped(note)
    slow_type = note_on_speed(Precision(config.precision), pipeline.device)
    for advice in filter(None, (few_microbatches(pipeline.program), slow_type)):
        yield screen.wrapped(f"note: {advice}")
    missing = describe_missing_pictures(config)
    if missing:
        yield screen.wrapped(missing)


def _summary(config: RunConfig, num_parameters: int, num_tokens: int | None) -> str:
    pipeline, data = config.pipeline, config.parallel.data
    replicas = f"{data} replicas of " if data > 1 else ""
    ranks = f"{replicas}{count_of(pipeline.ranks, 'rank')}"
    tokens = f"data of {config.data.source}" if num_tokens is None else f"{num_tokens:,} tokens to train on"
    return (
        f"{num_parameters:,} parameters, {tokens}, "
        f"{pipeline.schedule} on {ranks}, "
        f"{pipeline.microbatches} microbatches, {config.run.steps} steps"
    )
