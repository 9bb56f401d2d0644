"""Counts bytes by storage, as a step runs: what autograd keeps of forwards, and what each layer makes and keeps."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakValueDictionary, finalize

from torch import Tensor, nn
from torch.autograd.graph import Node, saved_tensors_hooks
from torch.optim import Optimizer

from penstock.execute.control.collectives import Control
from penstock.execute.observing.held_tensors import held_by, nodes_behind
from penstock.execute.parameters.gradient_store import MAIN_GRAD, WeightInputs
from penstock.execute.stages.stage import Stage
from penstock.execute.transport.protocol import Transport
from penstock.execute.undocumented import is_function, repeats
from penstock.execute.values.tensors import local_part
from penstock.execute.values.tree import tensors_of

ACTIVATION, CONTEXT, CHECKPOINT, MESSAGE, PARAMETER, GRADIENT, OPTIMIZER = FIELDS = (
    "activation_bytes", "weight_context_bytes", "checkpoint_bytes", "message_bytes",
    "parameter_bytes", "gradient_bytes", "optimizer_bytes",
)  # fmt: skip
"""Named as those of `LayerCosts`."""

LayerBytes = Mapping[str, tuple[int, ...]]
"""By field, one entry per layer of the model."""


class LayerSizes:
    """Measures the layers of one rank; of several microbatches the largest counts, and a storage counts once."""

    def __init__(self, stages: Sequence[Stage], *, is_sharded: bool) -> None:
        """With `is_sharded`, sizes of DTensors are those of the whole tensors."""
        self._is_sharded = is_sharded
        of_stages = [enumerate(stage.layers.values(), stage.first_layer) for stage in stages]
        self._layers = {layer: module for own in of_stages for layer, module in own}
        self._found = {layer: dict.fromkeys(FIELDS, 0) for layer in self._layers}
        modules = {id(each): layer for layer, module in self._layers.items() for each in module.modules()}
        self._layer_of = modules | self._layers_of_parameters()
        """By id of a parameter, the first layer that has it; by that of a module, its layer."""
        self._given = set(storages([[*each.buffers()] for stage in stages for each in stage.layers.values()]))
        """Addresses of what no forward makes: buffers, and the batch."""
        self._layer = min(self._layers)
        self._saved: Counter[int] = Counter()
        """By layer, the bytes that the forward now running has saved."""

    @contextmanager
    def watching(self, attempt: Callable[..., object], note_outputs: Callable[[Any], object]) -> Iterator[None]:
        """Note which layer runs in a stage's forward, and the sizes of its inputs and outputs; `attempt` keeps errors
        from the layers. `note_outputs` gets the outputs of each layer before the next one runs."""
        self._saved.clear()
        with ExitStack() as stack:
            for layer, module in self._layers.items():
                before = module.register_forward_pre_hook(partial(attempt, self._begin, layer))
                behind = module.register_forward_hook(partial(attempt, self._end, layer, note_outputs))
                stack.callback(before.remove)
                stack.callback(behind.remove)
            yield

    def note_saved(self, tensor: Tensor) -> None:
        """Count a tensor whose storage no one had saved yet."""
        part = local_part(tensor)
        storage = part.untyped_storage()
        if storage.data_ptr() in self._given:
            return
        # A part of the target is saved as a view of the whole batch, which does not belong to one microbatch.
        is_outside = part.is_leaf and not part.requires_grad
        num_bytes = min(part.nbytes, storage.nbytes()) if is_outside else storage.nbytes()
        self._saved[self._layer] += num_bytes
        self._grow(self._layer, ACTIVATION, self._saved[self._layer])

    def note_contexts(self, stage: Stage, inputs: WeightInputs, before: Iterable[int]) -> None:
        """Measure what the first part of a backward has left for the gradients of weights.

        `before` are addresses of what was in queues of layers before it.
        """
        self._layer_of |= self._layers_of_parameters()  # whole ones in the place of shards
        held: Counter[int] = Counter()
        counter = StorageCounter({*self._given, *before})
        counter.add([[*module.parameters()] for module in self._layers.values()])
        for entry in inputs.entries:
            found = held_by(entry)
            owners = [id(each) for each in found.owners if id(each) in self._layer_of]
            # Where no one knows the layer, it is of this stage.
            layer = self._layer_of[owners[0]] if owners else stage.first_layer
            held[layer] += counter.add(found.tensors)
        for layer, num_bytes in held.items():
            self._grow(layer, CONTEXT, num_bytes)

    def own(self, optimizer: Optimizer | None) -> dict[str, dict[str, int]]:
        """Return the sizes of this rank's layers, with parameters, gradients and state as they are now."""
        buffers = StorageCounter()
        for layer, module in self._layers.items():
            parameters = [each for each in module.parameters() if self._layer_of[id(each)] == layer]
            self._found[layer] |= {
                PARAMETER: sum(map(self._size_of, parameters)) + buffers.add([*module.buffers()]),
                GRADIENT: self._sizes_of([*map(gradients_of, parameters)]),
                OPTIMIZER: self._sizes_of([state_of(optimizer, each) for each in parameters]),
            }
        return {str(layer): found for layer, found in self._found.items()}

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
            id(each): layer for layer in sorted(self._layers, reverse=True) for each in self._layers[layer].parameters()
        }

    def _begin(self, layer: int, module: nn.Module, inputs: Any) -> None:
        self._layer = layer
        if layer == 0:
            self._given.update(storages(inputs))
        else:
            self._grow(layer, CHECKPOINT, _bytes_of(inputs))

    def _end(
        self, layer: int, note_outputs: Callable[[Any], object], module: nn.Module, inputs: Any, outputs: Any
    ) -> None:
        note_outputs(outputs)
        self._grow(layer, MESSAGE, _bytes_of(outputs))

    def _grow(self, layer: int, field: str, num_bytes: int) -> None:
        self._found[layer][field] = max(self._found[layer][field], num_bytes)


