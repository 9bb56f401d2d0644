"""The lists of blocks of a model that its forward calls one after another, and the layers that they are cut into.

called    patch_embed  blocks.0  merger.0  blocks.1  norm    embed  layers.0  layers.1  norm  lm_head
chains                 blocks....................            ....   layers............
layers    begin        blocks.0            blocks.1  embed..........layers.0  layers.1  lm_head......
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from torch import nn

from penstock.errors import ConfigError, nearest
from penstock.hugging_face.source import KEY
from penstock.models.cutting.forward import Segment
from penstock.models.cutting.order import CallOrder
from penstock.models.cutting.points import names_like
from penstock.models.cutting.trees import tensors_in


def block_lists(model: nn.Module, patterns: Sequence[str] | None = None) -> list[str]:
    """Return the names of the outermost lists of submodules with parameters, or of those that the patterns match.

    In a pattern `*` stands for one part of a name. Raises: ConfigError, if there is no such list.
    """
    names = [name for name, module in model.named_modules() if _is_block_list(module)]
    if patterns is not None:
        return _matching_lists(model, names, patterns)
    outermost = [name for name in names if not any(name.startswith(f"{outer}.") for outer in names)]
    if not outermost:
        raise ConfigError(
            f"{type(model).__name__} has no list of blocks (an nn.ModuleList with parameters), so there is nothing to "
            "cut it at; ps.cut cuts any module at the submodules that you name",
            key=KEY,
        )
    return outermost


def _is_block_list(module: nn.Module) -> bool:
    """Whether a module is a list with parameters; one of lists is none, since these have no forward."""
    is_list = isinstance(module, nn.ModuleList) and not any(isinstance(item, nn.ModuleList) for item in module)
    return is_list and any(True for _ in module.parameters())


def _matching_lists(model: nn.Module, names: Sequence[str], patterns: Sequence[str]) -> list[str]:
    if isinstance(patterns, str) or not patterns:
        raise ConfigError(f"{patterns!r}; expected a list of names of lists, such as ['model.layers']", key="chains")
    matching_names: dict[str, None] = {}
    for pattern in patterns:
        matches = names_like(pattern, names)
        if not matches:
            raise ConfigError(
                f"{pattern!r} names no list of blocks of {type(model).__name__}.{nearest(str(pattern), names)} Give "
                f"names of these: {', '.join(names) or 'none'}; * stands for one part of a name",
                key="chains",
            )
        matching_names |= dict.fromkeys(matches)
    nested = [name for name in matching_names if any(name.startswith(f"{outer}.") for outer in matching_names)]
    if nested:
        raise ConfigError(f"{nested[0]!r} lies in another one of them; give one of the two", key="chains")
    return list(matching_names)


def called_chains(lists: Sequence[str], order: CallOrder, *, is_default: bool = True) -> list[str]:
    """Return the lists whose items the forward calls one after another, in the order of their first calls.

    By default a list whose items are called between those of a longer one is none: a vision tower calls its mergers so.
    """
    indices: dict[str, list[int]] = {}
    for index, call in enumerate(order.calls):
        for name in lists:
            if call.name.startswith(f"{name}."):
                indices.setdefault(name, []).append(index)

    def is_between(name: str) -> bool:
        first, last, number = indices[name][0], indices[name][-1], len(indices[name])
        overlapping = (other for other in indices.items() if other[1][0] < last and first < other[1][-1])
        return any((len(other), -other[0]) > (number, -first) for _, other in overlapping)

    return [name for name in indices if not (is_default and is_between(name))]


def layer_segments(segments: Mapping[str, Segment], chains: Sequence[str]) -> dict[str, Segment]:
    """Join the segments of single points to one for each layer, by the name of the layer.

    A layer begins at each block of a chain. Points between two blocks of one chain belong to the block before them. All
    points behind the last block of a chain, up to the next chain, are one layer, with the name of the last of them.
    """
    names = list(segments)
    chain_of = {name: chain for name in names for chain in chains if name.startswith(f"{chain}.")}
    last_blocks = {chain: name for name, chain in chain_of.items()}
    groups: list[list[str]] = []
    for index, name in enumerate(names):
        previous = names[index - 1] if index else None
        is_behind_chain = previous is not None and last_blocks.get(chain_of.get(previous, "")) == previous
        if previous is None or name in chain_of or is_behind_chain:
            groups.append([])
        groups[-1].append(name)
    joined = {}
    for group in groups:
        first, last = segments[group[0]], segments[group[-1]]
        modules = tuple(module for name in group for module in segments[name].modules)
        tensors = tuple(tensor for name in group for tensor in segments[name].tensors)
        layer_name = group[0] if group[0] in chain_of else group[-1]
        joined[layer_name] = replace(first, stop=last.stop, modules=modules, tensors=tensors)
    return joined


def positions_by_layer(layers: Collection[str], chains: Sequence[str], order: CallOrder) -> dict[str, float]:
    """Return how many positions each layer works on, relative to the last chain, as a run without values shows.

    Layers between chains have those of the chain before them, what begins the forward those of the first one.
    """
    values = {call.name: next(iter(tensors_in((call.args, call.kwargs))), None) for call in order.calls}
    by_chain = {}
    for chain in chains:
        value = next(value for name, value in values.items() if name.startswith(f"{chain}."))
        by_chain[chain] = 1 if value is None else value.numel() / value.shape[-1]
    positions, current = {}, chains[0]
    for name in layers:
        current = next((chain for chain in chains if name.startswith(f"{chain}.")), current)
        positions[name] = by_chain[current] / by_chain[chains[-1]]
    return positions
