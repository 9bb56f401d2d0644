"""The rule that splits a run's model; where it is measured seconds, they stay in the run folder.

They are measured once for a model, a microbatch and a kind of device. So a run that goes on, a profile of it and the
next run in the folder are split alike, although no two measurements are equal.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from penstock.errors import FormatError, PenstockError
from penstock.execute.batch.cutting import BatchRule
from penstock.execute.control.collectives import Control
from penstock.execute.transport.protocol import Transport
from penstock.models import LayerSpec
from penstock.show.text import format_seconds
from penstock.train.data.batches import Batch, Wants
from penstock.train.data.user_data import Dataset
from penstock.train.devices import device_of_rank
from penstock.train.folder.run_folder import LAYER_TIMES, RunFolder
from penstock.train.measuring.measure import LayerTimes, measure_layers
from penstock.train.model_source import loss_of
from penstock.train.optimizing.precision import Precision
from penstock.train.settings.config import RunConfig
from penstock.train.settings.section import Section
from penstock.train.together import same_words

Seconds = list[Annotated[float, Field(ge=0)]]


@dataclass(frozen=True, slots=True)
class SplitRule:
    """How `Pipeline` is to split the layers, the same on every rank."""

    split: tuple[int, ...] | None = None
    """Layers per stage, where the run file lists them."""
    weights: tuple[float, ...] | None = None
    """Relative cost per layer; None where the layers declare it."""
    note: str = ""
    """A line that says where measured weights come from."""


class Subject(Section):
    """The subject of a measurement; the split of another one needs times of its own."""

    model: dict[str, Any]
    """The `[model]` section of the configuration."""
    vocabulary: int
    microbatch: Annotated[list[int], Field(min_length=2, max_length=2)]
    """The sequences of a microbatch, and the tokens of each."""
    device: str
    """The kind of device, such as cpu or cuda."""


class StoredTimes(Section):
    """The measured seconds of each layer, as they lie in the run folder."""

    format: Literal["penstock-layer-times"] = "penstock-layer-times"
    version: Literal[1] = 1
    of: Subject
    names: list[str]
    forward_s: Seconds
    backward_s: Seconds

    @model_validator(mode="after")
    def _has_all_of_each_layer(self) -> Self:
        counts = [len(self.names), len(self.forward_s), len(self.backward_s)]
        if len(set(counts)) > 1:
            raise ValueError(f"names, forward_s and backward_s have {counts} entries, which should be equal")
        return self


def choose_split(
    config: RunConfig, layers: Sequence[LayerSpec], dataset: Dataset, folder: RunFolder, transport: Transport
) -> SplitRule:
    """Return how layers are split over stages, as `pipeline.split` says; every rank calls it, and all get the same.

    `declared` goes by the weights that layers declare, `even` by equal weights, `measured` by times that rank 0
    measures or has kept in the run's folder; else the setting lists layers per stage.

    Raises:
        FormatError, PenstockError: on every rank, if kept times cannot be read, or new ones not be written.
        PipelineError: on the other ranks, if rank 0 could not measure.
    """
    match config.pipeline.split:
        case "declared":
            return SplitRule()
        case "even":
            return SplitRule(weights=(1.0,) * len(layers))
        case "measured":
            times, is_kept = times_of_layers(config, layers, dataset, folder, transport)
        case sizes:
            return SplitRule(split=sizes)
    # New times are kept, so that a run that continues has the same split.
    path = folder.path / LAYER_TIMES
    note = f"split by what layers take of a microbatch, {format_seconds(sum(times.weights))} in all"
    if is_kept:
        note += f" when they were measured: {path}; delete it to measure anew"
        return SplitRule(weights=times.weights, note=note)
    seconds_by_name: dict[str, Any] = {name: list(values) for name, values in asdict(times).items()}
    content = StoredTimes(of=_subject(config, dataset), **seconds_by_name).model_dump_json(indent=2).encode()
    Control(transport).on_rank_0(lambda: folder.write(LAYER_TIMES, content), same_words)
    return SplitRule(weights=times.weights, note=f"{note}, measured now: {path}")


def times_of_layers(
    config: RunConfig, layers: Sequence[LayerSpec], dataset: Dataset, folder: RunFolder, transport: Transport
) -> tuple[LayerTimes, bool]:
    """Return what each layer takes of a microbatch, and whether it was kept for the split or measured now.

    A collective.

    Raises:
        FormatError, PenstockError: on every rank, if kept times cannot be read.
        PipelineError: on the other ranks, if rank 0 could not measure.
    """
    stored_times = _stored_times(folder.path / LAYER_TIMES, _subject(config, dataset), transport)
    if stored_times is not None:
        return stored_times, True
    microbatch = _first_microbatch(config, dataset)
    device, loss = device_of_rank(config), loss_of(config, dataset.vocabulary)
    with Precision(config.precision).region(device):
        times = measure_layers(
            layers, microbatch.args, target=microbatch.target, loss=loss, transport=transport, device=device
        )
    return times, False


def _subject(config: RunConfig, dataset: Dataset) -> Subject:
    model = config.model.model_dump(exclude={"verify"})
    if config.precision.compute != "model":  # else the model's own type is computed in
        model |= config.precision.model_dump(include={"compute", "autocast"})
    return Subject(
        model=model,
        vocabulary=dataset.vocabulary,
        microbatch=list(_first_microbatch(config, dataset).args[0].shape),
        device=device_of_rank(config).type,
    )


def _first_microbatch(config: RunConfig, dataset: Dataset) -> Batch:
    batch = dataset.batch(0, Wants(num_replicas=config.parallel.data))
    rule = BatchRule(config.pipeline.microbatches, allow_ragged=config.batch.allow_ragged)
    first = rule.microbatches(batch.args, batch.kwargs, batch.target)[0]
    return Batch(*first.args, target=first.target, **first.kwargs)


def _stored_times(path: Path, subject: Subject, transport: Transport) -> LayerTimes | None:
    """Return the times in rank 0's folder if they were measured of the same subject; a collective."""

    def look() -> str:
        stored_times = _read(path)
        return stored_times.model_dump_json() if stored_times is not None and stored_times.of == subject else ""

    text = Control(transport).on_rank_0(look, same_words)
    if not text:
        return None
    stored_times = StoredTimes.model_validate_json(text)
    return LayerTimes(tuple(stored_times.names), tuple(stored_times.forward_s), tuple(stored_times.backward_s))


def _read(path: Path) -> StoredTimes | None:
    if not path.exists():
        return None
    try:
        return StoredTimes.model_validate_json(path.read_bytes())
    except OSError as error:
        raise PenstockError(
            f"{path}: cannot be read: {error.strerror}. See to its permissions, or delete it to measure the layers anew"
        ) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "$"
        raise FormatError(f"{place}: {first['msg']}; delete it to measure the layers anew", file=str(path)) from None
