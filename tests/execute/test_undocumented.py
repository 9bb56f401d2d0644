"""Each use of torch that its documentation does not promise: a new torch that changes one fails here first.

A failure names what has changed. Mend `execute/undocumented.py`, or what relies on it (named in the docstring below).
"""

import weakref
from contextlib import suppress

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.graph import get_gradient_edge, save_on_cpu, saved_tensors_hooks
from torch.distributed import _functional_collectives as functional_collectives
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointError, checkpoint

from penstock.execute import undocumented

ROWS = torch.tensor([0, 2])


def leaf(*sizes):
    values = torch.linspace(-1, 1, torch.Size(sizes).numel()).reshape(sizes)
    return values.requires_grad_()


# ---- tensors


def test_a_tensor_counts_the_changes_in_place_of_itself_and_its_views():
    tensor = torch.zeros(3)
    before = undocumented.version_of(tensor)

    tensor[:1].add_(1)
    tensor.detach().add_(1)

    assert undocumented.version_of(tensor) == undocumented.version_of(tensor.detach()) == before + 2
    with torch.inference_mode():
        assert undocumented.version_of(torch.zeros(3)) == 0


def test_a_parameter_shows_whether_it_has_hooks():
    for has_hooks, register in (
        (undocumented.has_hooks, nn.Parameter.register_hook),
        (undocumented.has_accumulation_hooks, nn.Parameter.register_post_accumulate_grad_hook),
    ):
        parameter = nn.Parameter(torch.zeros(3))
        answers = [has_hooks(parameter)]
        handle = register(parameter, lambda tensor: None)
        answers.append(has_hooks(parameter))
        handle.remove()
        assert [*answers, has_hooks(parameter)] == [False, True, False]


def test_a_parameter_without_a_gradient_takes_over_the_memory_of_the_first_one():
    """`parameters/gradient_store.py` gives it memory of its own where others need that."""
    parameter, gradient = leaf(4), torch.ones(2, 2)

    torch.autograd.backward(parameter.view(2, 2), gradient)

    assert parameter.grad.data_ptr() == gradient.data_ptr()


def test_who_holds_the_memory_of_a_tensor_is_counted():
    """`values/tensors.py` copies what others hold too."""
    parameter, hidden = leaf(4), leaf(1, 4)
    tensor = torch.ones(2, 2)
    assert undocumented.num_holders(tensor) == 1

    view = tensor.view(4)
    assert undocumented.num_holders(tensor) == undocumented.num_holders(view) == 2
    del view
    assert undocumented.num_holders(tensor) == 1

    ((hidden.view(1, 4) + parameter[None]) * 2).sum().backward()
    gradient = hidden.grad
    assert undocumented.num_holders(gradient) == 2
    parameter.grad = None
    assert undocumented.num_holders(gradient) == 1


def test_storages_have_addresses_also_where_they_have_no_memory():
    tensor, first, second = torch.ones(2, 2), torch.ones(2, device="meta"), torch.ones(2, device="meta")

    assert undocumented.address_of(tensor.untyped_storage()) == tensor.data_ptr()
    addresses = {undocumented.address_of(item.untyped_storage()) for item in (first, first[1:], second)}
    assert len(addresses) == 2


# ---- the nodes of autograd's graph


class Own(torch.autograd.Function):
    """A function of the user's own."""

    @staticmethod
    def forward(ctx, tensor):
        ctx.save_for_backward(tensor)
        ctx.note = "kept"
        return tensor * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


NODES = {
    undocumented.TRANSPOSITION: (lambda: leaf(2, 3).t(), {}, {}),
    undocumented.MM: (
        lambda: leaf(2, 3) @ leaf(3, 4),
        {"self": (2, 3)},
        {"self_sym_sizes": (2, 3), "mat2_sym_sizes": (3, 4), "mat2_sym_strides": (4, 1)},
    ),
    undocumented.ADDMM: (
        lambda: F.linear(leaf(2, 3), leaf(4, 3), leaf(4)),
        {"mat1": (2, 3)},
        {"mat1_sym_sizes": (2, 3), "mat2_sym_sizes": (3, 4), "mat2_sym_strides": (1, 3), "alpha": 1, "beta": 1},
    ),
    undocumented.BMM: (lambda: torch.bmm(leaf(5, 2, 3), leaf(5, 3, 4)), {"self": (5, 2, 3)}, {}),
    undocumented.CONVOLUTION: (
        lambda: F.conv1d(leaf(2, 3, 7), leaf(4, 3, 2), leaf(4)),
        {"input": (2, 3, 7), "weight": (4, 3, 2)},
        {"stride": (1,), "padding": (0,), "dilation": (1,), "transposed": False}
        | {"output_padding": (0,), "groups": 1, "bias_sym_sizes_opt": (4,)},
    ),
    undocumented.EMBEDDING: (
        lambda: F.embedding(torch.tensor([1, 0]), leaf(5, 3)),
        {"indices": (2,)},
        {"weight_sym_argsize_0": 5, "scale_grad_by_freq": False, "sparse": False},
    ),
    undocumented.REENTRANT_CHECKPOINT: (lambda: checkpoint(torch.tanh, leaf(3), use_reentrant=True), {}, {}),
    undocumented.HOOKED_MODULE: (lambda: hooked_module()(leaf(3)), {}, {}),
    "OwnBackward": (lambda: Own.apply(leaf(3)), {}, {}),
}
"""By the names of nodes, how to make one, and the shapes of tensors and the numbers that it has saved."""


