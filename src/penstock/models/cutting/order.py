"""In which order a forward calls the submodules of a cut model, which may differ from the order of their definition.

defined   embedding  norm  blocks.0  blocks.1  head        called   embedding  blocks.0  blocks.1  norm  head
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from penstock.models.cutting.entry import Entry, PartCall
from penstock.models.cutting.frame import Template
from penstock.models.cutting.points import CutModel
from penstock.models.cutting.trials import Trials


def in_order_of_calls(
    model: nn.Module, cut: CutModel, block_prefix: str, complete: Any, entry: Entry, batch: PartCall
) -> CutModel:
    """Return a cut whose points are in the order in which the forward calls them, found by a run without values.

    `block_prefix` is the name of the blocks before their numbers, such as `model.layers.`; the blocks stay points.
    Modules that the forward calls before the first block, or never, belong to what runs before the first point. A
    forward that raises, or calls one of the later modules twice, leaves the cut as it is.
    """
    blocks = tuple(name for name in cut.points if name.startswith(block_prefix))
    further_modules = (*cut.begin_modules, *(name for name in cut.points if name not in blocks))
    template = Template(model, replace(cut, points=blocks, begin_modules=further_modules), complete)
    try:
        with torch.no_grad():
            called_names = Trials(template, entry).called_names(batch)
    except Exception:
        return cut
    begin = called_names.index(blocks[0]) if blocks[0] in called_names else len(called_names)
    begin_modules, later_modules = called_names[:begin], called_names[begin:]
    has_repeats = len(set(later_modules)) < len(later_modules) or set(later_modules) & set(begin_modules)
    if has_repeats or not set(blocks) <= set(later_modules):
        return cut
    begin_or_never = tuple(name for name in (*further_modules, *blocks) if name not in later_modules)
    return replace(cut, points=tuple(later_modules), begin_modules=begin_or_never)
