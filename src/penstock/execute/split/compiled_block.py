"""The backward of a compiled block: whole, or in two halves, whichever autograd's node for it has been asked for.

    compiler    the graph of a backward -> `BlockBackward`, which stands in the place of the compiled backward
    walk        the node in autograd's graph -> `CompiledBlock`, which asks the node for the input half in I
    W           runs the weight half on what the input half has kept

The halves are compiled when they are first run: which outputs are gradients of weights is known from the graph that
leads on from the node, and a schedule with whole backwards needs neither.
"""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, fx
from torch.autograd.graph import GradientEdge

from penstock.errors import warn
from penstock.execute.split.deferred_node import DeferredNode
from penstock.execute.split.graph_cut import BackwardGraph, Cut, Half
from penstock.execute.split.weight_graph import WeightGraph, open_places
from penstock.execute.undocumented_compiler import backward_of, boxed, continuing, running_node, without_autocast

Run = Callable[[list[Any]], Sequence[Tensor | None]]
"""Something compiled; it empties the list of its arguments, so that they are free as soon as they have been used."""
Compile = Callable[[fx.GraphModule, Sequence[Any]], Run]
"""Compiles a graph for inputs like the given ones."""
_ATTRIBUTE = "penstock_block"
_ASKED = "penstock_deferred"


class BlockBackward:
    """The backward of a compiled block, which all layers have that share its code."""

    def __init__(
        self,
        module: fx.GraphModule,
        inputs: Sequence[Any],
        is_tensor: Sequence[bool],
        compile_whole: Compile,
        compile_half: Compile,
    ) -> None:
        """`is_tensor` says of each input of the block's forward whether it is a tensor."""
        self._whole_graph = module
        self._graph = BackwardGraph(deepcopy(module))
        self._inputs = inputs
        self._continue = continuing()
        self._compile_whole = compile_whole
        self._compile_half = compile_half
        self._run_whole_compiled: Run | None = None
        self._halves: dict[frozenset[int], Halves] = {}
        self._is_warned = False
        self.num_outputs = len(self._graph.outputs)
        """One per input of the block's forward."""
        self._output_of_place = [place for place, has_tensor in enumerate(is_tensor) if has_tensor]
        self._trouble = self._graph.trouble()
        if len(is_tensor) != self.num_outputs:
            self._trouble = f"it has {self.num_outputs} gradients for {len(is_tensor)} inputs"

    def function(self) -> Run:
        """Return what autograd's node is to run."""

        def run_backward(arguments: list[Any]) -> Sequence[Tensor | None]:
            deferred_block: CompiledBlock | None = getattr(running_node(), _ASKED, None)
            return self.run_whole(arguments) if deferred_block is None else deferred_block.run(arguments)

        setattr(run_backward, _ATTRIBUTE, self)
        return boxed(run_backward)

    def run_whole(self, arguments: list[Any]) -> Sequence[Tensor | None]:
        """Return the gradients of all inputs."""
        if self._run_whole_compiled is None:
            compile_whole, graph = self._compile_whole, self._whole_graph
            self._run_whole_compiled = self._continue(lambda: compile_whole(deepcopy(graph), self._inputs))
        return self._run_whole_compiled(arguments)

    def find(self, node: Any, graph: WeightGraph) -> "CompiledBlock | None":
        """Return the block at a node, with the weight gradients that can wait there; None where none can."""
        if self._trouble or len(node.next_functions) != len(self._output_of_place):
            self._warn(self._trouble or "it has other inputs than its graph")
            return None
        weight_places = [place for place in open_places(node) if graph.origin_at(node, [place]) is not None]
        halves = self._halves_for(frozenset(self._output_of_place[place] for place in weight_places))
        if halves.has_failed:
            return None
        late_outputs = halves.cut.weight_half.outputs
        deferred_places = [place for place in weight_places if self._output_of_place[place] in late_outputs]
        origin = graph.origin_at(node, deferred_places)
        if origin is None:
            return None
        # Each weight counts the multiplications of all of them: the whole block waits, or none of it.
        num_multiplications = halves.cut.num_multiplications if origin.is_plain else math.inf
        return CompiledBlock(node, origin, deferred_places, "compiled", num_multiplications, halves)

    def _halves_for(self, weight_outputs: frozenset[int]) -> "Halves":
        """Return the halves to use where these outputs are gradients of weights; several sets may have one cut."""
        if weight_outputs not in self._halves:
            waiting_outputs = self._graph.waiting_outputs(weight_outputs)
            halves = self._halves.get(waiting_outputs) or Halves(self, self._graph.cut(waiting_outputs))
            self._halves[waiting_outputs] = self._halves[weight_outputs] = halves
        return self._halves[weight_outputs]

    def compile_halves(self, cut: Cut) -> tuple[Run, Run] | None:
        """Compile both halves for inputs like those of the whole; None, with a warning, where that fails."""
        try:
            return self._compile(cut.input_half), self._compile(cut.weight_half)
        except Exception as error:  # a compiler may raise anything, and the whole backward can take the place of both
            self._warn(f"its halves do not compile ({type(error).__name__}: {error})")
            return None

    def _compile(self, half: Half) -> Run:
        inputs = [*[self._inputs[place] for place in half.inputs], *half.extras]
        return self._continue(lambda: self._compile_half(half.module, inputs))

    def _warn(self, trouble: str) -> None:
        if not self._is_warned:
            self._is_warned = True
            warn(
                f"a compiled block's backward is not split: {trouble}. Its weight gradients are computed in I; they "
                "are right, but leave W less to do"
            )