def hooked_module():
    module = nn.Tanh()
    module.register_full_backward_hook(lambda *args: None)
    return module


@pytest.mark.parametrize("kind", NODES)
def test_nodes_have_these_names_and_have_saved_these_tensors_and_numbers(kind):
    make, shapes, numbers = NODES[kind]
    node = make().grad_fn

    assert undocumented.kind_of(node) == kind
    assert {name: undocumented.saved(node, name).shape for name in shapes} == shapes
    assert {name: undocumented.saved(node, name) for name in numbers} == numbers


def test_a_node_leads_to_the_operands_in_their_order_and_that_of_a_leaf_knows_it():
    """`split/products.py` counts on it: a bias, the activations, the weight."""
    activations, weight, bias = leaf(2, 3), leaf(4, 3), leaf(4)
    with_bias = [node for node, _ in F.linear(activations, weight, bias).grad_fn.next_functions]
    without = [node for node, _ in (activations @ weight.t()).grad_fn.next_functions]

    for nodes, leaves in ((with_bias, (bias, activations)), (without, (activations,))):
        kinds = [undocumented.kind_of(node) for node in nodes]
        assert kinds == [*[undocumented.LEAF] * len(leaves), undocumented.TRANSPOSITION]
        assert all(undocumented.leaf_of(node) is own for node, own in zip(nodes, leaves, strict=False))


@pytest.mark.parametrize("is_moved", [True, False])
def test_a_node_shows_whether_others_keep_what_it_saved(is_moved):
    operands, made = (leaf(2, 3), leaf(3, 4)), leaf(3)
    with save_on_cpu() if is_moved else saved_tensors_hooks(lambda x: x, lambda x: x):
        kept = [operands[0] @ operands[1], Own.apply(made)]
    plain = [operands[0] @ operands[1], Own.apply(made), made + 1]

    assert undocumented.is_saved_elsewhere(kept[0].grad_fn, "self") != is_moved  # it is copied for whoever asks
    assert not undocumented.is_saved_elsewhere(plain[0].grad_fn, "self")
    assert all(undocumented.is_any_saved_elsewhere(output.grad_fn) for output in kept)
    assert not any(undocumented.is_any_saved_elsewhere(output.grad_fn) for output in plain)


def test_a_node_shows_that_hooks_bring_back_what_it_saved_as_often_as_it_is_asked_for():
    @undocumented.repeats
    def unpack(kept):
        return kept

    found = []
    for hook in (unpack, lambda kept: kept):
        with saved_tensors_hooks(lambda tensor: tensor, hook):
            node = torch.exp(leaf(3)).grad_fn
            found.append((undocumented.is_any_saved_elsewhere(node), undocumented.is_saved_elsewhere(node, "result")))

    assert found == [(False, False), (True, True)]


@pytest.mark.parametrize("is_debugged", [False, True])
def test_what_checkpointing_keeps_is_read_before_a_node_runs_and_computed_once(is_debugged):
    x, runs, results = leaf(2, 3), [], []

    def run(x):
        runs.append(x)
        return torch.exp(torch.exp(x))

    output = checkpoint(run, x, use_reentrant=False, debug=is_debugged)
    node = output.grad_fn
    node.register_prehook(lambda _: results.append(undocumented.saved_before_run(node, "result")))
    assert not undocumented.is_saved_elsewhere(node, "result")
    assert undocumented.is_any_saved_elsewhere(node)

    output.sum().backward()

    assert torch.equal(*results, output)
    assert torch.equal(x.grad, torch.exp(x) * output)
    assert len(runs) == 2


