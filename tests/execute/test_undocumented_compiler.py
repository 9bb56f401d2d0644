"""Each use of torch.compile that its documentation does not promise: a new torch that changes one fails here first."""

import copy

import pytest
import torch
from torch import fx, nn
from torch.fx import traceback
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.errors import ConfigError
from penstock.execute import undocumented_compiler as undocumented
from tests.support.inductor import skip_without_inductor
from tests.support.local_pipelines import error_of

pytestmark = pytest.mark.usefixtures("nothing_stays_compiled")

ROWS, WIDTH = 3, 4


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, features):
        return self.linear(features).tanh()


def traced(function, *inputs):
    return make_fx(function, tracing_mode="fake")(*inputs)


def targets(module):
    return {node.target for node in module.graph.nodes if node.op == "call_function"}


def backward_graphs(layer, inputs):
    """Return the graphs that a compiler gets for a layer's forward and backward, and the gradients it was to return."""
    graphs = []

    def compile_one(module, examples):
        graphs.append((module, examples))
        return module.forward

    compiled = lambda module, examples: undocumented.compile_aot_eager(module, examples, compile_one, compile_one)  # noqa: E731
    torch.compile(layer, backend=compiled)(inputs)
    return graphs


# ---- traced graphs


def test_a_view_in_a_graph_is_known_as_one():
    module = traced(
        lambda x: (x.t(), x.exp().view(-1), torch.ops.aten._unsafe_view(x, [ROWS * WIDTH])), torch.ones(ROWS, WIDTH)
    )

    found = {str(node.target): undocumented.is_view(node) for node in module.graph.nodes if node.op == "call_function"}

    views = ("aten.t.default", "aten.view.default", "aten._unsafe_view.default")
    assert found == dict.fromkeys(views, True) | {"aten.exp.default": False}


def test_products_and_gradients_of_tables_and_convolutions_have_these_names_in_a_graph():
    square, batch = torch.ones(WIDTH, WIDTH), torch.ones(2, WIDTH, WIDTH)
    module = traced(lambda x, y: (x @ x, torch.addmm(x, x, x), y @ y, torch.baddbmm(y, y, y)), square, batch)
    assert targets(module) >= undocumented.MATRIX_PRODUCTS

    (_, (table, _)) = backward_graphs(nn.Embedding(ROWS, WIDTH), torch.arange(ROWS))
    assert targets(table) & undocumented.TABLE_GRADIENTS

    (_, (convolution, _)) = backward_graphs(nn.Conv1d(1, 1, 3), torch.ones(1, 1, WIDTH))
    (node,) = convolution.graph.find_nodes(op="call_function", target=undocumented.CONVOLUTION_BACKWARD)
    assert node.args[-1] == [False, True, True]  # the batch needs no gradient


# ---- compilers and nodes


def test_a_backward_is_compiled_with_its_forward_and_has_an_output_for_each_input():
    (forward, examples), (backward, _) = backward_graphs(Layer(), torch.ones(ROWS, WIDTH))

    assert [tuple(each.shape) for each in examples] == [(WIDTH, WIDTH), (WIDTH,), (ROWS, WIDTH)]
    results = backward.graph.output_node().args[0]
    assert [each is not None for each in results] == [True, True, False]
    assert isinstance(forward, fx.GraphModule)


def test_a_node_shows_what_its_compiler_has_returned_and_runs_it():
    ran = []

    def compile_backward(module, examples):
        def run(arguments):
            ran.append(undocumented.running_node())
            return fx.Interpreter(module).boxed_run(arguments)

        run.mark = "own"
        return undocumented.boxed(run)

    def compile_one(module, examples):
        return undocumented.compile_aot_eager(module, examples, lambda own, _: own.forward, compile_backward)

    output = torch.compile(Layer(), backend=compile_one)(torch.ones(ROWS, WIDTH))
    node = output.grad_fn
    output.sum().backward()

    assert type(node).__name__ == undocumented.COMPILED
    assert undocumented.backward_of(node).mark == "own"
    assert len(node.next_functions) == 3  # two parameters and the batch, all of them tensors
    assert ran == [node]
    assert undocumented.running_node() is None
    assert undocumented.backward_of(torch.ones(1, requires_grad=True).exp().grad_fn) is None