class Halves:
    """A cut of a block's backward, compiled when it is first run.

    Where they do not compile, the input half runs the whole backward, and keeps the gradients of the weights; the
    weight half then returns these.
    """

    def __init__(self, block: BlockBackward, cut: Cut) -> None:
        self.cut = cut
        self.num_outputs = block.num_outputs
        self._block = block
        self.has_failed = False
        """Whether the halves do not compile."""
        self._compiled: tuple[Run, Run] | None = None

    def run_input_half(self, arguments: list[Any]) -> tuple[list[Tensor | None], list[Any]]:
        """Return the gradients of I, None for the others, and what W needs; the arguments are emptied."""
        input_half, weight_half = self.cut.input_half, self.cut.weight_half
        if self._compiled is None and not self.has_failed:
            self._compiled = self._block.compile_halves(self.cut)
            self.has_failed = self._compiled is None
        if self._compiled is None:
            gradients = list(self._block.run_whole(arguments))
            weight_gradients = [gradients[place] for place in weight_half.outputs]
            for place in weight_half.outputs:
                gradients[place] = None
            return gradients, weight_gradients
        input_arguments = [arguments[place] for place in input_half.inputs]
        weight_arguments = [arguments[place] for place in weight_half.inputs]
        arguments.clear()
        results = list(self._compiled[0](input_arguments))
        gradients = [None] * self.num_outputs
        for place, gradient in zip(input_half.outputs, results, strict=False):
            gradients[place] = gradient
        return gradients, weight_arguments + results[len(input_half.outputs) :]

    def run_weight_half(self, weight_arguments: list[Any]) -> Sequence[Tensor | None]:
        """Return the gradients of W, in the order of the outputs; `weight_arguments` is emptied."""
        if self._compiled is None:
            return weight_arguments
        with without_autocast():
            return self._compiled[1](weight_arguments)


@dataclass(slots=True, eq=False)
class CompiledBlock(DeferredNode):
    """A compiled block in a graph, whose node runs the input half in I."""

    halves: Halves
    _reached_nodes: list[DeferredNode] = field(init=False, default_factory=list)

    def target_edges(self, *, captures_gradients: bool) -> Sequence[GradientEdge]:
        """Return an edge behind the node, which gets no gradient then, to have the node run the input half."""
        node_edges = DeferredNode.target_edges(self, captures_gradients=captures_gradients)
        return self.roots[:1] if node_edges and captures_gradients else node_edges

    def watch(self, reached_nodes: list[DeferredNode]) -> None:
        """Have the node run the input half, and add this to a list when it does."""
        self._reached_nodes = reached_nodes
        setattr(self.node, _ASKED, self)

    def run(self, arguments: list[Any]) -> Sequence[Tensor | None]:
        """Run the input half, in the place of the whole backward."""
        gradients, weight_arguments = self.halves.run_input_half(arguments)
        self.hold(weight_arguments, unchanging=weight_arguments)
        self._reached_nodes.append(self)
        return gradients

    def release(self) -> None:
        if hasattr(self.node, _ASKED):
            delattr(self.node, _ASKED)
        self.node, self._reached_nodes = None, []

    def gradients(self) -> Sequence[Tensor | None]:
        """Run the weight half."""
        subject = "a tensor of shape {shape} that a compiled block keeps for its weight gradients was"
        return self.halves.run_weight_half([*self.take_operands(subject)])


def find_compiled_block(node: Any, graph: WeightGraph) -> CompiledBlock | None:
    """Find the node of a compiled block; None if another backend has compiled it."""
    block: BlockBackward | None = getattr(backward_of(node), _ATTRIBUTE, None)
    return None if block is None else block.find(node, graph)
