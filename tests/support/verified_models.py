"""Small models of one's own, each with something around or within its blocks that a cut has to get right."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import penstock as ps

WIDTH, WORDS, LENGTH, ROWS = 6, 11, 5, 4


@dataclass(frozen=True)
class Case:
    """A class of models, the points at which it is cut, and what its batches have beside tokens."""

    make: Any
    points: tuple[str, ...]
    keywords: tuple[str, ...] = ()
    may_be_refused: bool = False
    """Whether a cut need not run it; what it must not be is wrong."""
    lengths: tuple[int, ...] = (LENGTH, LENGTH)
    """The lengths of the batches."""
    num_plain: int = 0
    """How many of the first batches have tokens alone."""

    def model(self, seed=0):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return self.make().double()

    def batches(self):
        generator = torch.Generator().manual_seed(1)
        return [
            {
                "tokens": torch.randint(WORDS, (ROWS, length), generator=generator),
                **{
                    name: torch.rand(ROWS, length, generator=generator) > 0.3
                    for name in (self.keywords if number >= self.num_plain else ())
                },
            }
            for number, length in enumerate(self.lengths)
        ]


class Block(nn.Module):
    """Mixes positions and features."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.dropout = nn.Dropout(dropout)

    def forward(self, hidden, mask=None):  # [batch, seq, width], [batch, seq]
        mixed = self.dropout(self.linear(self.norm(hidden)).tanh())
        if mask is not None:
            mixed = mixed * mask[..., None].to(mixed.dtype)
        return hidden + mixed + 0.1 * mixed.mean(1, keepdim=True)


class Plain(nn.Module):
    """An embedding, blocks in a loop, a norm and a head."""

    block = Block

    def __init__(self, depth=4):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(self.block() for _ in range(depth))
        # Unlike a LayerNorm, it shows what is added to all features alike, and by its eps also what they are scaled by.
        self.norm, self.head = nn.RMSNorm(WIDTH, eps=0.1), nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


class Masked(Plain):
    """A mask that follows from the batch goes to every block."""

    def forward(self, tokens, padding):
        hidden, mask = self.embedding(tokens), padding | (tokens == 0)
        for block in self.blocks:
            hidden = block(hidden, mask=mask)
        return self.head(self.norm(hidden))


class Scaled(Plain):
    """The forward scales, shifts and slices between the blocks, and changes a value in place."""

    def forward(self, tokens):
        hidden = self.embedding(tokens) * WIDTH**0.5
        for number, block in enumerate(self.blocks):
            hidden = block(hidden) * (1 + 0.1 * number)
        hidden = hidden[:, 1:].clone()
        hidden.mul_(0.5)
        return self.head(self.norm(hidden))


class Dropping(Plain):
    """Dropout within the blocks and between them."""

    @staticmethod
    def block():
        return Block(0.2)

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.1)

    def forward(self, tokens):
        hidden = self.dropout(self.embedding(tokens))
        for block in self.blocks:
            hidden = self.dropout(block(hidden))
        return self.head(self.norm(hidden))


class PairBlock(Block):
    """Returns what goes on, and a value beside it."""

    def forward(self, hidden, mask=None):
        output = super().forward(hidden, mask)
        return output, output.mean()


class Pairs(Plain):
    """Blocks return tuples, of which the forward takes the first part; the model returns a tuple."""

    block = PairBlock

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden, _ = block(hidden)
        hidden = self.norm(hidden)
        return self.head(hidden), hidden


class Named(Plain):
    """Returns a dict, and takes each block's value through one."""

    def forward(self, tokens):
        state = {"hidden": self.embedding(tokens), "positions": torch.arange(tokens.shape[1])}
        for block in self.blocks:
            state["hidden"] = block(state["hidden"], mask=(state["positions"] % 3 != 2).expand(tokens.shape))
        return {"logits": self.head(self.norm(state["hidden"])), "positions": state["positions"] + tokens * 0}


