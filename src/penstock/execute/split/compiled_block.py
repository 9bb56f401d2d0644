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
from penstock.execute.split.graph_cut import BackwardGraph, Cut, Half
from penstock.execute.split.waiting import Waiting
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
        self, module: fx.GraphModule, inputs: Sequence[Any], is_tensor: Sequence[bool], whole: Compile, half: Compile
    ) -> None:
        """`is_tensor` says it of each input of the block's forward; `whole` and `half` compile."""
        self._whole_graph = module
        self._graph = BackwardGraph(deepcopy(module))
        self._inputs = inputs
        self._continue = continuing()
        self._compile_whole = whole
        self._compile_half = half
        self._whole: Run | None = None
        self._halves: dict[frozenset[int], Halves] = {}
        self._is_warned = False
        self.num_outputs = len(self._graph.outputs)
        """One per input of the block's forward."""
        self._output_of_place = [place for place, is_one in enumerate(is_tensor) if is_one]
        self._trouble = self._graph.trouble()
        if len(is_tensor) != self.num_outputs:
            self._trouble = f"it has {self.num_outputs} gradients for {len(is_tensor)} inputs"

    def function(self) -> Run:
        """Return what autograd's node is to run."""

        def run(arguments: list[Any]) -> Sequence[Tensor | None]:
            asked: CompiledBlock | None = getattr(running_node(), _ASKED, None)
            return self.run_whole(arguments) if asked is None else asked.run(arguments)

        setattr(run, _ATTRIBUTE, self)
        return boxed(run)

    def run_whole(self, arguments: list[Any]) -> Sequence[Tensor | None]:
        """Return the gradients of all inputs."""
        if self._whole is None:
            self._whole = self._continue(lambda: self._compile_whole(deepcopy(self._whole_graph), self._inputs))
        return self._whole(arguments)

    def find(self, node: Any, graph: WeightGraph) -> "CompiledBlock | None":
        """Return the weight gradients of a node that can wait, None where there are none."""
        if self._trouble or len(node.next_functions) != len(self._output_of_place):
            self._warn(self._trouble or "it has other inputs than its graph")
            return None
        weights = [place for place in open_places(node) if graph.at(node, [place]) is not None]
        halves = self._halves_for(frozenset(self._output_of_place[place] for place in weights))
        if halves.has_failed:
            return None
        places = [place for place in weights if self._output_of_place[place] in halves.cut.weight_half.outputs]
        made_of = graph.at(node, places)
        if made_of is None:
            return None
        # Of each weight, those of all: the whole block waits, or none of it.
        size = halves.cut.num_multiplications if made_of.is_plain else math.inf
        return CompiledBlock(node, made_of, places, "compiled", size, halves)

    def _halves_for(self, weights: frozenset[int]) -> "Halves":
        if weights not in self._halves:
            waiting = self._graph.waiting(weights)
            known = self._halves.get(waiting)
            self._halves[waiting] = self._halves[weights] = known or Halves(self, self._graph.cut(waiting))
        return self._halves[weights]

    def compile_halves(self, cut: Cut) -> tuple[Run, Run] | None:
        """Compile both halves for inputs like those of the whole; None, with a warning, where that fails."""
        try:
            return self._compile(cut.input_half), self._compile(cut.weight_half)
        except Exception as error:  # whatever a compiler stumbles over: the whole backward was compiled, or will be
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

    Where that fails, the first half is the whole: it keeps the gradients of the weights, which the second returns.
    """

    def __init__(self, block: BlockBackward, cut: Cut) -> None:
        self.cut = cut
        self.num_outputs = block.num_outputs
        self._block = block
        self.has_failed = False
        """Whether the halves do not compile."""
        self._compiled: tuple[Run, Run] | None = None

    def run_first(self, arguments: list[Any]) -> tuple[list[Tensor | None], list[Any]]:
        """Return the gradients of I, None for the others, and what W needs; the arguments are emptied."""
        first, second = self.cut.input_half, self.cut.weight_half
        if self._compiled is None and not self.has_failed:
            self._compiled = self._block.compile_halves(self.cut)
            self.has_failed = self._compiled is None
        if self._compiled is None:
            all_gradients = self._block.run_whole(arguments)
            early = [None if place in second.outputs else each for place, each in enumerate(all_gradients)]
            return early, [all_gradients[place] for place in second.outputs]
        taken, kept = [arguments[place] for place in first.inputs], [arguments[place] for place in second.inputs]
        arguments.clear()
        results = list(self._compiled[0](taken))
        gradients: list[Tensor | None] = [None] * self.num_outputs
        for place, gradient in zip(first.outputs, results, strict=False):
            gradients[place] = gradient
        return gradients, kept + results[len(first.outputs) :]

    def run_second(self, kept: list[Any]) -> Sequence[Tensor | None]:
        """Return the gradients of W, in the order of all; what was kept is emptied."""
        if self._compiled is None:
            return kept
        with without_autocast():
            return self._compiled[1](kept)


@dataclass(slots=True, eq=False)
class CompiledBlock(Waiting):
    """A compiled block in a graph, whose node runs the input half in I."""

    halves: Halves
    _found: list[Waiting] = field(init=False, default_factory=list)

    def ends(self, *, hands_over: bool) -> Sequence[GradientEdge]:
        """Return an edge behind the node, which gets no gradient then, to have the node run the input half."""
        ends = Waiting.ends(self, hands_over=hands_over)
        return self.roots[:1] if ends and hands_over else ends

    def watch(self, found: list[Waiting]) -> None:
        """Have the node run the input half, and add this to a list when it does."""
        self._found = found
        setattr(self.node, _ASKED, self)

    def run(self, arguments: list[Any]) -> Sequence[Tensor | None]:
        """Run the input half, in the place of the whole backward."""
        gradients, kept = self.halves.run_first(arguments)
        self.hold(kept, checked=kept)
        self._found.append(self)
        return gradients

    def release(self) -> None:
        if hasattr(self.node, _ASKED):
            delattr(self.node, _ASKED)
        self.node, self._found = None, []

    def gradients(self) -> Sequence[Tensor | None]:
        """Run the weight half; return the gradients of the weights, one per root, and release everything.

        Raises:
            PipelineError: what it needs has been changed in place since the backward ran.
        """
        subject = "a tensor of shape {shape} that a compiled block keeps for its weight gradients was"
        return self.halves.run_second([*self.take_operands(subject)])


def find_compiled_block(node: Any, graph: WeightGraph) -> CompiledBlock | None:
    """Find the node of a compiled block; None if another backend has compiled it."""
    block: BlockBackward | None = getattr(backward_of(node), _ATTRIBUTE, None)
    return None if block is None else block.find(node, graph)
