"""Uses of torch that its docs do not promise; torch.compile, modules and torch.distributed have such files too.

The rest of the package reaches these things through such files alone (a house test looks). Each has a test of its
own in tests/execute/test_undocumented.py, so that a new torch that changes one fails there first, and says which.
"""

from collections.abc import Callable, Sequence
from functools import cache
from operator import attrgetter
from typing import Any, NamedTuple, cast

import torch
import torch.utils.checkpoint
from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node

# ---- tensors

_NUM_HOLDERS = attrgetter("_C._storage_Use_Count")(torch)


def version_of(tensor: Tensor) -> int:
    """Count the changes in place of a tensor and its views; those of inference mode are not counted."""
    try:
        return tensor._version
    except RuntimeError:
        return 0


def num_holders(tensor: Tensor) -> int:
    """Count who holds the memory of a tensor: 1 where it does alone, without views or tensors that took it over."""
    num_references: int = _NUM_HOLDERS(tensor.untyped_storage()._cdata)
    return num_references - 1  # the storage of this call holds it too


def address_of(storage: torch.UntypedStorage) -> int:
    """Return the address of a storage; of one without memory, as of a fake tensor, another number of its own."""
    return int(storage._cdata) if storage.device.type == "meta" else storage.data_ptr()


def has_hooks(parameter: Tensor) -> bool:
    """Whether `register_hook` was called on a tensor."""
    return bool(parameter._backward_hooks)


def has_accumulation_hooks(parameter: Tensor) -> bool:
    """Whether `register_post_accumulate_grad_hook` was called on a parameter."""
    return bool(parameter._post_accumulate_grad_hooks)


# ---- the nodes of autograd's graph

LEAF = "AccumulateGrad"
TRANSPOSITION = "TBackward0"
MM, ADDMM, BMM = "MmBackward0", "AddmmBackward0", "BmmBackward0"
CONVOLUTION = "ConvolutionBackward0"
EMBEDDING = "EmbeddingBackward0"
VIEWS = frozenset(
    f"{name}Backward{number}"
    for name in (
        *("T", "Transpose", "Permute", "View", "UnsafeView", "ReshapeAlias", "Expand", "Squeeze", "Unsqueeze"),
        *("Select", "Slice", "Split", "SplitWithSizes", "Unbind", "Alias", "Diagonal", "AsStrided"),
    )
    for number in range(3)
)
"""Kinds whose backward computes next to nothing."""
LOOKUPS = frozenset(
    f"{name}Backward0" for name in ("Embedding", "EmbeddingBag", "Index", "IndexSelect", "Gather", "Take")
)
"""Kinds that pick by numbers, to which no edge leads."""
HOOKED_MODULE = "BackwardHookFunctionBackward"
REENTRANT_CHECKPOINT = "CheckpointFunctionBackward"
"""Kind of the node of `checkpoint(use_reentrant=True)`, which runs a backward of its own."""
_UNSIGNED = 2**64
_REPEATS = "penstock_repeats"
_CHECKPOINTED: Any = getattr(torch.utils.checkpoint, "_Holder", ())
"""The type of what checkpointing leaves in the place of a tensor."""
_FROM_CPU = "save_on_cpu.__init__.<locals>.unpack_from_cpu"
"""The hook of `save_on_cpu`, which copies anew whenever it is asked."""


def kind_of(node: Node) -> str:
    """Return how autograd names a node, such as one of the constants above."""
    return type(node).__name__


class _Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return gradients[0] * 2


@cache
def nodes_in_python_stay() -> bool:
    """Whether the node of a function in Python lives as long as somebody holds it.

    In torch 2.11 it leaves the graph with the last tensor, or the last edge of `get_gradient_edge`, behind it.
    """
    with torch.enable_grad():
        node: Any = _Doubled.apply(torch.zeros(1, requires_grad=True)).grad_fn  # type: ignore[no-untyped-call]
    try:
        return len(node.next_functions) == 1
    except RuntimeError:
        return False


def leaf_of(node: Any) -> Tensor:
    """Return the leaf that a node of kind LEAF adds gradients to."""
    variable: Tensor = node.variable
    return variable


def saved(node: Node, name: str) -> Any:
    """Return what a node has saved under a name; a tensor passes through the hooks of whoever keeps it."""
    return getattr(node, f"_saved_{name}")


