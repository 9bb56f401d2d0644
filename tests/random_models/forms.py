"""What travels between layers other than one tensor: tuples, dicts, dataclasses, views, one tensor twice."""

from dataclasses import dataclass, replace
from operator import attrgetter, itemgetter
from typing import NamedTuple

import torch
from torch import Tensor, nn


@dataclass
class State:
    """A state as users declare one."""

    hidden: Tensor
    bias: Tensor
    depth: int
    note: str | None = None


class Pair(NamedTuple):
    """A named tuple of a state and a tensor that is not trained."""

    hidden: Tensor
    positive: Tensor


@dataclass(frozen=True)
class Form:
    """How layers pass on more than the hidden state; what is beside it is used by `put` or `end`, unless said."""

    pack: object
    """Makes a pack of the hidden state, and of what the first layer got."""
    put: object
    """Puts another hidden state into a pack."""
    end: object
    """Returns the hidden state that the layer behind the form gets."""
    hidden: object = itemgetter(0)
    is_strided: bool = False


def _given(packed):
    given = packed["given"]
    return given if given.is_floating_point() else (given % 2).unsqueeze(-1)


FORMS = {
    "tuple": Form(
        lambda hidden, given: (hidden, hidden.mean(-1, keepdim=True), 3),
        lambda packed, hidden: (hidden + packed[1] / packed[2], *packed[1:]),
        lambda packed: packed[0] + packed[1],
    ),
    "dict": Form(
        lambda hidden, given: {
            "hidden": hidden, "bias": hidden.sum(-1, keepdim=True), "mask": hidden > 0, "depth": 1, "note": None,
        },
        lambda packed, hidden: {**packed, "hidden": hidden * packed["mask"], "depth": packed["depth"] + 1},
        lambda packed: packed["hidden"] / packed["depth"] + packed["bias"],
        itemgetter("hidden"),
    ),
    "dataclass": Form(
        lambda hidden, given: State(hidden, hidden.square(), 1),
        lambda packed, hidden: replace(packed, hidden=hidden + packed.bias * 0.1, depth=packed.depth + 1),
        lambda packed: packed.hidden / packed.depth,
        attrgetter("hidden"),
    ),
    "named tuple": Form(
        lambda hidden, given: Pair(hidden, hidden > 0),
        lambda packed, hidden: packed._replace(hidden=torch.where(packed.positive, hidden, hidden * 0.5)),
        attrgetter("hidden"),
        attrgetter("hidden"),
    ),
    "twice the same": Form(
        lambda hidden, given: [hidden, hidden],
        lambda packed, hidden: [hidden, hidden],
        lambda packed: packed[0] * packed[1].tanh(),
    ),
    "with view": Form(
        lambda hidden, given: (hidden, hidden[..., :2]),
        lambda packed, hidden: (hidden + packed[1].sum(-1, keepdim=True), hidden[:, :, :2]),
        lambda packed: packed[0] + packed[1].mean(-1, keepdim=True),
        is_strided=True,
    ),
    "with input": Form(
        lambda hidden, given: {"hidden": hidden, "given": given},
        lambda packed, hidden: {**packed, "hidden": hidden + 0.5 * _given(packed)},
        lambda packed: packed["hidden"] - _given(packed),
        itemgetter("hidden"),
    ),
    # Nobody reads its second value.
    "with unused": Form(
        lambda hidden, given: (hidden, hidden * 2), lambda packed, hidden: (hidden, packed[1]), itemgetter(0)
    ),
}  # fmt: skip


class InForm(nn.Module):
    """A layer of tensors inside a form: the one that opens it, one that carries it on, or the one after it."""

    def __init__(self, inner, form, place):
        super().__init__()
        self.inner, self.form, self.place = inner, form, place

    def forward(self, packed):
        return self.after(self.inner(self.before(packed)), packed)

    def before(self, packed):
        if self.place == "opens":
            return packed
        return self.form.hidden(packed) if self.place == "carries" else self.form.end(packed)

    def after(self, hidden, packed):
        if self.place == "ends":
            return hidden
        return self.form.pack(hidden, packed) if self.place == "opens" else self.form.put(packed, hidden)


class InFormWithKeywords(InForm):
    """The same around a layer that takes keywords."""

    def forward(self, packed, **kwargs):
        return self.after(self.inner(self.before(packed), **kwargs), packed)
