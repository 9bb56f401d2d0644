"""Counts bytes by storage, as a step runs: what autograd keeps of forwards, and what each layer makes and keeps."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakValueDictionary, finalize

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.optim import Optimizer

from penstock.execute.batch.input_graphs import nodes_behind
from penstock.execute.control.collectives import Control
from penstock.execute.observing.held_tensors import held_by
from penstock.execute.observing.workspaces import Meter, Workspaces
from penstock.execute.parameters.gradient_store import MAIN_GRAD, WeightInputs
from penstock.execute.stages.stage import Stage
from penstock.execute.transport.protocol import Transport
from penstock.execute.undocumented import address_of, is_function, repeats
from penstock.execute.values.tensors import local_part
from penstock.execute.values.tree import tensors_of

WORKSPACES = FORWARD_WORKSPACE, BACKWARD_WORKSPACE = "forward_workspace_bytes", "backward_workspace_bytes"
ACTIVATION, CONTEXT, CHECKPOINT, MESSAGE, PARAMETER, GRADIENT, OPTIMIZER, *_ = FIELDS = (
    "activation_bytes", "weight_context_bytes", "checkpoint_bytes", "message_bytes",
    "parameter_bytes", "gradient_bytes", "optimizer_bytes", *WORKSPACES,
)  # fmt: skip
"""Named as those of `LayerCosts`."""

Attempt = Callable[..., object]
"""Makes a call within a pass, and keeps its errors from the layers."""
LayerBytes = Mapping[str, tuple[int, ...]]
"""By field, one entry per layer of the model."""


class LayerSizes:
    """Measures the layers of one rank; of several microbatches the largest counts, and a storage counts once."""

    def __init__(self, stages: Sequence[Stage], meter: Meter, *, is_sharded: bool) -> None:
        """With `is_sharded`, sizes of DTensors are those of the whole tensors."""
        self._is_sharded = is_sharded
        notes = (partial(self._grow, field=field) for field in WORKSPACES)
        self._workspaces = Workspaces(meter, *notes)
        of_stages = [enumerate(stage.layers.values(), stage.first_layer) for stage in stages]
        self._layers = {layer: module for numbered_layers in of_stages for layer, module in numbered_layers}
        self._bytes_by_layer = {layer: dict.fromkeys(FIELDS, 0) for layer in self._layers}
        modules = {id(module): layer for layer, root in self._layers.items() for module in root.modules()}
        self._layer_of = modules | self._layers_of_parameters()
        """The layer of a module by the module's id, and the first layer that has a parameter by the parameter's id."""
        self._ignored_addresses = set(storages([[*module.buffers()] for module in self._layers.values()]))
        """Addresses of storages that no forward makes: those of buffers and of the batch."""
        self._layer = min(self._layers)
        self._saved_bytes: Counter[int] = Counter()
        """Bytes that the forward which runs now has saved, by layer."""
        self._gradient_bytes_of_inputs: dict[int, int] = {}
        """Bytes of the gradients of a layer's inputs, by layer."""

    @contextmanager
    def watching(
        self, stage: Stage, attempt: Attempt, note_outputs: Callable[[Any], object], *, has_workspace: bool
    ) -> Iterator[None]:
        """Note which layer runs in a stage's forward, and the sizes of its inputs and outputs.

        `attempt` keeps errors from the layers, and `note_outputs` gets the outputs of each layer before the next one
        runs. Without `has_workspace`, nobody asks what the layers take and give back.
        """
        self._saved_bytes.clear()
        begin = partial(self._begin, attempt if has_workspace else None)
        layers_by_module: defaultdict[nn.Module, list[int]] = defaultdict(list)
        for layer, module in enumerate(stage.layers.values(), stage.first_layer):
            layers_by_module[module].append(layer)
        with ExitStack() as stack:
            for module, layers in layers_by_module.items():
                # torch.compile would take hooks into the code of a layer, which knows no bytes. A module that is
                # several layers runs once for each of them, in order.
                enter = torch.compiler.disable(partial(attempt, begin, iter(layers)))  # type: ignore[no-untyped-call]
                leave = torch.compiler.disable(  # type: ignore[no-untyped-call]
                    partial(attempt, self._end, note_outputs)
                )
                pre_hook = module.register_forward_pre_hook(enter, with_kwargs=True)
                forward_hook = module.register_forward_hook(leave)
                stack.callback(pre_hook.remove)
                stack.callback(forward_hook.remove)
            if has_workspace:
                stack.enter_context(self._workspaces.forward(stage.first_layer, attempt))
            yield

    def watching_backward(self, stage: Stage, attempt: Attempt) -> AbstractContextManager[None]:
        """Return a context that measures what the layers of a stage take in a B or I."""
        last_layer = stage.first_layer + len(stage.layers) - 1
        input_bytes = self._gradient_bytes_of_inputs.get(stage.first_layer, 0)
        return self._workspaces.backward(last_layer, input_bytes, _gradients_of_stage(stage), attempt)

    def watching_weights(self, stage: Stage, inputs: Any, attempt: Attempt) -> AbstractContextManager[None]:
        """Return a context that measures a W, from what its I has left.

        It computes the gradients of several small weights at once, and one of a large weight, so that all it takes
        counts in the layer of the largest.
        """
        entries = inputs.entries if isinstance(inputs, WeightInputs) else ()
        params = [param for entry in entries for param in entry.parameters if id(param) in self._layer_of]
        largest = max(params, key=lambda param: param.nbytes, default=None)
        layer = stage.first_layer if largest is None else self._layer_of[id(largest)]
        return self._workspaces.backward(layer, 0, _gradients_of_stage(stage), attempt)

    def note_saved(self, tensor: Tensor) -> None:
        """Count a tensor whose storage no one had saved yet."""
        part = local_part(tensor)
        storage = part.untyped_storage()
        if address_of(storage) in self._ignored_addresses:
            return
        # A part of the target is saved as a view of the whole batch, which does not belong to one microbatch.
        is_outside = part.is_leaf and not part.requires_grad
        num_bytes = min(part.nbytes, storage.nbytes()) if is_outside else storage.nbytes()
        self._saved_bytes[self._layer] += num_bytes
        self._grow(self._layer, self._saved_bytes[self._layer], field=ACTIVATION)

    def note_contexts(self, stage: Stage, inputs: WeightInputs, queue_addresses: Iterable[int]) -> None:
        """Measure the bytes that the first part of a backward has left for the gradients of weights.

        `queue_addresses` are the addresses of storages that were in queues of layers before that part ran.
        """
        # After a gather the modules have whole parameters in the place of shards, with other ids.
        self._layer_of |= self._layers_of_parameters()
        context_bytes: Counter[int] = Counter()
        counter = StorageCounter({*self._ignored_addresses, *queue_addresses})
        counter.add([[*module.parameters()] for module in self._layers.values()])
        for entry in inputs.entries:
            held_tensors = held_by(entry)
            owners = [id(owner) for owner in held_tensors.owners if id(owner) in self._layer_of]
            # An entry without a known owner is counted in the first layer of its stage.
            layer = self._layer_of[owners[0]] if owners else stage.first_layer
            context_bytes[layer] += counter.add(held_tensors.tensors)
        for layer, num_bytes in context_bytes.items():
            self._grow(layer, num_bytes, field=CONTEXT)

    def local_sizes(self, optimizer: Optimizer | None) -> dict[str, dict[str, int]]:
        """Return the sizes of this rank's layers, with parameters, gradients and state as they are now."""
        buffers = StorageCounter()
        for layer, module in self._layers.items():
            parameters = [parameter for parameter in module.parameters() if self._layer_of[id(parameter)] == layer]
            self._bytes_by_layer[layer] |= {
                PARAMETER: sum(map(self._size_of, parameters)) + buffers.add([*module.buffers()]),
                GRADIENT: self._sizes_of([*map(gradients_of, parameters)]),
                OPTIMIZER: self._sizes_of([state_of(optimizer, parameter) for parameter in parameters]),
            }
        return {str(layer): sizes for layer, sizes in self._bytes_by_layer.items()}

    def _sizes_of(self, tree: Any) -> int:
        if self._is_sharded:  # of a unit, all rows of this rank are in one storage
            return sum(map(self._size_of, tensors_of(tree)))
        return StorageCounter().add(tree)

    def _size_of(self, tensor: Tensor) -> int:
        if self._is_sharded:
            return tensor.numel() * tensor.element_size()
        return local_part(tensor).nbytes

    def _layers_of_parameters(self) -> dict[int, int]:
        return {
            id(parameter): layer
            for layer in sorted(self._layers, reverse=True)
            for parameter in self._layers[layer].parameters()
        }

    def _begin(
        self,
        attempt: Attempt | None,
        layers: Iterator[int],
        module: nn.Module,
        inputs: Any,
        keywords: Mapping[str, Any],
    ) -> None:
        layer = self._layer = next(layers, self._layer)  # it may also be called within another layer
        self._ignored_addresses.update(storages(dict(keywords)))
        if attempt is not None:
            self._workspaces.enter(layer, inputs, attempt)
        self._gradient_bytes_of_inputs[layer] = _bytes_of([t for t in tensors_of(inputs) if t.requires_grad])
        if layer == 0:
            self._ignored_addresses.update(storages(inputs))
        else:
            self._grow(layer, _bytes_of(inputs), field=CHECKPOINT)

    def _end(self, note_outputs: Callable[[Any], object], module: nn.Module, inputs: Any, outputs: Any) -> None:
        note_outputs(outputs)
        self._grow(self._layer, _bytes_of(outputs), field=MESSAGE)

    def _grow(self, layer: int, num_bytes: int, *, field: str) -> None:
        self._bytes_by_layer[layer][field] = max(self._bytes_by_layer[layer][field], num_bytes)


