"""The weights of a pipeline for processes that generate with them, such as vLLM: names, and then tensor by tensor.

    every rank      metadata()    name, type, full shape and owner of each tensor, as `save_pretrained` has them
    owner           for name, tensor in source: ...      the tensors that it owns, in the order of the metadata
    other replicas  the same loop: it brings nothing, and sends the owner this replica's rows

Owners are the ranks of the first replica. So a loop waits for the ranks that hold the same stages alone, and owners may
send one after another, in any order. That is vLLM's protocol for several sources: one communicator, and one
`update_weights` per owner within one start and finish.

Guarantees: beside the weights, a rank holds the tensors of one unit (`ConversionUnit`); replicas gather the units in
one order, and say which one comes; where an owner leaves its loop early, its replicas are told. Relies on: weights stay
as they are meanwhile.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from weakref import WeakSet

import torch
from torch import Tensor

from penstock.checkpoints.agreement import STALLED_AFTER_S, failing_as
from penstock.checkpoints.content import Content, DtypeAndShape, gather_content, owned_names
from penstock.checkpoints.local_tensors import LocalTensor
from penstock.checkpoints.row_exchange import exchange_rows
from penstock.checkpoints.shards import DTYPES
from penstock.checkpoints.weight_format import ConversionUnit, WeightFormat
from penstock.checkpoints.weight_units import units_by_rank
from penstock.errors import NotSaved, PenstockError, PipelineError
from penstock.execute.control.collectives import Control
from penstock.execute.transport.calls import collective
from penstock.execute.transport.places import Places
from penstock.hugging_face.pretrained_out import PretrainedFormat
from penstock.models.cutting.points import saved_tensors
from penstock.pipeline import Pipeline

_LOOPED: WeakSet[Pipeline] = WeakSet()
"""The pipelines whose shards a loop gathers that has not ended."""
LOOP = "the loop over a weight_source"
"""The call that ranks are in while they gather shards, as messages name it."""


@dataclass(frozen=True, slots=True)
class ParamMeta:
    """One tensor that a `WeightSource` brings; the fields are those of vLLM's class of this name."""

    name: str
    """Name in the files of the model."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    """Shape of the whole tensor."""
    owners: tuple[int, ...]
    """Numbers of the ranks that bring the tensor; there is one."""


class WeightSource:
    """The weights of a pipeline of a transformers model, as files of `save_pretrained` have them.

    Every rank loops over it, as often as it likes. A loop yields (name, tensor) of this rank's own tensors, in the
    order of the metadata. A tensor may share the memory of a weight, so copy or send it before the next step. Where
    replicas share out weights (`shard`), a loop gathers them, and the replicas of a stage loop together.
    """

    def __init__(self, pipeline: Pipeline, format: WeightFormat, units: Sequence[Sequence[ConversionUnit]]) -> None:
        """`units` are those of each rank of the first replica."""
        self._pipeline, self._format = pipeline, format
        self._places = pipeline.control.places
        self._units = units[self._places.pipeline.rank]
        self._types = _types_by_name(pipeline)
        self.rank = pipeline.control.names.numbers[pipeline.control.rank]
        """The number of this rank, as `ParamMeta.owners` has it."""
        numbers = pipeline.control.names.numbers
        self._metadata = [
            ParamMeta(name, DTYPES[dtype], tuple(shape), (numbers[index],))
            for index, rank_units in enumerate(units)
            for unit in rank_units
            for name, (dtype, shape) in unit["file_types"].items()
        ]

    def metadata(self) -> list[ParamMeta]:
        """Return what all ranks bring, the same on every rank: one owner after another."""
        return list(self._metadata)

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's tensors by name, whole and contiguous, on the device of the pipeline.

        Raises:
            PipelineError: the pipeline has other weights than when the source was made; the owner has left its loop
                early, as where a receiver is lost; a replica is lost.
        """
        weights = self._current_weights()
        gathers = any(weights[name].rows is not None for unit in self._units for name in unit["names"])
        with self._as_only_loop() if gathers else nullcontext():
            for unit in self._units:
                yield from self._brought(unit, weights, gathers=gathers)

    def _brought(
        self, unit: ConversionUnit, weights: Mapping[str, LocalTensor], *, gathers: bool
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of a unit on its owner; send this replica's rows on other replicas."""
        if gathers:
            _agree_to_go_on(self._pipeline.control, unit)
        tensors = self._whole_tensors(unit, weights)
        if self._places.replica == 0:
            with self._telling_replicas(unit) if gathers else nullcontext():
                yield from self._converted(unit, tensors)

    @contextmanager
    def _as_only_loop(self) -> Iterator[None]:
        """Refuse a loop within another one: on other replicas, which bring nothing, loops follow one another."""
        if self._pipeline in _LOOPED:
            raise PipelineError(
                f"{self._places.name}: a loop over a weight_source begins before an earlier one has ended, as by zip() "
                "of two, or by next() of one. Replicas send their rows for one loop after another; end or close() the "
                "earlier one first",
                rank=self.rank,
            )
        _LOOPED.add(self._pipeline)
        try:
            yield
        finally:
            _LOOPED.discard(self._pipeline)

    def _current_weights(self) -> dict[str, LocalTensor]:
        """Return this rank's weights as they lie now. Raises: PipelineError, if they are others than at first."""
        if _types_by_name(self._pipeline) != self._types:
            raise PipelineError(
                f"{self._places.name}: the pipeline has weights of other names, types or shapes than when this "
                "weight_source was made; make a new one with model.weight_source(pipeline)",
                rank=self.rank,
            )
        return Content.of(self._pipeline, None).weights

    def _whole_tensors(self, unit: ConversionUnit, weights: Mapping[str, LocalTensor]) -> dict[str, Tensor]:
        """Return the tensors of a unit on its owner; on other replicas nothing, after this replica's rows are sent."""
        tensors = {name: weights[name] for name in unit["names"]}
        return {name: self._whole_tensor(tensor) for name, tensor in tensors.items()}

    def _whole_tensor(self, tensor: LocalTensor) -> Tensor:
        if tensor.rows is None or self._places.data is None:
            return tensor.local
        # One tensor at a time: its rows then arrive in their place, without a buffer beside it.
        is_owner = self._places.replica == 0
        target = tensor.local.new_empty(tensor.shape if is_owner else 0)
        if is_owner:
            tensor.place_in(target).copy_(tensor.local)
        rows_by_replica = [[tensor], *([] for _ in range(1, self._places.num_replicas))]
        exchange_rows(self._places.data, rows_by_replica, [target] if is_owner else [], self._pipeline.device)
        return target

    def _converted(self, unit: ConversionUnit, tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Yield the tensors of files that a unit becomes; each is free as soon as it is not used any more."""
        file_tensors = dict(self._format.convert(tensors))
        tensors.clear()
        for name in unit["file_types"]:
            yield name, file_tensors.pop(name).contiguous()

    @contextmanager
    def _telling_replicas(self, unit: ConversionUnit) -> Iterator[None]:
        """Tell the replicas, which wait for the next unit, if the block is left early.

        A `for` loop that ends by `break` or an error closes the generator, which raises GeneratorExit where it yields.
        """
        try:
            yield
        except BaseException:
            # What is wrong with the replicas is found by the next call; the error at hand says more.
            with suppress(PenstockError):
                name = unit["names"][0]
                _exchange_states(self._pipeline.control, name, f"{self._places.name} has left it at {name!r}")
            raise


@collective
def weight_source(pipeline: Pipeline, format: PretrainedFormat) -> WeightSource:
    """Return the weights of a pipeline as a source for processes that receive them; every rank calls it.

    `format` says the names, types and shapes of the tensors.

    Raises:
        NotSaved: on every rank: the pipeline is of another model, or the model has more than its class.
        PipelineError: a rank is lost.
    """
    control = pipeline.control
    control.on_rank_0(lambda: format.require_savable(Path("weight_source")), failing_as(NotSaved))
    _, descriptions, _ = gather_content(pipeline, None)
    num_owners = control.places.pipeline.num_ranks
    nothing: list[frozenset[str]] = [frozenset()] * (len(descriptions) - num_owners)
    owned = [*owned_names(descriptions[:num_owners]), *nothing]
    units = units_by_rank(pipeline, format, descriptions, owned)[:num_owners]
    # In the order of the model, in which the tensors of a block lie side by side.
    places = {name: place for place, name in enumerate(saved_tensors(format.model))}

    def place_of(unit: ConversionUnit) -> int:
        return min(places[name] for name in format.model_names(unit["names"]))

    ordered = [sorted(rank_units, key=place_of) for rank_units in units]
    return WeightSource(pipeline, format, ordered)


def _types_by_name(pipeline: Pipeline) -> Mapping[str, DtypeAndShape]:
    return Content.of(pipeline, None).description()["weights"]


def _agree_to_go_on(control: Control, unit: ConversionUnit) -> None:
    """Begin to gather a unit, together with the replicas.

    Raises:
        PipelineError: the owner has left its loop, or a replica has come to another unit.
    """
    name = unit["names"][0]
    states = _exchange_states(control, name)
    here = control.names[control.rank]
    _, reason = states[0]
    if reason:
        raise PipelineError(
            f"{here}: {LOOP} waits for {name!r}, but {reason}, so that receivers hold weights of two steps. Let every "
            "rank loop over the source again, to its end",
            rank=control.names.numbers[control.places.across[0]],
        )
    other = next((index for index, (other_name, _) in enumerate(states) if other_name != name), None)
    if other is not None:
        rank = control.places.across[other]
        raise PipelineError(
            f"{here}: {LOOP} has come to {name!r}, but {control.names[rank]} to {states[other][0]!r}. Replicas send "
            "their rows in one order: end one loop before the next one begins, on every rank",
            rank=control.names.numbers[rank],
        )


def _exchange_states(control: Control, name: str, reason: str = "") -> list[tuple[str, str]]:
    """Return where the ranks that hold the same stages are in their loops, one per replica, as they say it.

    `name` is the first one of the unit that comes; `reason` says why this rank has left its loop, if it has.

    A replica waits for the owner as long as its receivers may take, and the owner for replicas within the deadline.
    """
    places: Places = control.places
    limit_s = control.limit_s if places.replica == 0 else STALLED_AFTER_S
    with control.calls.entering(LOOP, pipeline=control.pipeline_number):
        states = Control(places.pipeline, limit_s=limit_s, places=places).across([name, reason])
    return [(state_name, state_reason) for state_name, state_reason in states]
