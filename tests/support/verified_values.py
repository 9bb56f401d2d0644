"""Models whose own forward uses values of its blocks far from them, asks them for what they are, or sets attributes."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.support.verified_models import WIDTH, Block, Case, Plain

# ---- values of submodules that are used again


class Twice(Plain):
    """The embedding is called twice, and both results are used late."""

    def forward(self, tokens):
        first, second = self.embedding(tokens), self.embedding(tokens.roll(1, 1)).tanh()
        hidden = first + second
        for number, block in enumerate(self.blocks):
            hidden = block(hidden) + (first if number == 1 else 0.5 * second)
        return self.head(self.norm(hidden))


class Borrowing(Plain):
    """Parameters and attributes of submodules are used far from them."""

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden) * (1 + block.norm.eps) + block.linear.bias
        hidden = self.norm(hidden) + 0.1 * self.blocks[0].linear.weight.sum(0)
        return self.head(hidden) + F.linear(hidden, self.embedding.weight)


class ChangedInPlace(Plain):
    """A block's result is changed in place, twice, while later blocks still use it."""

    def forward(self, tokens):
        first = self.blocks[0](self.embedding(tokens))
        hidden = self.blocks[1](first + 1)
        first.mul_(2)
        hidden = self.blocks[2](hidden + first)
        first[:, 0] += 1
        hidden = self.blocks[3](hidden + first)
        return self.head(self.norm(hidden + first))


class Stepping(Plain):
    """A constant that every block is given, also within its first argument, is changed in place between them."""

    class Stepped(Block):
        """Adds what it is given twice."""

        def forward(self, hidden, further_step):
            hidden, step = hidden
            return super().forward(hidden + step + further_step)

    block = Stepped

    def forward(self, tokens):
        hidden, step = self.embedding(tokens), torch.linspace(0, 1, WIDTH)
        for block in self.blocks:
            hidden = block((hidden, step), step)
            step.mul_(2)
        return self.head(self.norm(hidden))


class Collecting(Plain):
    """A constant gets values of blocks in place, and scales the output."""

    def forward(self, tokens):
        hidden, sums = self.embedding(tokens), torch.zeros(len(self.blocks), tokens.shape[1]).double()
        for number, block in enumerate(self.blocks):
            hidden = block(hidden)
            sums[number] = hidden.mean((0, 2))
        return self.head(self.norm(hidden)) * (1 + sums.sum(0)[:, None])


class WholeNumbers(Plain):
    """Whole numbers that blocks return choose positions far behind them."""

    class Ranked(Block):
        """Returns the places of its largest features beside its result."""

        def forward(self, hidden):
            output = super().forward(hidden)
            return output, output.argmax(-1)

    block = Ranked

    def forward(self, tokens):
        hidden, places = self.blocks[0](self.embedding(tokens))
        for block in self.blocks[1:]:
            hidden, further_places = block(hidden)
        picked = hidden.gather(-1, places[..., None]) + (places + further_places)[..., None] * 0.1
        return self.head(self.norm(hidden) * picked)


# ---- containers


class Result(NamedTuple):
    """What a block returns by name."""

    hidden: Tensor
    extra: Tensor


@dataclass
class Record:
    """The same in a dataclass."""

    hidden: Tensor
    extra: Tensor


class Contained(Plain):
    """Blocks take tuples and return named tuples, dataclasses and dicts, whose second parts are used late."""

    class Wrapped(Block):
        """Returns its result in a container of a class."""

        def __init__(self, container=Result):
            super().__init__()
            self.container = container

        def forward(self, hidden, *, extra=None):
            hidden, other = hidden if isinstance(hidden, tuple) else (hidden, 0.0)
            output = super().forward(hidden + 0.1 * other + (0.0 if extra is None else extra["value"]))
            return self.container(hidden=output, extra=output.tanh())

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(self.Wrapped(container) for container in (Result, Record, dict))

    def forward(self, tokens):
        result = self.blocks[0](self.embedding(tokens))
        record = self.blocks[1]((result.hidden, result.extra))
        found = self.blocks[2](record.hidden * 0.5, extra={"value": record.extra})
        return self.head(self.norm(found["hidden"] + result.extra + record.extra * found["extra"]))