def saved_padding(node: Node) -> int:
    """Return the row of a table that has no gradient, -1 for none, which torch shows as an unsigned number."""
    padding: int = saved(node, "padding_idx")
    return padding - _UNSIGNED if padding >= _UNSIGNED // 2 else padding


def is_saved_elsewhere(node: Node, name: str) -> bool:
    """Whether a tensor that a node saved is kept by others who bring it back only once, even for `saved_before_run`."""
    raw = getattr(node, f"_raw_saved_{name}")
    is_known = is_checkpointed(node, name) or getattr(raw.unpack_hook, "__qualname__", "") == _FROM_CPU
    return _is_brought_once(raw) and not is_known


def is_checkpointed(node: Node, name: str) -> bool:
    """Whether checkpointing keeps a tensor that a node saved: outside of the backward it would compute it once more."""
    return _handles_of(getattr(node, f"_raw_saved_{name}")) is not None


def saved_before_run(node: Node, name: str) -> Tensor:
    """Return a tensor that a node has saved, as a backward comes to the node, which finds it there as well.

    Checkpointing would compute it for whoever asks first, and refuse the second one.
    """
    raw = getattr(node, f"_raw_saved_{name}")
    if (handles := _handles_of(raw)) is not None:
        raw.data.handles = _ReadTwice(handles)
    tensor: Tensor = saved(node, name)
    return tensor


class _ReadTwice(dict[Any, Any]):
    """Handles under which checkpointing finds a tensor, by backward; only the second None takes one away."""

    _is_read = False

    def __setitem__(self, backward: Any, handle: Any) -> None:
        if handle is None and not self._is_read:
            self._is_read = True
        else:
            super().__setitem__(backward, handle)


def _handles_of(raw: Any) -> dict[Any, Any] | None:
    """Return the handles of a tensor that checkpointing keeps; None of others."""
    if raw.unpack_hook is None or not isinstance(raw.data, _CHECKPOINTED):
        return None
    handles: dict[Any, Any] = raw.data.handles
    return handles


