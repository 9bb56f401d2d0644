"""In which order a forward calls the submodules of a cut model, which may differ from the order of their definition.

defined   embedding  norm  blocks.0  blocks.1  head        called   embedding  blocks.0  blocks.1  norm  head
"""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from penstock.models.cutting.frame import Call, Course, Frame, Template
from penstock.models.cutting.points import CutModel


def in_order_of_calls(model: nn.Module, cut: CutModel, first: str, complete: Any, call: Call) -> CutModel:
    """Return a cut whose points are in the order in which a forward, run with stand-ins alone, calls them.

    `first` is the pattern's part before the numbers of the blocks, such as `model.layers.`; these stay points. The
    modules that are called before the first of them, or never, begin the forward. A forward that raises, or calls one
    twice, leaves the cut as it is.
    """
    blocks = tuple(name for name in cut.points if name.startswith(first))
    others = (*cut.before, *(name for name in cut.points if name not in blocks))
    template = Template(model, replace(cut, points=blocks, before=others), complete)
    frame = Frame(template, torch.device("cpu"))
    course = Course(template.places, frame.device, None, None, {}, met=[])
    try:
        with torch.no_grad():
            frame.run(call, course, {}, is_training=False)
    except Exception:
        return cut
    met = course.met or []
    begin = met.index(blocks[0]) if blocks[0] in met else len(met)
    before, behind = met[:begin], met[begin:]
    if len(set(behind)) < len(behind) or set(behind) & set(before) or not set(blocks) <= set(behind):
        return cut
    return replace(cut, points=tuple(behind), before=tuple(name for name in (*others, *blocks) if name not in behind))