class ByKeyword(Plain):
    """Blocks take all their arguments by keyword, and one is called by its forward."""

    def forward(self, tokens, padding=None):
        hidden = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            call = block.forward if number == 1 else block
            hidden = call(hidden=hidden, mask=padding)
            hidden = hidden * 1.1 if number == 2 else hidden
        return self.head(self.norm(hidden))


class Called(Plain):
    """Blocks are given functions, and objects that cannot be copied."""

    class Calling(Block):
        """Calls its second argument, and returns a value more for each name."""

        def forward(self, hidden, squash, names):
            output = super().forward(squash(hidden))
            return output, *(output.tanh() for _ in names)

    block = Calling

    def squash(self, hidden):
        """Return values within bounds."""
        return hidden.tanh() * WIDTH

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            hidden, other = block(hidden, self.squash if number else torch.sin, {"a": 1}.keys())
        return self.head(self.norm(hidden + other))


# ---- what the forward asks, and what it sets


class GradientAware(Plain):
    """The forward asks values for graphs, types, shapes, strides and modes."""

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden)
            hidden = hidden * 1.5 if hidden.requires_grad and not hidden.is_leaf else hidden
            hidden = hidden + 0.5 if hidden.grad_fn is None else hidden
            hidden = hidden if block.training else hidden - 0.5
            hidden = hidden.transpose(1, 2) if hidden.is_contiguous() else hidden.flip(1)
            hidden = hidden.transpose(1, 2) if hidden.shape[1] == WIDTH else hidden
        return self.head(self.norm(hidden)) + hidden.detach().mean()


class Setting(Plain):
    """Numbers, modes and options of blocks are set before their calls."""

    class Optional(Block):
        """Computes, and returns, by its attributes."""

        scale, gives_pair = 1.0, False

        def forward(self, hidden):
            output = super().forward(hidden * self.scale)
            return (output, output.tanh()) if self.gives_pair else output

    block = Optional

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            block.scale = 1.0 + number
            block.norm.eps = 0.1 * (number + 1)
            if number == 2:
                block.gives_pair = True
            output = block(hidden)
            hidden = output[0] + output[1] if isinstance(output, tuple) else output
        return self.head(self.norm(hidden))


class SettingValues(Plain):
    """A value of one block becomes an attribute of the next one."""

    class Shifted(Block):
        """Adds its attribute."""

        shift: Any = 0.0

        def forward(self, hidden):
            return super().forward(hidden + self.shift)

    block = Shifted

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            block.shift = hidden.mean(1, keepdim=True)
            hidden = block(hidden.tanh())
        return self.head(self.norm(hidden))


class ByMode(Plain):
    """Blocks return a value more in training."""

    class Moded(Block):
        """Returns a pair in training."""

        def forward(self, hidden):
            output = super().forward(hidden)
            return (output, output.tanh()) if self.training else output

    block = Moded

    def forward(self, tokens):
        hidden, extra = self.embedding(tokens), 0.0
        for block in self.blocks:
            hidden, extra = block(hidden) if self.training else (block(hidden), extra)
        return self.head(self.norm(hidden + extra))