def test_a_node_of_a_function_in_python_stays_in_the_graph_or_what_leads_to_it_has_to_be_kept():
    output = Own.apply(leaf(3) * 2)
    node, edge = output.grad_fn, get_gradient_edge(output)
    assert node.note == "kept"  # by its context
    del output
    assert len(node.next_functions) == 1
    del edge

    leads_on = False
    with suppress(RuntimeError):
        leads_on = bool(node.next_functions)
    assert undocumented.nodes_in_python_stay() == leads_on


MADE_OF_A_TABLE = {
    "VIEWS": [
        torch.t,
        lambda w: w.transpose(0, 1),
        lambda w: w.permute(1, 0),
        lambda w: w.view(-1),
        lambda w: w.expand(2, 4, 4),
        lambda w: w[None],
        lambda w: w[0],
        lambda w: w[1:],
        lambda w: w[1:2].squeeze(),
        lambda w: w.split(2)[0],
        lambda w: w.split([1, 3])[0],
        lambda w: w.unbind()[0],
        lambda w: w.diagonal(),
        lambda w: w.t().reshape(4, 2, 2),
    ],
    "LOOKUPS": [
        lambda table: F.embedding(ROWS, table),
        lambda table: F.embedding_bag(ROWS[None], table),
        lambda table: table[ROWS],
        lambda table: table.index_select(0, ROWS),
        lambda table: table.gather(0, ROWS[None]),
        lambda table: table.take(ROWS),
    ],
}


@pytest.mark.parametrize("kinds", MADE_OF_A_TABLE)
def test_views_and_look_ups_have_nodes_of_their_kinds(kinds):
    made = {undocumented.kind_of(make(leaf(4, 4)).grad_fn) for make in MADE_OF_A_TABLE[kinds]}

    assert made - set(getattr(undocumented, kinds)) == set()


class TwoOutputs(torch.autograd.Function):
    """With arguments that are no tensors, or need no gradient."""

    @staticmethod
    def forward(ctx, scale, first, constant, second):
        ctx.save_for_backward(first, second)
        ctx.scale = scale
        return first * second * scale, first + constant

    @staticmethod
    def backward(ctx, of_product, of_sum):
        first, second = ctx.saved_tensors
        return None, of_product * second * ctx.scale + of_sum, None, of_product * first * ctx.scale


def test_a_node_knows_what_arrives_at_it_and_what_it_has_saved():
    first, second = leaf(2, 3), leaf(3)
    product, _ = TwoOutputs.apply(2, first, torch.ones(3), second)
    tanh = torch.tanh(second.double())

    assert undocumented.num_outputs(product.grad_fn) == 2
    assert undocumented.metadata_at(get_gradient_edge(product)) == ((2, 3), torch.float32, torch.device("cpu"))
    assert undocumented.metadata_at(get_gradient_edge(tanh)).dtype == torch.float64
    assert undocumented.metadata_at(get_gradient_edge(second)).shape == (3,)
    for output, saved in ((product, (first, second)), (tanh, (tanh,))):
        found = undocumented.saved_tensors(output.grad_fn)
        assert [each.data_ptr() for each in found] == [each.data_ptr() for each in saved]
    assert undocumented.saved_tensors((first + 1).grad_fn) == []


def test_a_function_in_python_is_the_context_of_its_backward_which_something_may_stand_in_for():
    """What stands in gets gradients that are all there."""
    first, second, seen = leaf(2, 3), leaf(2, 3), []
    output, _ = TwoOutputs.apply(2, first, torch.ones(3), second)
    node = output.grad_fn

    assert [undocumented.is_function(each) for each in (node, (output + 1).grad_fn)] == [True, False]
    assert [undocumented.function_of(each) for each in (node, object())] == [TwoOutputs, None]
    assert undocumented.arguments_of(node, [0, 2]) == [1, 3]
    assert undocumented.backward_of(TwoOutputs) is TwoOutputs.backward
    with torch.no_grad():
        found = undocumented.run_node(node, [torch.ones(2, 3), torch.zeros(2, 3)], [2, 0])
    assert all(map(torch.equal, found, (first * 2, second * 2)))

    def run(*gradients):
        seen.append([each is None for each in gradients])
        return (*before(*gradients)[:3], None)

    before = undocumented.run_instead(node, run)
    output.sum().backward(retain_graph=True)
    assert seen == [[False, False]]
    assert torch.equal(first.grad, second * 2)
    assert second.grad is None

    undocumented.run_instead(node, None)
    output.sum().backward()
    assert second.grad is not None
    assert vars(node) == {"scale": 2}