@dataclass(slots=True, weakref_slot=True, eq=False)
class _StorageRecord:
    """A storage that autograd holds. It is forgotten with the last saved tensor that refers to this record."""

    num_bytes: int


_StorageRecords = WeakValueDictionary[int, _StorageRecord]
_note_kept: ContextVar[Callable[[Any], object] | None] = ContextVar("note_kept", default=None)
"""Gets tensors that the forward which runs in this thread keeps; None where nobody tracks it."""


def note_kept(tensors: Any) -> None:
    """Tell who tracks the forward that runs of tensors that are kept for its backward, though not by autograd.

    Selective checkpointing calls it with the results that it keeps: no hook of autograd shows them.
    """
    note = _note_kept.get()
    if note is not None:
        note(tensors)


class SavedTensorTracker:
    """Knows the storages that forwards have left for their backwards, from when autograd saves them until it frees
    them."""

    def __init__(self, note: Callable[[Tensor], object]) -> None:
        """`note` gets each tensor whose storage is new to a stage."""
        self._note_new = note
        self._storages_by_stage: defaultdict[int, _StorageRecords] = defaultdict(WeakValueDictionary)
        """Records of the storages that autograd holds, by stage and address."""
        self._ignored_addresses: Collection[int] = ()
        self._walked: set[Node] = set()
        """Nodes that were visited in the graph of the forward which runs now."""

    @contextmanager
    def tracking(self, stage: int, ignored_addresses: Collection[int], attempt: Callable[..., Any]) -> Iterator[None]:
        """Track the storages that a forward of a stage, run in this thread meanwhile, leaves for its backward.

        `ignored_addresses` are those of parameters, which are there anyway. `attempt` makes the calls within the
        forward, and returns None where they fail.
        """
        stage_storages, self._ignored_addresses = self._storages_by_stage[stage], ignored_addresses

        def pack(tensor: Tensor) -> Any:
            storage_record = attempt(self._record_storage, stage_storages, tensor)
            # An output that its own node saves would keep the node, and so itself, alive where no backward runs.
            return tensor if storage_record is None else (tensor.detach(), storage_record)

        def note_storages(tensors: Any) -> None:
            for tensor in tensors_of(tensors):
                storage_record = self._record_storage(stage_storages, tensor)
                if storage_record is not None:  # it goes with the storage, of which others hold other tensors
                    finalize(local_part(tensor).untyped_storage(), lambda _: None, storage_record).atexit = False

        token = _note_kept.set(partial(attempt, note_storages))
        try:
            with saved_tensors_hooks(pack, _unwrapped):
                yield
        finally:
            _note_kept.reset(token)
            self._walked.clear()

    def note_functions(self, stage: int, outputs: Any) -> None:
        """Track what custom functions that lead to some outputs hold as attributes: no hook of autograd shows it."""
        nodes = nodes_behind([tensor.grad_fn for tensor in tensors_of(outputs)], self._walked)
        for node in filter(is_function, nodes):
            for tensor in tensors_of([*vars(node).values()]):
                storage_record = self._record_storage(self._storages_by_stage[stage], tensor)
                if storage_record is not None:  # it goes with the attribute
                    finalize(tensor, lambda _: None, storage_record).atexit = False

    def bytes_by_address(self, stage: int) -> Mapping[int, int]:
        """Return the bytes of each storage, by its address, that is kept for backwards of a stage."""
        return {address: storage.num_bytes for address, storage in self._storages_by_stage[stage].items()}

    def _record_storage(self, stage_storages: _StorageRecords, tensor: Tensor) -> _StorageRecord | None:
        storage = local_part(tensor).untyped_storage()
        address = address_of(storage)
        if tensor.is_meta or address in self._ignored_addresses:  # a trial run of a cut model has no memory
            return None
        storage_record = stage_storages.get(address)
        if storage_record is None:
            storage_record = stage_storages[address] = _StorageRecord(storage.nbytes())
            self._note_new(tensor)
        return storage_record