class Frozen(Plain):
    """A block runs without gradients, one has none, and one stays in evaluation."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block(), *(Counted() for _ in range(2))])
        self.blocks[3].eval()
        self.blocks[2].requires_grad_(False)

    def forward(self, tokens):
        first = self.blocks[0](self.embedding(tokens))
        with torch.no_grad():
            context = self.blocks[1](first)
        hidden = self.blocks[2](first, context)
        return self.head(self.norm(self.blocks[3](hidden, context)))


class Counted(Block):
    """Adds its second argument; has running statistics."""

    def __init__(self):
        super().__init__()
        self.batch_norm = nn.BatchNorm1d(WIDTH)

    def forward(self, hidden, context):
        return super().forward(self.batch_norm(hidden.transpose(1, 2)).transpose(1, 2) + context)


class Converting(Plain):
    """Values go to types and devices, and give theirs to others."""

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for number, block in enumerate(self.blocks):
            hidden = block(hidden).to("cpu", torch.float64)
            places = torch.arange(hidden.size(1), device=hidden.device).to(hidden)
            hidden = (hidden + number * 0.1 * places[:, None]).to(device=hidden.device).cpu()
            ramp = torch.linspace(0, 1, WIDTH).type_as(hidden).expand_as(hidden)
            hidden = hidden + ramp + torch.full_like(hidden, 0.1) + hidden.new_ones(()) + places.new_zeros(WIDTH)
            hidden = hidden + torch.zeros(hidden.shape, dtype=hidden.dtype).masked_fill(hidden > 0, 0.2)
        index = 0 if hidden.get_device() < 0 else 1
        return self.head(self.norm(hidden)) + torch.tensor([0.1, 0.2])[index]


class Choosing(Plain):
    """Rows are put and taken by values of the batch, and places by values of blocks."""

    def forward(self, tokens):
        hidden, is_chosen = self.embedding(tokens), tokens % 2 == 0
        for block in self.blocks:
            hidden = block(hidden)
            hidden = torch.where(is_chosen[..., None], hidden, hidden.roll(1, 1))
            best = hidden.mean(-1).topk(2, dim=1).indices
            hidden = hidden + 0.1 * hidden.take_along_dim(best[..., None], 1).mean(1, keepdim=True)
        hidden = hidden.masked_fill(is_chosen[..., None], 0.5).index_select(1, torch.arange(2))
        return self.head(self.norm(hidden))


class Routed(Plain):
    """Blocks decide by their own values, as experts do, and by words."""

    class Expert(Block):
        """Computes by each word's own factor, and twice as much where the mean is above 0."""

        def forward(self, hidden, tokens):
            output = super().forward(hidden)
            for word in tokens.unique().tolist():
                output = output + 0.01 * word * (tokens == word)[..., None]
            return output * 2 if output.mean() > 0 else output

    block = Expert

    def forward(self, tokens):
        hidden = self.embedding(tokens)
        for block in self.blocks:
            hidden = block(hidden, tokens)
        return self.head(self.norm(hidden))


class Drawing(Plain):
    """The forward draws between blocks, and the output tells whether every use had the same draw."""

    class Passing(Block):
        """Returns a copy of its second argument, beside what it computes."""

        def forward(self, hidden, noise):
            return super().forward(hidden), noise.clone()

    block = Passing

    def __init__(self):
        super().__init__()
        self.dropout = nn.Dropout(0.5)

    def forward(self, tokens):
        hidden, noise = self.embedding(tokens), torch.rand(tokens.shape).double()
        for number, block in enumerate(self.blocks):
            hidden, passed = block(hidden, noise)
            hidden = hidden + (passed - noise).mean()
            draw = (
                lambda value: torch.rand_like(value[..., 0]),
                lambda value: self.dropout(torch.ones_like(value))[..., 0],
                lambda value: torch.empty_like(value).uniform_()[..., 0],
                lambda value: F.scaled_dot_product_attention(value, value, value.cos(), dropout_p=0.5)[..., 0],
            )[number]
            noise = draw(hidden.detach())
        return self.head(self.norm(hidden + 0 * noise[..., None]))


LAYERS = ("blocks.*",)
VALUE_CASES = {
    "twice": Case(Twice, LAYERS, lengths=(5, 3)),
    "borrowing": Case(Borrowing, LAYERS),
    "changed_in_place": Case(ChangedInPlace, LAYERS),
    "stepping": Case(Stepping, LAYERS),
    "collecting": Case(Collecting, LAYERS),
    "whole_numbers": Case(WholeNumbers, LAYERS),
    "contained": Case(Contained, LAYERS),
    "by_keyword": Case(ByKeyword, LAYERS, ("padding",), lengths=(5, 3), num_plain=1),
    "called": Case(Called, LAYERS),
    "gradient_aware": Case(GradientAware, LAYERS),
    "setting": Case(Setting, LAYERS),
    "setting_values": Case(SettingValues, LAYERS),
    "by_mode": Case(ByMode, LAYERS),
    "frozen": Case(Frozen, LAYERS),
    "converting": Case(Converting, LAYERS),
    "choosing": Case(Choosing, LAYERS),
    "routed": Case(Routed, LAYERS),
    "drawing": Case(Drawing, LAYERS),
}
"""All of them by name."""
