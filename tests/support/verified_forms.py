"""Models whose own forward keeps something for later ones, and models of several chains or of parts within parts."""

import torch
from torch import nn

import penstock as ps
from tests.support.verified_models import LENGTH, WIDTH, WORDS, Block, Case, Plain

# ---- what a forward keeps


class Tabled(Plain):
    """A table is made anew for each length, and kept."""

    def __init__(self):
        super().__init__()
        self.table = None

    def forward(self, tokens):
        if self.table is None or len(self.table) != tokens.shape[1]:
            self.table = torch.linspace(0, 1, tokens.shape[1]).double()[:, None]
        hidden = self.embedding(tokens) + self.table
        for block in self.blocks:
            hidden = block(hidden) * (1 + self.table)
        return self.head(self.norm(hidden))


class Switching(Plain):
    """Each forward leaves another function for the next one."""

    def __init__(self):
        super().__init__()
        self.activation = torch.tanh

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = self.activation(block(hidden))
        self.activation = torch.sin if self.activation is torch.tanh else torch.tanh
        return self.head(self.norm(hidden))


class Alternating(Plain):
    """Each second forward finds a table of the one before."""

    def __init__(self):
        super().__init__()
        self.table = None

    def forward(self, tokens):
        hidden = self.embedding(tokens) * (1 if self.table is None else 2)
        self.table = torch.ones(2) if self.table is None else None
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Remembering(Plain):
    """A tensor that is no buffer adds up what blocks return, in place."""

    def __init__(self):
        super().__init__()
        self.memory = torch.zeros(WIDTH).double()

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden + self.memory)
            self.memory.add_(hidden.detach().mean((0, 1)))
        return self.head(self.norm(hidden))


class Gathering(Plain):
    """Each forward adds to a set, and counts with it."""

    def __init__(self):
        super().__init__()
        self.seen = {0}

    def forward(self, tokens):
        hidden = self.embedding(tokens) * len(self.seen)
        for block in self.blocks:
            hidden = block(hidden)
        self.seen.add(len(self.seen))
        return self.head(self.norm(hidden))


class Standardized(Plain):
    """A module before the blocks has saved buffers alone, and changes them in training."""

    def __init__(self):
        super().__init__()
        blocks, norm, head = (self._modules.pop(name) for name in ("blocks", "norm", "head"))
        self.statistics = nn.BatchNorm1d(WIDTH, affine=False)
        self.blocks, self.norm, self.head = blocks, norm, head

    def forward(self, tokens):
        hidden = self.statistics(self.embedding(tokens).transpose(1, 2)).transpose(1, 2)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Hooked(Plain):
    """The forward puts hooks on its blocks while it runs, which keep and change what they return."""

    def forward(self, tokens):
        hidden, kept = self.embedding(tokens), []

        def keep(module, args, output):
            kept.append(output)
            return output * 1.5 if len(kept) % 2 else None

        handles = [block.register_forward_hook(keep) for block in self.blocks]
        for block in self.blocks:
            hidden = block(hidden)
        for handle in handles:
            handle.remove()
        return self.head(self.norm(hidden + kept[0]))


# ---- chains, orders, arguments


class ThreeChains(nn.Module):
    """Two encoders and a decoder that takes both results, with a head that is defined first."""

    def __init__(self):
        super().__init__()
        self.head, self.embedding = nn.Linear(WIDTH, WORDS), nn.Embedding(WORDS, WIDTH)
        self.first = nn.ModuleList(Block() for _ in range(2))
        self.second = nn.ModuleList(Block() for _ in range(2))
        self.third = nn.Sequential(Block(), Block())

    def forward(self, tokens):
        hidden, other = self.embedding(tokens), self.embedding(tokens.flip(1))
        for block in self.first:
            hidden = block(hidden)
        for block in self.second:
            other = block(other)
        mixed = hidden + other.mean(1, keepdim=True)
        for block in self.third:
            mixed = block(mixed) + 0.1 * hidden
        return self.head(mixed * other)


class Inner(nn.Module):
    """A model within one, with a table, a place and a mode of its own."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, WIDTH))
        self.dropout = nn.Dropout(0.0)
        self.layers = nn.ModuleDict({name: Block() for name in ("a", "b", "c")})

    def forward(self, hidden, *, keep):
        kept = []
        for layer in self.layers.values():
            hidden = self.dropout(layer(hidden + self.place)) * self.scale
            kept += [hidden] if keep else []
        return hidden, kept


class Outer(Plain):
    """The blocks lie in a model within the model; all that they return is used, and numbers stand in the batch."""

    def __init__(self):
        super().__init__()
        del self.blocks
        self.inner = Inner()
        self.final_norm, self.final_head = nn.RMSNorm(WIDTH, eps=0.1), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens, scale=2.0, *others, keep=True):
        hidden, kept = self.inner(self.embedding(tokens) * scale, keep=keep)
        return self.final_head(self.final_norm(hidden + sum(kept)))


class Balanced(Plain):
    """Blocks add to the loss by themselves."""

    class Adding(Block):
        """Hands a loss on."""

        def __init__(self):
            super().__init__()
            self.auxiliary = ps.AuxiliaryLoss("size")

        def forward(self, hidden):
            output = super().forward(hidden)
            self.auxiliary.add(output.square().mean())
            return output

    block = Adding


class Turning(Plain):
    """Blocks have a table that no file has, which their reset makes."""

    class Turned(Block):
        """Scales by its table."""

        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.empty(WIDTH), persistent=False)
            self.reset_parameters()

        def reset_parameters(self):
            """Make the table."""
            self.table.copy_(torch.linspace(0.5, 1, WIDTH))

        def forward(self, hidden):
            return super().forward(hidden * self.table)

    block = Turned

    def __init__(self):
        super().__init__()
        self.register_buffer("bounds", torch.empty(2), persistent=False)
        self.register_buffer("shift", torch.full((WIDTH,), 0.3))
        self.place = nn.Parameter(torch.ones(WIDTH))
        self.reset_parameters()

    def reset_parameters(self):
        """Make the bounds."""
        self.bounds.copy_(torch.tensor([-2.0, 2.0]))

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden.clamp(*self.bounds.tolist()) + self.shift)
        return self.head(self.norm(hidden) * self.place)


LAYERS = ("blocks.*",)
FORM_CASES = {
    "tabled": Case(Tabled, LAYERS, lengths=(5, 3, 5)),
    "switching": Case(Switching, LAYERS, may_be_refused=True),
    "alternating": Case(Alternating, LAYERS, may_be_refused=True),
    "remembering": Case(Remembering, LAYERS, may_be_refused=True),
    "gathering": Case(Gathering, LAYERS, may_be_refused=True),
    "standardized": Case(Standardized, LAYERS),
    "hooked": Case(Hooked, LAYERS),
    "three_chains": Case(ThreeChains, ("first.*", "second.*", "third.*", "head")),
    "outer": Case(Outer, ("inner.layers.*",)),
    "balanced": Case(Balanced, LAYERS),
    "turning": Case(Turning, LAYERS),
}
"""All of them by name."""