class _Looks(TorchDispatchMode):
    """Notes at each operation what torch keeps for the whole process while it traces."""

    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found.append(traceback.current_meta.get("custom"))
        return function(*args, **(kwargs or {}))


def test_traced_code_empties_its_arguments_and_leaves_the_tracing_of_another_thread_alone():
    module = traced(lambda x: x.exp().tanh(), torch.ones(ROWS, WIDTH))
    run, arguments = undocumented.traced_code(module, []), [torch.ones(ROWS, WIDTH)]

    with traceback.preserve_node_meta(), traceback.annotate({"of": "another"}), _Looks() as looks:
        result = run(arguments)

    assert torch.equal(result, torch.ones(ROWS, WIDTH).exp().tanh())
    assert arguments == []
    assert run._boxed_call
    assert looks.found[:2] == [{"of": "another"}] * 2


@pytest.mark.slow
def test_inductor_compiles_by_what_it_is_given_with_settings_and_returns_strides_as_told():
    skip_without_inductor()
    graphs, found = {}, []

    def compile_one(module, examples, **arguments):
        assert "static_input_idxs" in arguments
        graphs[bool(arguments.get("is_backward"))] = module
        return undocumented.compile_kernels(module, examples, {"epilogue_fusion": False}, **arguments)

    def compile_graph(module, examples):
        compiled = undocumented.compile_inductor(module, examples, compile_one, {"epilogue_fusion": False})
        found.append(sorted(graphs))
        return compiled

    layer, inputs = Layer(), torch.ones(ROWS, WIDTH)
    torch.compile(layer, backend=compile_graph)(inputs).sum().backward()
    assert found == [[False, True]]  # before the first backward
    table = nn.Embedding(ROWS, WIDTH)
    torch.compile(table, backend=compile_graph)(torch.arange(ROWS)).sum().backward()
    assert targets(graphs[True]) & undocumented.TABLE_GRADIENTS
    assert layer.linear.weight.grad is not None

    module = traced(lambda x: (x.permute(1, 0).exp(),), torch.ones(ROWS, WIDTH))
    undocumented.keep_strides(module.graph)
    assert module.graph.output_node().meta["user_visible_output_idxs"] == [0]
    run = undocumented.compile_kernels(module, [torch.ones(ROWS, WIDTH)], {})
    assert run([torch.ones(ROWS, WIDTH)])[0].stride() == torch.ones(ROWS, WIDTH).t().exp().stride()


def test_inductor_needs_a_compiler_of_cpp(tmp_path):
    (tmp_path / "g++").touch(mode=0o600)
    for compiler in ("/nowhere/g++", str(tmp_path / "g++")):
        with torch._inductor.config.patch({"cpp.cxx": (compiler,)}):
            assert undocumented.obstacle_to_inductor("cpu").endswith("install a C++ compiler such as g++")
    is_there = torch.cuda.is_available()
    assert undocumented.obstacle_to_inductor("cuda").endswith(
        "" if is_there else "no compiler for cuda; install Triton"
    )


@pytest.mark.parametrize(("place", "folder"), [("torch", "with space"), ("cache", "john's")])
def test_inductor_needs_paths_that_are_words_of_a_command_line(monkeypatch, tmp_path, place, folder):
    path = str(tmp_path / folder)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", lambda: "g++")
    monkeypatch.setattr("torch.utils.cpp_extension.TORCH_LIB_PATH", path if place == "torch" else "/lib")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", path if place == "cache" else str(tmp_path))

    obstacle = undocumented.obstacle_to_inductor("cpu")

    assert repr(path) in obstacle
    assert obstacle.endswith("a path without spaces and quotes")


def test_what_is_compiled_runs_without_autocast_and_a_mode_stands_for_settings():
    assert undocumented.options_of_mode("default") == {}
    assert undocumented.options_of_mode("max-autotune-no-cudagraphs")["max_autotune"] is True
    square = torch.ones(WIDTH, WIDTH)
    with torch.autocast("cpu", torch.bfloat16):
        assert (square @ square).dtype is torch.bfloat16
        with undocumented.without_autocast():
            assert (square @ square).dtype is torch.float32