class Tied(Plain):
    """The head has the weight of the embedding."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embedding.weight


class NormedBlock(Block):
    """Has buffers that a training forward changes."""

    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden, mask=None):
        return super().forward(self.batch_norm(hidden.transpose(1, 2)).transpose(1, 2), mask)


class Counting(Plain):
    """Running statistics within the blocks."""

    block = NormedBlock


class Branching(Plain):
    """The mode and the shapes decide what the forward computes."""

    def __init__(self):
        super().__init__()
        self.last = nn.Linear(WORDS, WORDS)

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        mask = None if tokens.shape[1] > LENGTH else torch.ones_like(tokens)
        for block in self.blocks:
            hidden = block(hidden, mask)
        if self.training:
            hidden = hidden + 0.5
        return self.last(self.head(self.norm(hidden)))


class Translator(nn.Module):
    """Decoder blocks take the output of the encoder beside their first argument."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(WORDS, WIDTH)
        self.encoder = nn.ModuleList(Block() for _ in range(2))
        self.words = nn.Embedding(WORDS, WIDTH)
        self.decoder = nn.ModuleList(DecoderBlock() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        memory = self.embedding(tokens)
        for block in self.encoder:
            memory = block(memory)
        hidden = self.words(tokens.roll(1, 1))
        for block in self.decoder:
            hidden = block(hidden, memory)
        return self.head(hidden)


class DecoderBlock(Block):
    """Adds what the encoder gives to its input."""

    def forward(self, hidden, memory):
        return super().forward(hidden + memory.mean(1, keepdim=True))


class LongSkips(Plain):
    """The second half of the blocks adds what the first half returned."""

    def forward(self, tokens):
        hidden, kept = self.embedding(tokens), []
        for number, block in enumerate(self.blocks):
            if number >= len(self.blocks) // 2:
                hidden = hidden + kept.pop()
            hidden = block(hidden)
            if number < len(self.blocks) // 2:
                kept.append(hidden)
        return self.head(self.norm(hidden))


class SkipBlock(Block):
    """Puts its result, or gets that of another block."""

    def __init__(self, skip=None, *, gets=False):
        super().__init__()
        self.skip, self.gets = skip, gets

    def forward(self, hidden):
        if self.skip is not None and self.gets:
            hidden = hidden + self.skip.get()
        output = super().forward(hidden)
        if self.skip is not None and not self.gets:
            self.skip.put(output)
        return output


class DeclaredSkips(Plain):
    """A `ps.Skip` goes from the first block to the last one."""

    def __init__(self):
        super().__init__()
        skip = ps.Skip("features")
        self.blocks = nn.ModuleList([SkipBlock(skip), SkipBlock(), SkipBlock(), SkipBlock(skip, gets=True)])


class Positioned(Plain):
    """A parameter and a table of the model itself are used around the blocks."""

    def __init__(self):
        super().__init__()
        self.place = nn.Parameter(torch.randn(LENGTH, WIDTH))
        self.register_buffer("slopes", torch.linspace(0.5, 1, LENGTH), persistent=False)

    def forward(self, tokens):
        hidden = self.embedding(tokens) + self.place
        for block in self.blocks:
            hidden = block(hidden * self.slopes[:, None])
        return self.head(self.norm(hidden))


class Deciding(Plain):
    """The value of a block decides what runs."""

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
            hidden = hidden * 2 if hidden.mean() > 0 else hidden - 1
        return self.head(self.norm(hidden))


class Counter(Plain):
    """A buffer of the model itself counts forwards, and scales the output by them."""

    persistent = False

    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.zeros(()), persistent=self.persistent)

    def forward(self, tokens):
        self.count += 1
        return super().forward(tokens) * self.count


class SavedCounter(Counter):
    """The same in a saved buffer."""

    persistent = True


class LateCounter(SavedCounter):
    """The same behind the blocks, where the buffer is replaced."""

    def forward(self, tokens):
        output = Plain.forward(self, tokens)
        self.count = self.count + output.detach().mean()
        return output


class LateParameter(Plain):
    """A parameter of the model itself is used behind the blocks."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()) * 2)

    def forward(self, tokens):
        return super().forward(tokens) * self.scale


class Noting(Plain):
    """An attribute holds a sum over blocks, which the output has."""

    def forward(self, tokens):
        hidden, self.total = self.embedding(tokens), 0.0
        for block in self.blocks:
            hidden = block(hidden)
            self.total = self.total + hidden.square().mean()
        return self.head(self.norm(hidden)) + self.total


class Scalars(Plain):
    """Numbers and whole numbers of a block go around the next one."""

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            largest = hidden.argmax(-1, keepdim=True)
            hidden = block(hidden) + largest * 0.01
        return self.head(self.norm(hidden))


BLOCKS = ("blocks.*",)
CASES = {
    "plain": Case(Plain, BLOCKS),
    "masked": Case(Masked, BLOCKS, ("padding",)),
    "scaled": Case(Scaled, BLOCKS),
    "dropping": Case(Dropping, BLOCKS),
    "pairs": Case(Pairs, BLOCKS),
    "named": Case(Named, BLOCKS),
    "tied": Case(Tied, BLOCKS),
    "counting": Case(Counting, BLOCKS),
    "branching": Case(Branching, BLOCKS),
    "declared_skips": Case(DeclaredSkips, BLOCKS),
    "long_skips": Case(LongSkips, BLOCKS),
    "positioned": Case(Positioned, BLOCKS),
    "translator": Case(Translator, ("encoder.*", "words", "decoder.*")),
    "deciding": Case(Deciding, BLOCKS, may_be_refused=True),
    "counter": Case(Counter, BLOCKS, may_be_refused=True),
    "saved_counter": Case(SavedCounter, BLOCKS),
    "late_counter": Case(LateCounter, BLOCKS, may_be_refused=True),
    "late_parameter": Case(LateParameter, BLOCKS),
    "noting": Case(Noting, BLOCKS),
    "scalars": Case(Scalars, BLOCKS),
}
"""All models by name."""