def test_a_backward_comes_first_to_what_was_made_last():
    x, seen = leaf(3), []
    values = [torch.tanh(x), torch.exp(x)]
    later = values[0] * 2
    for name, value in (("tanh", values[0]), ("exp", values[1]), ("later", later)):
        value.grad_fn.register_prehook(lambda _, name=name: seen.append(name))

    (values[1].sum() + later.sum()).backward()

    orders = [undocumented.order_of(each.grad_fn) for each in (values[0], values[1], later)]
    assert orders == sorted(orders)
    assert seen == ["later", "exp", "tanh"]


def test_a_gradient_that_is_handed_over_has_passed_hooks_and_its_node_does_not_run():
    """`DeferredWeights` then runs the node by itself, in I for leaves and in W for branches."""
    x, w, seen = leaf(3), leaf(3), []
    made = torch.tanh(w)
    made.retain_grad()
    made.register_hook(lambda gradient: seen.append("hook"))
    made.grad_fn.register_prehook(lambda gradients: seen.append("node"))
    x.register_hook(lambda gradient: seen.append("leaf"))
    x.register_post_accumulate_grad_hook(lambda tensor: seen.append("accumulated"))
    edges = get_gradient_edge(made), get_gradient_edge(x)
    output = get_gradient_edge((x * made).sum())

    found = torch.autograd.grad([output], edges, [torch.ones(())], allow_unused=True)

    assert sorted(seen) == ["hook", "leaf"]
    assert (made.grad is not None, x.grad, w.grad) == (True, None, None)
    seen.clear()
    with torch.no_grad():
        (of_w,) = undocumented.run_node(made.grad_fn, [found[0]], [0])
        undocumented.run_node(edges[1].node, [found[1]], [])
    assert seen == ["accumulated"]
    assert torch.allclose(of_w, x * (1 - made**2))
    assert torch.equal(x.grad, made)


def test_a_backward_may_be_named_otherwise_and_may_run_only_once():
    class Other(torch.autograd.Function):
        boxed_grads_call = True

        @staticmethod
        def vjp(ctx, gradient):
            return gradient

    assert undocumented.backward_of(Other) is Other.vjp
    assert [undocumented.runs_once(each) for each in (Other, TwoOutputs)] == [True, False]
    assert hasattr(torch.autograd.Function, "clear_saved_tensors_on_access")


# ---- the backwards of single operations


@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_backward_of_a_convolution_takes_these_arguments(is_transposed):
    function = F.conv_transpose1d if is_transposed else F.conv1d
    operands = leaf(2, 3, 7), leaf(3, 3, 2), leaf(3)
    output = function(*operands, stride=2, padding=1)
    gradient = torch.ones_like(output)
    geometry = ([2], [1], [1], is_transposed, [0], 1)

    def backward(*needs):
        return undocumented.convolution_backward(gradient, *operands[:2], geometry, [3], needs)

    expected = torch.autograd.grad(output, operands, gradient)
    assert all(map(torch.equal, backward(True, True, True), expected))
    assert [each is None for each in backward(False, False, True)] == [True, True, False]


@pytest.mark.parametrize(("padding", "row"), [(None, -1), (1, 1), (-1, 4)])
def test_the_backward_of_a_table_takes_these_arguments_of_which_the_row_without_a_gradient_is_a_number(padding, row):
    table, rows = leaf(5, 3), torch.tensor([1, 0, 4, 4])
    output = F.embedding(rows, table, padding)
    gradient = torch.ones_like(output)

    assert undocumented.saved_padding(output.grad_fn) == row
    found = undocumented.embedding_backward(gradient, rows, 5, row, False, False)
    assert torch.equal(found, *torch.autograd.grad(output, table, gradient))


# ---- operations by their names


