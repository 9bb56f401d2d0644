"""The model of a seed: begin, one or two chains of blocks, norm and head, with features around the blocks."""

from contextlib import ExitStack
from dataclasses import dataclass
from types import SimpleNamespace
from typing import NamedTuple

import torch
from torch import nn

WIDTH, WORDS, OUTPUTS = 4, 7, 3
ACTIVATIONS = {"tanh": torch.tanh, "sigmoid": torch.sigmoid, "sin": torch.sin}


class Pair(NamedTuple):
    hidden: torch.Tensor
    second: torch.Tensor


@dataclass
class Result:
    hidden: torch.Tensor
    second: torch.Tensor


PACKINGS = {
    "tensor": lambda hidden, second: hidden,
    "single": lambda hidden, second: (hidden,),
    "tuple": lambda hidden, second: (hidden, second),
    "list": lambda hidden, second: [hidden, second],
    "nested": lambda hidden, second: (hidden, (second, {"again": second * 2, "none": None})),
    "dict": lambda hidden, second: {"hidden": hidden, "second": second},
    "named": Pair,
    "dataclass": Result,
}


def unpacked(output):
    """Return the hidden state and the second output, or None, of what a block returned."""
    if isinstance(output, torch.Tensor):
        return output, None
    if isinstance(output, dict):
        return output["hidden"], output["second"]
    if isinstance(output, (Pair, Result)):
        return output.hidden, output.second
    return output[0], output[1] if len(output) > 1 else None


class Block(nn.Module):
    """A residual block; every argument but the first one is optional."""

    def __init__(self, width=WIDTH, takes_memory=False):
        super().__init__()
        self.inner = nn.Linear(width, width)
        if takes_memory:
            self.cross = nn.Linear(width, width)
        self.gain, self.returns, self.fills = 1.0, "tensor", None

    def forward(self, hidden, mask=None, memory=None, bias=None, mode="tanh", sink=None, factor=None):
        change = ACTIVATIONS[mode](self.inner(hidden)) * self.gain
        if torch.is_autocast_enabled("cpu"):
            change = change * 0.5
        if memory is not None:
            change = change + self.cross(memory).mean(1, keepdim=True)
        if mask is not None:
            change = change * mask
        second = change.mean(1, keepdim=True) if bias is None else bias * 0.9
        if bias is not None:
            change = change + bias
        if factor is not None:
            change = change * factor
        if sink is not None and self.fills is not None:
            change = change * self.fills(sink, change)
        return PACKINGS[self.returns](hidden + change, second)


class Root(nn.Module):
    """A subclass of each seed has its features, its layout and the order of its calls."""

    features, layout, chain_order = (), "chain", ()

    def __init__(self):
        super().__init__()
        takes_memory = self.layout == "encoder"
        begin = [("embedding", nn.Embedding(WORDS, WIDTH))]
        if self.layout != "chain":
            encoder = [("source_embedding", nn.Linear(WIDTH, WIDTH))]
            encoder += [("encoder", nn.ModuleList(Block() for _ in range(2)))]
            begin = encoder + begin if self.layout == "encoder" else begin + encoder
        for name, module in begin:
            self.add_module(name, module)
        if self.layout == "tower":
            self.project = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(takes_memory=takes_memory) for _ in range(len(self.chain_order)))
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, OUTPUTS)
        for feature in self.features:
            feature.build(self)

    def forward(self, ids, source=None, padding=None, lengths=None, scale=None, flag=None):
        run = SimpleNamespace(ids=ids, source=source, padding=padding, lengths=lengths, scale=scale, flag=flag)
        run.memory, run.second, run.notes = None, None, {}
        self.encode(run)
        for feature in self.features:
            feature.begin(self, run)
        for place, index in enumerate(self.indices(run)):
            self.call(run, place, self.blocks[index])
        for feature in self.features:
            feature.end(self, run)
        output = self.head(self.norm(run.hidden))
        for feature in self.features:
            output = feature.output(self, run, output)
        return output

    def indices(self, run):
        order = list(self.chain_order)
        for feature in self.features:
            order = feature.order(order)
        return order

    def encode(self, run):
        """Set the hidden state that the blocks begin with, and the memory that the blocks of a decoder take."""
        if self.layout == "tower":
            run.hidden = self.embedding(run.ids)
        if self.layout != "chain":
            hidden = self.source_embedding(run.source)
            for block in self.encoder:
                hidden = block(hidden)
        if self.layout == "encoder":
            run.memory = hidden
        if self.layout == "tower":
            run.hidden = torch.cat([self.project(hidden), run.hidden[:, hidden.shape[1] :]], 1)
        else:
            run.hidden = self.embedding(run.ids)

    def call(self, run, place, block):
        run.call, run.kwargs = block, {}
        if run.memory is not None:
            run.kwargs["memory"] = run.memory
        for feature in self.features:
            feature.before(self, run, place, block)
        with ExitStack() as contexts:
            for feature in self.features:
                contexts.enter_context(feature.around(self, run, place, block))
            run.hidden, run.second = unpacked(run.call(run.hidden, **run.kwargs))
        for feature in self.features:
            feature.after(self, run, place, block)
