"""Refuses inputs behind which lies a graph that only one backward can run through, while every microbatch has one."""

from collections.abc import Iterable, Iterator

from torch import Tensor
from torch.autograd.graph import Node

from penstock.errors import PipelineError
from penstock.execute.batch.leaves import Leaf
from penstock.execute.undocumented import is_any_saved_elsewhere, saved_tensors


def refuse_shared_graphs(leaves: Iterable[Leaf], num_microbatches: int) -> None:
    """Refuse values that were computed with gradients, where a backward frees what another one needs.

    A leaf of autograd has no such graph. A graph whose nodes have saved nothing, as of a view, runs many times.

    Raises:
        PipelineError: naming the value.
    """
    for leaf in leaves:
        grad_fn = leaf.value.grad_fn if isinstance(leaf.value, Tensor) else None
        # A backward frees what any node from this one to the leaves has saved.
        if grad_fn is not None and any(map(_has_saved, nodes_behind([grad_fn], set()))):
            raise PipelineError(
                f"{leaf.place} is no leaf but computed with gradients (grad_fn {grad_fn.name()}), and each of the "
                f"{num_microbatches} microbatches would run backward through that computation, which one backward "
                f"alone can. Pass {leaf.place}.detach(), or make the computation a layer"
            )


def nodes_behind(nodes: Iterable[Node | None], visited_nodes: set[Node]) -> Iterator[Node]:
    """Walk from some nodes of a graph to its leaves; skip those in `visited_nodes`, and add the others to it."""
    pending_nodes = list(nodes)
    while pending_nodes:
        node = pending_nodes.pop()
        if node is not None and node not in visited_nodes:
            visited_nodes.add(node)
            yield node
            pending_nodes += [next_node for next_node, _ in node.next_functions]


def _has_saved(node: Node) -> bool:
    try:
        return is_any_saved_elsewhere(node) or bool(saved_tensors(node))
    except RuntimeError:  # a backward has freed them
        return True