class Operations(TorchDispatchMode):
    """Notes which operations run."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.seen.append(function)
        return function(*args, **kwargs or {})


@pytest.mark.parametrize(
    "run",
    [
        lambda: F.linear(torch.ones(2, 3), torch.ones(4, 3)),
        lambda: F.linear(torch.ones(2, 3), torch.ones(4, 3), torch.ones(4)),
        lambda: torch.ones(2, 3, 4) @ torch.ones(2, 4, 3),
        lambda: F.scaled_dot_product_attention(*[torch.ones(1, 1, 4, 8)] * 3, is_causal=True),
    ],
)
def test_products_and_attention_run_as_operations_of_these_names(run):
    with Operations() as operations:
        run()

    assert len(set(operations.seen) & set(undocumented.EXPENSIVE)) == 1


# ---- modules, modes and hooks


@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")
def test_a_traced_forward_shows_its_arguments():
    layer = nn.Bilinear(3, 3, 1)
    traced = torch.jit.trace(layer, (torch.ones(3), torch.ones(3)))

    assert undocumented.traced_arguments(traced.forward) == ["input1", "input2"]
    assert undocumented.traced_arguments(layer.forward) is None


class Seen(TorchFunctionMode):
    """Notes the functions that are called, with their keywords."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.calls.append((func, dict(kwargs or {})))
        return func(*args, **(kwargs or {}))


def test_a_mode_sees_a_backward_of_tensors_and_none_of_edges_and_is_off_within_what_it_sees():
    """`split/` calls a backward with edges where a mode is to see what layers do that run again in it.

    `split/deferred_weights.py` reads the gradients of one within reentrant checkpointing, which come by keyword.
    """
    functions, given = [], torch.ones(3)
    for of_edges in (True, False):
        output = checkpoint(torch.tanh, leaf(3), use_reentrant=False)
        root = get_gradient_edge(output) if of_edges else output
        with Seen() as seen:
            torch.autograd.backward(root, given)
        functions.append([func for func, _ in seen.calls if func in (torch.autograd.backward, torch.tanh)])

    assert functions == [[torch.tanh], [torch.autograd.backward]]
    (keywords,) = [keywords for func, keywords in seen.calls if func is torch.autograd.backward]
    assert keywords["grad_tensors"] is given
    assert not any(keywords.get(name) for name in ("retain_graph", "create_graph", "inputs"))


def test_reentrant_checkpointing_refuses_a_backward_to_chosen_leaves():
    """`split/deferred_weights.py` splits the backward that runs within it instead."""
    tensor = leaf(3)
    output = checkpoint(torch.tanh, tensor, use_reentrant=True)

    with pytest.raises(RuntimeError, match="checkpoint"):
        torch.autograd.backward(output, torch.ones(3), inputs=[tensor])


def test_a_backward_to_chosen_leaves_and_edges_leaves_out_the_others():
    first, second, third = leaf(2, 3), leaf(3, 4), leaf(4, 5)
    hidden = first @ second
    output = hidden @ third
    arrived = []
    hidden.grad_fn.register_prehook(arrived.append)
    inputs = [get_gradient_edge(hidden), get_gradient_edge(third)]

    torch.autograd.backward(get_gradient_edge(output), torch.ones(2, 5), inputs=inputs)

    assert len(arrived) == 1  # though the node itself does not run
    assert third.grad is not None
    assert first.grad is second.grad is None


def test_what_hooks_get_of_an_output_that_its_own_node_saves_keeps_the_node_alive_and_a_detached_one_does_not():
    """`observing/ledger.py` keeps detached ones."""
    ends = []
    for pack in (lambda tensor: tensor, torch.Tensor.detach):
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            output = leaf(3).exp()
        ends.append(weakref.ref(output.untyped_storage()))
        del output

    assert [end() is None for end in ends] == [False, True]


# ---- torch.distributed


def test_what_a_collective_is_still_filling_can_be_waited_for(world):
    """`local_part` of DTensors asks for it by that name."""
    pending = functional_collectives.all_reduce(torch.ones(3), "sum", dist.group.WORLD)

    assert pending.wait().tolist() == [1.0] * 3


# ---- texts of errors


@pytest.mark.parametrize(
    ("act", "is_known"),
    [
        (lambda: leaf(3).add_(1), undocumented.is_leaf_changed_in_place),
        (lambda: torch.empty(2**60), undocumented.is_out_of_memory),
    ],
    ids=["a leaf that is changed in place", "memory that ran out"],
)
def test_errors_are_known_by_their_texts(act, is_known):
    with pytest.raises(RuntimeError) as caught:
        act()

    assert is_known(caught.value)
    assert not is_known(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    assert undocumented.is_out_of_memory(MemoryError())


def test_checkpointing_brings_back_what_it_keeps_once():
    """`saved_before_run` is for that."""
    output = checkpoint(torch.exp, leaf(2, 3), use_reentrant=False)
    node, results = output.grad_fn, []
    node.register_prehook(lambda _: results.append(undocumented.saved(node, "result")))

    with pytest.raises(CheckpointError, match="already"):
        output.sum().backward()
