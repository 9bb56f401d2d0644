"""The table of finders: who is asked, at each node of a graph, whether weight gradients can wait for W there.

Layers that compute their weight gradients by themselves are not found in the graph: they hand a function over in I
(own_weight_gradients).
"""

from collections.abc import Mapping

from penstock.execute.split.compiled_block import find_compiled_block
from penstock.execute.split.custom_function import find_custom_function
from penstock.execute.split.deferred_node import Finder
from penstock.execute.split.products import NODES
from penstock.execute.split.weight_branch import find_branch
from penstock.execute.undocumented_compiler import COMPILED

OF_OWN_NODES: Mapping[str, Finder] = {COMPILED: find_compiled_block}
"""By the kind of a node that a compiler has made; nobody else is asked about it."""
ANYWHERE: Finder = find_branch
"""Asked first about any other node."""
BY_KIND: Mapping[str, Finder] = NODES
"""By the kind of one of autograd's nodes."""
OF_FUNCTIONS: Finder = find_custom_function
"""Asked about other nodes that are written in Python."""