@repeats
def _unwrapped(packed: Any) -> Tensor:
    return packed if isinstance(packed, Tensor) else packed[0]


def storages(tree: Any) -> dict[int, int]:
    """Return the bytes of each storage, by its address, that holds a tensor of a tree."""
    tensor_storages = (local_part(tensor).untyped_storage() for tensor in tensors_of(tree))
    return {address_of(storage): storage.nbytes() for storage in tensor_storages if storage.nbytes()}


class StorageCounter:
    """Adds up storages, each once; those at the addresses in `counted_addresses` not at all."""

    def __init__(self, counted_addresses: Iterable[int] = ()) -> None:
        self._counted_addresses = set(counted_addresses)

    def add(self, tree: Any) -> int:
        """Return the bytes of the storages of a tree that had not been counted."""
        return self.add_storages(storages(tree))

    def add_storages(self, bytes_at: Mapping[int, int]) -> int:
        """Return the bytes of those storages, given by address, that had not been counted."""
        new = bytes_at.keys() - self._counted_addresses
        self._counted_addresses |= new
        return sum(bytes_at[address] for address in new)


def gather_sizes(transport: Transport, local_sizes: Mapping[str, Mapping[str, int]]) -> LayerBytes:
    """Give every rank the sizes of all layers; of a layer's two copies, the larger ones. A collective."""
    sizes_by_rank = cast(list[dict[str, dict[str, int]]], Control(transport).all_gather_object(local_sizes))
    num_layers = 1 + max(int(layer) for sizes in sizes_by_rank for layer in sizes)
    return {
        field: tuple(
            max(sizes.get(str(layer), {}).get(field, 0) for sizes in sizes_by_rank) for layer in range(num_layers)
        )
        for field in FIELDS
    }


def gradients_of(parameter: nn.Parameter) -> list[Tensor]:
    """Return what a parameter has of gradients: its own, and one that is accumulated beside it."""
    gradients = (parameter.grad, getattr(parameter, MAIN_GRAD, None))
    return [gradient for gradient in gradients if gradient is not None]


def state_of(optimizer: Optimizer | None, parameter: Tensor) -> list[Tensor]:
    """Return what an optimizer keeps of a parameter on the parameter's device; it may count its steps on the host."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    return [tensor for tensor in tensors_of(state) if tensor.device == parameter.device]


def _gradients_of_stage(stage: Stage) -> Callable[[], int]:
    """Return a function that counts the bytes of the gradients of a stage's weights."""
    parameters = [*stage.parameters()]
    return lambda: StorageCounter().add([*map(gradients_of, parameters)])


def _bytes_of(tree: Any) -> int:
    return sum(local_part(tensor).nbytes for tensor in tensors_of(tree))
