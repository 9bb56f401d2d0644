"""Every use of torch.compile that its documentation does not promise; the other uses of torch are in `undocumented.py`.

Each has a test of its own in tests/execute/test_undocumented_compiler.py. Parts of the compiler are imported when they
are needed, since it takes seconds to load.
"""

import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, suppress
from importlib import import_module
from inspect import getattr_static
from types import FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import fx, nn
from torch.autograd.graph import Node

from penstock.errors import ConfigError

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])
Compiler = Callable[..., Any]

# ---- traced graphs

_ATEN = torch.ops.aten
MATRIX_PRODUCTS = {_ATEN.mm.default, _ATEN.addmm.default, _ATEN.bmm.default, _ATEN.baddbmm.default}
CONVOLUTION_BACKWARD = _ATEN.convolution_backward.default
"""The last of its arguments says which of its three gradients are wanted."""
TABLE_GRADIENTS = {
    _ATEN.embedding_dense_backward.default,
    _ATEN.index_put.default,
    _ATEN._unsafe_masked_index_put_accumulate.default,
}
"""Operations that compute the gradient of a table, as traced and as Inductor has them."""


def is_view(node: fx.Node) -> bool:
    """Whether a node of a graph computes nothing, but shows the memory of its input in another way."""
    return bool(getattr(node.target, "is_view", False)) or node.target is _ATEN._unsafe_view.default


# ---- the nodes of compiled functions in autograd's graph

COMPILED = "CompiledFunctionBackward"
"""Kind of the nodes that AOTAutograd has compiled, on which torch's own backends are built."""


def backward_of(node: Node) -> Any:
    """Return what a node of kind COMPILED runs, with the attributes of the function that its compiler returned."""
    function = getattr(node, "_forward_cls", None)
    has_subclasses = getattr(function, "maybe_subclass_metadata", None) is not None
    return None if has_subclasses else getattr(function, "compiled_bw", None)


def running_node() -> Node | None:
    """Return the node that autograd runs on this thread."""
    node: Node | None = _part("torch._C._current_autograd_node")()
    return node


# ---- compilers

_OPTIONS = {"force_non_lazy_backward_lowering": True, "donated_buffer": False}
"""A backward is compiled with its forward, and overwrites no input: a half has others than the whole."""


def compile_aot_eager(graph: fx.GraphModule, inputs: Sequence[Any], forward: Compiler, backward: Compiler) -> Any:
    """Compile as "aot_eager" does, with the given compilers of the traced forward and of its backward."""
    aot_autograd = _part("torch._dynamo.backends.common.aot_autograd")
    partition = _part("functorch.compile.min_cut_rematerialization_partition")
    compilers = {"fw_compiler": forward, "bw_compiler": backward, "partition_fn": partition}
    with _part("torch._functorch.config").patch(**_OPTIONS):
        return aot_autograd(**compilers, keep_inference_input_mutations=True)(graph, inputs)


def compile_inductor(graph: fx.GraphModule, inputs: Sequence[Any], compile_one: Compiler, options: Any) -> Any:
    """Compile by Inductor, but forward and backward by `compile_one`.

    Inductor's cache of functions is off: it would bring back backwards of an earlier process, which were not split.
    """
    compile_fx = _part("torch._inductor.compile_fx.compile_fx")
    with _part("torch._functorch.config").patch(**_OPTIONS, enable_autograd_cache=False):
        return compile_fx(graph, inputs, inner_compile=compile_one, config_patches=options or None)


def compile_kernels(graph: fx.GraphModule, inputs: Sequence[Any], options: Any, **arguments: Any) -> Any:
    """Compile one traced graph by Inductor."""
    with _part("torch._inductor.config").patch(options):
        return _part("torch._inductor.compile_fx.compile_fx_inner")(graph, inputs, **arguments)


def traced_code(graph: fx.GraphModule, inputs: Sequence[Any], **arguments: Any) -> Any:
    """Return a traced graph as code, which runs it as it is.

    `fx.Interpreter` would do the same, but changes what torch keeps for the whole process while it traces: where ranks
    are threads, one of them may trace meanwhile.
    """
    return _part("torch._dynamo.backends.debugging.boxed_nop")(graph, inputs)


def boxed(run: F) -> F:
    """Mark a backward that takes all its arguments in one list, and may empty it."""
    cast(Any, run)._boxed_call = True
    return run


def keep_strides(graph: fx.Graph) -> None:
    """Have Inductor return all outputs of a graph with the strides that the graph says."""
    output = graph.output_node()
    results = cast(Sequence[Any], output.args[0])
    output.meta["user_visible_output_idxs"] = [place for place, result in enumerate(results) if result is not None]


def options_of_mode(mode: str) -> Mapping[str, Any]:
    """Return the settings of Inductor that a `mode` of torch.compile stands for."""
    settings: Mapping[str, Any] = _part("torch._inductor.list_mode_options")(mode)
    return settings