def test_a_compilation_is_continued_later_with_what_it_knew():
    contexts, later = [], []

    def note():
        contexts.append(torch._guards.TracingContext.try_get())

    def compile_one(module, examples):
        note()
        later.append(undocumented.continuing())
        return module.forward

    torch.compile(Layer(), backend=compile_one)(torch.ones(ROWS, WIDTH))
    note()
    later[0](note)

    assert contexts[0] is not None
    assert contexts[1:] == [None, contexts[0]]


def test_compilations_are_seen_where_they_begin_and_end():
    seen = []
    stop = undocumented.watch_compilations(lambda: seen.append("begin"), lambda: seen.append("end"))
    layer = torch.compile(Layer(), backend="eager")
    layer(torch.ones(ROWS, WIDTH))
    layer(torch.ones(ROWS, WIDTH))
    assert seen == ["begin", "end"]

    undocumented.continuing()(lambda: seen.append("later"))
    assert seen[2:] == ["begin", "later", "end"]

    stop()
    layer(torch.ones(ROWS, WIDTH, dtype=torch.float64).float()[:2])
    assert len(seen) == 5


# ---- compiled modules


def test_compiled_functions_and_modules_are_known_as_such():
    in_place = Layer()
    in_place.compile(backend="eager")

    assert undocumented.is_compiled(in_place)
    assert undocumented.is_compiled(torch.compile(Layer(), backend="eager"))
    assert undocumented.is_compiled(torch.compile(F.gelu, backend="eager"))
    assert not any(map(undocumented.is_compiled, (Layer(), F.gelu, len, None, 3)))


def noting(graphs):
    """A compiler that notes the graphs that it gets."""

    def compile_graph(module, examples):
        graphs.append(module)
        return module.forward

    return compile_graph


def test_a_module_is_taken_out_of_what_torch_compile_returned_and_stays_compiled():
    for layer in (Layer(), nn.Sequential(Layer())):
        graphs = []
        compiled = torch.compile(layer, backend=noting(graphs))
        inner, compiler = undocumented.unwrapped(compiled)
        undocumented.compile_module(inner, compiler)
        for _ in range(2):
            inner(torch.ones(ROWS, WIDTH))

        assert inner is layer
        assert list(dict(compiled.named_children())) == [undocumented.WRAPPED]
        assert len(graphs) == 1
    assert undocumented.unwrapped(Layer()) is None


def test_torchs_own_modules_are_compiled_in_place_however_many_and_copies_are_not():
    graphs, inputs = [], torch.ones(ROWS, WIDTH)
    num_layers = torch._dynamo.config.recompile_limit + 3
    layers = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(num_layers)]
    wanted = [layer(inputs) for layer in layers]
    for layer in layers:
        undocumented.compile_module(layer, lambda call: torch.compile(call, backend=noting(graphs)))

    assert all(torch.equal(layer(inputs), output) for layer, output in zip(layers, wanted, strict=True))
    assert len(graphs) == len(layers)
    assert list(layers[0].state_dict()) == ["0.weight", "0.bias"]
    copied = copy.deepcopy(layers[0])
    assert torch.equal(copied(inputs), wanted[0])
    assert not undocumented.is_compiled(copied)


def test_what_this_torch_does_not_have_is_named():
    error = error_of(undocumented._part, "torch._inductor.nothing_of_this_name")

    assert isinstance(error, ConfigError)
    assert "has no torch._inductor.nothing_of_this_name" in str(error)
    assert torch.__version__ in str(error)


@pytest.mark.slow
def test_inductor_quotes_no_path_of_torchs_libraries_or_of_its_cache(monkeypatch):
    """Where this fails, torch has learnt to, and `obstacle_to_inductor` need look at paths no more."""
    skip_without_inductor()
    monkeypatch.setattr("torch.utils.cpp_extension.TORCH_LIB_PATH", "/with space")
    cpp_builder = pytest.importorskip("torch._inductor.cpp_builder")

    options = cpp_builder.CppTorchOptions()
    command = cpp_builder.CppBuilder("name", "/a cache/source.cpp", options, output_dir="/a cache").get_command_line()

    assert "-L/with space " in command + " "
    assert " /a cache/source.cpp " in command
    assert " /a cache/name.so " in command