@dataclass(slots=True, weakref_slot=True, eq=False)
class _Storage:
    """A storage in autograd's hands: gone, and so forgotten, with the last saved tensor that has it."""

    num_bytes: int


_Kept = WeakValueDictionary[int, _Storage]


class SavedTensorTracker:
    """Knows the storages that forwards have left for their backwards, from when autograd saves them until it frees
    them."""

    def __init__(self, note: Callable[[Tensor], object]) -> None:
        """`note` gets each tensor whose storage is new to a stage."""
        self._note = note
        self._kept: defaultdict[int, _Kept] = defaultdict(WeakValueDictionary)
        """Per stage, by address, what autograd holds."""
        self._but: Collection[int] = ()
        self._walked: set[Node] = set()
        """Nodes of the forward now running."""

    @contextmanager
    def of_stage(self, stage: int, but: Collection[int], attempt: Callable[..., Any]) -> Iterator[None]:
        """Track what a forward of a stage, run in this thread meanwhile, leaves behind.

        `but` are addresses of what is there anyway. `attempt` makes the calls within the forward, and returns None
        where they fail.
        """
        kept, self._but = self._kept[stage], but

        def pack(tensor: Tensor) -> Any:
            noted = attempt(self._noted, kept, tensor)
            # An output that its own node saves would keep the node, and so itself, alive where no backward runs.
            return tensor if noted is None else (tensor.detach(), noted)

        try:
            with saved_tensors_hooks(pack, _unwrapped):
                yield
        finally:
            self._walked.clear()

    def note_functions(self, stage: int, outputs: Any) -> None:
        """Track what custom functions that lead to some outputs hold as attributes: no hook of autograd shows it."""
        nodes = nodes_behind([each.grad_fn for each in tensors_of(outputs)], self._walked)
        for node in filter(is_function, nodes):
            for tensor in tensors_of([*vars(node).values()]):
                noted = self._noted(self._kept[stage], tensor)
                if noted is not None:  # it goes with the attribute
                    finalize(tensor, lambda _: None, noted).atexit = False

    def held(self, stage: int) -> Mapping[int, int]:
        """Return the bytes of each storage, by its address, that is kept for backwards of a stage."""
        return {address: storage.num_bytes for address, storage in self._kept[stage].items()}

    def _noted(self, kept: _Kept, tensor: Tensor) -> _Storage | None:
        storage = local_part(tensor).untyped_storage()
        if storage.data_ptr() in self._but:
            return None
        noted = kept.get(storage.data_ptr())
        if noted is None:
            noted = kept[storage.data_ptr()] = _Storage(storage.nbytes())
            self._note(tensor)
        return noted


@repeats
def _unwrapped(saved: Any) -> Tensor:
    return saved if isinstance(saved, Tensor) else saved[0]


def storages(tree: Any) -> dict[int, int]:
    """Return the bytes of each storage, by its address, that holds a tensor of a tree."""
    found = (local_part(each).untyped_storage() for each in tensors_of(tree))
    return {each.data_ptr(): each.nbytes() for each in found if each.nbytes()}


class StorageCounter:
    """Adds up storages, each once; those at the addresses in `seen` not at all."""

    def __init__(self, seen: Iterable[int] = ()) -> None:
        self._seen = set(seen)

    def add(self, tree: Any) -> int:
        """Return the bytes of the storages of a tree that had not been seen."""
        return self.add_storages(storages(tree))

    def add_storages(self, bytes_at: Mapping[int, int]) -> int:
        """The same of storages by address."""
        new = bytes_at.keys() - self._seen
        self._seen |= new
        return sum(bytes_at[address] for address in new)


def gather_sizes(transport: Transport, own: Mapping[str, Mapping[str, int]]) -> LayerBytes:
    """Give every rank the sizes of all layers; of a layer's two copies, the larger ones. A collective."""
    everyone = cast(list[dict[str, dict[str, int]]], Control(transport).all_gather_object(own))
    num_layers = 1 + max(int(layer) for row in everyone for layer in row)
    return {
        field: tuple(max(row.get(str(layer), {}).get(field, 0) for row in everyone) for layer in range(num_layers))
        for field in FIELDS
    }


def gradients_of(parameter: nn.Parameter) -> list[Tensor]:
    """Return what a parameter has of gradients: its own, and one that is accumulated beside it."""
    gradients = (parameter.grad, getattr(parameter, MAIN_GRAD, None))
    return [each for each in gradients if each is not None]


def state_of(optimizer: Optimizer | None, parameter: Tensor) -> list[Tensor]:
    """Return what an optimizer keeps of a parameter on the parameter's device; it may count its steps on the host."""
    state = {} if optimizer is None else optimizer.state.get(parameter, {})
    return [each for each in tensors_of(state) if each.device == parameter.device]


def _bytes_of(tree: Any) -> int:
    return sum(local_part(each).nbytes for each in tensors_of(tree))