def repeats(unpack: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Mark a hook that brings back a saved tensor any number of times, unlike checkpointing."""
    setattr(unpack, _REPEATS, True)
    return unpack


def is_any_saved_elsewhere(node: Node) -> bool:
    """Whether any of the tensors that a node saved is kept by others, who may be asked for it only once."""
    raw_tensors = [raw for name in _raw_names(type(node)) for raw in _listed(getattr(node, name))]
    return any(_is_brought_once(raw) for raw in raw_tensors if raw is not None)


def _is_brought_once(raw: Any) -> bool:
    return raw.unpack_hook is not None and not hasattr(raw.unpack_hook, _REPEATS)


def _listed(value: Any) -> Sequence[Any]:
    return value if isinstance(value, Sequence) else (value,)


@cache
def _raw_names(kind: type[Node]) -> tuple[str, ...]:
    return tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))


class Metadata(NamedTuple):
    """The shape and type of the gradient that arrives at an edge."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device


def metadata_at(edge: GradientEdge) -> Metadata:
    """Return the shape and type of the gradient that arrives at an edge."""
    metadata = cast(Any, edge.node)._input_metadata[edge.output_nr]
    return Metadata(torch.Size(metadata.shape), metadata.dtype, metadata.device)


def num_outputs(node: Node) -> int:
    """Count the gradients that arrive at a node."""
    return len(cast(Any, node)._input_metadata)


def order_of(node: Node) -> int:
    """Number the nodes that a thread has made: of those that are ready, a backward runs the highest first."""
    number: int = cast(Any, node)._sequence_nr()
    return number


def saved_tensors(node: Node) -> list[Tensor]:
    """Return all tensors that a node has saved; none of them may be hooked."""
    names = ["saved_tensors"] if is_function(node) else [name.removeprefix("_raw") for name in _raw_names(type(node))]
    return [value for name in names for value in _listed(getattr(node, name)) if isinstance(value, Tensor)]


def run_node(node: Any, gradients: Sequence[Tensor | None], places: Sequence[int]) -> list[Tensor | None]:
    """Return the gradients for some next functions of a node, outside of a backward.

    Its hooks are not run, and it keeps what it has saved. A gradient of a function in Python must not be missing.
    """
    results = node.apply(*gradients) if is_function(node) else node(*gradients)
    gradients_of_edges = list(results) if isinstance(results, tuple | list) else [results]
    return [gradients_of_edges[at] for at in (arguments_of(node, places) if is_function(node) else places)]


# ---- functions that are written in Python: the node is the ctx that their backward gets


def is_function(node: Any) -> bool:
    """Whether a node is that of such a function."""
    return isinstance(node, BackwardCFunction)


def function_of(ctx: Any) -> Any:
    """Return the class of the function; None for the ctx of a transform such as vmap."""
    return getattr(ctx, "_forward_cls", None)


def backward_of(function: Any) -> Callable[..., Any]:
    """Return the backward, which has one of two names."""
    backward: Callable[..., Any] = function.backward
    return backward if function.vjp is torch.autograd.Function.vjp else function.vjp


def runs_once(function: Any) -> bool:
    """Whether a function's backward frees what it was given, so that it cannot run for a second part."""
    return getattr(function, "boxed_grads_call", False) or getattr(function, "clear_saved_tensors_on_access", False)


def arguments_of(node: Any, places: Sequence[int]) -> list[int]:
    """Return which arguments of the forward some next functions belong to, each of one that needs a gradient."""
    needed = iter([number for number, needs_gradient in enumerate(node.needs_input_grad) if needs_gradient])
    by_place = [None if following is None else next(needed) for following, _ in node.next_functions]
    return [argument for place in places if (argument := by_place[place]) is not None]


def run_instead(node: Any, run: Callable[..., Any] | None) -> Callable[..., Any]:
    """Have a backward call `run` with the gradients, in place of what is returned; None undoes it."""
    node.__dict__.pop("apply", None)
    original_apply: Callable[..., Any] = node.apply
    if run is not None:
        node.apply = run
    return original_apply


# ---- the backwards of single operations


Geometry = tuple[Sequence[int], Sequence[int], Sequence[int], bool, Sequence[int], int]
"""Stride, padding and dilation of a convolution, whether it is transposed, its output padding and groups."""


def convolution_backward(
    gradient: Tensor,
    activations: Tensor,
    kernel: Tensor,
    geometry: Geometry,
    bias_sizes: Sequence[int],
    needs: tuple[bool, bool, bool],
) -> list[Tensor | None]:
    """Return the gradients of a convolution's input, kernel and bias, None for those that are not needed.

    `bias_sizes` is [0] without a bias, as autograd has it. torch may return the gradient of a kernel unasked.
    """
    gradients = torch.ops.aten.convolution_backward(gradient, activations, kernel, bias_sizes, *geometry, needs)
    return [result if is_needed else None for result, is_needed in zip(gradients, needs, strict=True)]


def embedding_backward(
    gradient: Tensor, rows: Tensor, num_rows: int, padding: int, scales_by_frequency: bool, is_sparse: bool
) -> Tensor:
    """Return the gradient of a table of which `rows` were looked up; a padding of -1 is none."""
    table: Tensor = torch.ops.aten.embedding_backward(gradient, rows, num_rows, padding, scales_by_frequency, is_sparse)
    return table


# ---- operations by their names

_ATEN = torch.ops.aten
EXPENSIVE = [
    _ATEN.mm.default,
    _ATEN.addmm.default,
    _ATEN.bmm.default,
    _ATEN._scaled_dot_product_flash_attention.default,
    _ATEN._scaled_dot_product_flash_attention_for_cpu.default,
    _ATEN._scaled_dot_product_efficient_attention.default,
    _ATEN._scaled_dot_product_cudnn_attention.default,
]
"""Operations that take long for the bytes of their results, which selective checkpointing keeps: matrix products and
attention."""


# ---- modules


def traced_arguments(forward: Any) -> list[str] | None:
    """Name the arguments of a forward that torch.jit has traced or loaded; None for others."""
    schema = getattr(forward, "schema", None)
    return None if schema is None else [argument.name for argument in schema.arguments[1:]]


# ---- texts of errors that have no type of their own


def is_leaf_changed_in_place(error: Exception) -> bool:
    """Whether a layer changes a leaf in place: the inputs of a stage are leaves, those within a model are not."""
    text = "leaf Variable that requires grad is being used in an in-place operation"
    return isinstance(error, RuntimeError) and text in str(error)


def is_out_of_memory(error: Exception) -> bool:
    """Whether the memory of the CPU ran out."""
    return isinstance(error, MemoryError) or "allocate memory" in str(error)