def obstacle_to_inductor(device: str) -> str:
    """Say what keeps Inductor from compiling for a type of device, then the fix; return the empty text if nothing does.

    It needs Triton, or for the CPU a C++ compiler. It quotes neither the folder of torch's libraries nor its own cache
    in the command lines of that compiler, so a space in one makes it two words, with which no library can be linked.
    """
    if device != "cpu":
        is_there = _part("torch.utils._triton.has_triton")()
        return "" if is_there else f"Inductor finds no compiler for {device}; install Triton"
    try:
        _part("torch._inductor.cpp_builder.get_cpp_compiler")()
    except (RuntimeError, OSError):  # torch passes on what is none of its own, such as a folder of PATH nobody may read
        return "Inductor finds no compiler for cpu; install a C++ compiler such as g++"
    libraries: str = _part("torch.utils.cpp_extension.TORCH_LIB_PATH")
    if not _is_one_word(libraries):
        return f"Inductor cannot link with {libraries!r}; install torch below a path without spaces and quotes"
    cache: str = _part("torch._inductor.runtime.cache_dir_utils.cache_dir")()
    if not _is_one_word(cache):
        return f"Inductor cannot compile in {cache!r}; set TORCHINDUCTOR_CACHE_DIR to a path without spaces and quotes"
    return ""


def _is_one_word(path: str) -> bool:
    try:
        return shlex.split(path) == [path]
    except ValueError:  # a quote that nothing closes
        return False


def without_autocast() -> AbstractContextManager[None]:
    """Run something compiled, which has its casts within."""
    context: AbstractContextManager[None] = _part("torch._C._DisableAutocast")()
    return context


def continuing() -> Callable[[Callable[[], T]], T]:
    """Return a function that compiles something later, as a part of the compilation that goes on now."""
    names = {"tracing": "TracingContext", "compile_context": "CompileContext"}
    contexts = {name: _part(f"torch._guards.{kind}").try_get() for name, kind in names.items()}

    def compile_in_context(compile: Callable[[], T]) -> T:
        with ExitStack() as stack:
            stack.enter_context(_part("torch._dynamo.convert_frame.compile_lock"))
            for name, context in contexts.items():
                stack.enter_context(_part(f"torch._guards.{name}")(context))
            stack.enter_context(without_autocast())
            trigger = _part("torch._dynamo.callback.CallbackTrigger").LAZY_BACKWARD
            stack.enter_context(_callbacks().install_callbacks(trigger, "penstock"))
            return compile()

    return compile_in_context


def watch_compilations(begin: Callable[[], None], end: Callable[[], None]) -> Callable[[], None]:
    """Have functions called where a compilation begins and ends, on its thread; return a function that ends this."""
    if "torch._dynamo" not in sys.modules:  # nothing can be compiled before it is loaded, which takes seconds
        return lambda: None
    callbacks = _callbacks()
    pair = (lambda _: begin(), lambda _: end())
    callbacks.register_start_callback(pair[0])
    callbacks.register_end_callback(pair[1])

    def stop() -> None:
        with suppress(ValueError):  # torch.compiler.reset() has removed them
            callbacks.remove_start_callback(pair[0])
            callbacks.remove_end_callback(pair[1])

    return stop


# ---- compiled modules

WRAPPED = "_orig_mod"
"""The name by which a module that torch.compile has returned holds the one that it was given."""


def is_compiled(function: Any) -> bool:
    """Whether a function or module is one that torch.compile has returned, or a module compiled in place."""
    if isinstance(function, nn.Module) and (function._compiled_call_impl is not None or unwrapped(function)):
        return True
    return callable(function) and "_torchdynamo_orig_callable" in getattr(function, "__dict__", ())


def unwrapped(module: nn.Module) -> tuple[nn.Module, Compiler] | None:
    """Return the module within one that torch.compile has returned, and its compiler; None of others."""
    if WRAPPED not in module._modules:
        return None
    return cast(nn.Module, module._modules[WRAPPED]), cast(Any, module).dynamo_ctx


def compile_module(module: nn.Module, compiler: Compiler) -> None:
    """Compile a module in place, as its `compile` does, which compiles nothing of torch's own modules."""
    call: Any = module._call_impl

    def call_module(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    if getattr_static(type(module), "forward").__module__.startswith("torch."):
        # Each module gets code of its own: torch counts compilations per code, and after a few compiles it no more.
        code = call_module.__code__.replace(co_name=type(module).__name__)
        module._compiled_call_impl = compiler(FunctionType(code, globals(), closure=call_module.__closure__))
    else:
        module._compiled_call_impl = compiler(call)


def _callbacks() -> Any:
    return _part("torch._dynamo.callback.callback_handler")


def _part(path: str) -> Any:
    """Return a part of torch by its path.

    Raises:
        ConfigError: this torch does not have it.
    """
    module, _, name = path.rpartition(".")
    try:
        return getattr(import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"torch {torch.__version__} has no {path}, which the backend of Penstock needs; let torch.compile take "
            "another backend, whose weight gradients are computed in I",
            key="compile",
        ) from error
