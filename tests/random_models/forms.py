"""What travels between layers other than one tensor: tuples, dicts, dataclasses, views, one tensor twice."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

# Per form, a function that packs what a layer makes (and what it got), one that changes the hidden state in a pack,
# and one that ends it. All values beside the hidden state are used by at least one of them, except where said.


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


class Form:
    """A tuple of the state, a value derived from it, and a number."""

    is_strided = False

    def pack(self, hidden, given):
        return hidden, hidden.mean(-1, keepdim=True), 3

    def hidden(self, packed):
        return packed[0]

    def put(self, packed, hidden):
        return hidden + packed[1] / packed[2], *packed[1:]

    def end(self, packed):
        return packed[0] + packed[1]


class Dict(Form):
    """A dict with a mask, None and a count."""

    def pack(self, hidden, given):
        return {"hidden": hidden, "bias": hidden.sum(-1, keepdim=True), "mask": hidden > 0, "depth": 1, "note": None}

    def hidden(self, packed):
        return packed["hidden"]

    def put(self, packed, hidden):
        return {**packed, "hidden": hidden * packed["mask"], "depth": packed["depth"] + 1}

    def end(self, packed):
        return packed["hidden"] / packed["depth"] + packed["bias"]


class Dataclass(Form):
    """A dataclass with a number and None."""

    def pack(self, hidden, given):
        return State(hidden, hidden.square(), 1)

    def hidden(self, packed):
        return packed.hidden

    def put(self, packed, hidden):
        return replace(packed, hidden=hidden + packed.bias * 0.1, depth=packed.depth + 1)

    def end(self, packed):
        return packed.hidden / packed.depth


class Named(Form):
    """A named tuple."""

    def pack(self, hidden, given):
        return Pair(hidden, hidden > 0)

    def hidden(self, packed):
        return packed.hidden

    def put(self, packed, hidden):
        return packed._replace(hidden=torch.where(packed.positive, hidden, hidden * 0.5))

    def end(self, packed):
        return packed.hidden


class TwiceTheSame(Form):
    """One tensor at two places."""

    def pack(self, hidden, given):
        return [hidden, hidden]

    def put(self, packed, hidden):
        return [hidden, hidden]

    def end(self, packed):
        return packed[0] * packed[1].tanh()


class WithView(Form):
    """A tensor and a view of it."""

    is_strided = True

    def pack(self, hidden, given):
        return hidden, hidden[..., :2]

    def put(self, packed, hidden):
        return hidden + packed[1].sum(-1, keepdim=True), hidden[:, :, :2]

    def end(self, packed):
        return packed[0] + packed[1].mean(-1, keepdim=True)


class WithInput(Form):
    """The state, and what the first layer got, for those after it."""

    def pack(self, hidden, given):
        return {"hidden": hidden, "given": given}

    def hidden(self, packed):
        return packed["hidden"]

    def _used(self, packed):
        given = packed["given"]
        return given if given.is_floating_point() else (given % 2).unsqueeze(-1)

    def put(self, packed, hidden):
        return {**packed, "hidden": hidden + 0.5 * self._used(packed)}

    def end(self, packed):
        return packed["hidden"] - self._used(packed)


class WithUnused(Form):
    """The state, and a value that nobody reads."""

    def pack(self, hidden, given):
        return hidden, hidden * 2

    def put(self, packed, hidden):
        return hidden, packed[1]

    def end(self, packed):
        return packed[0]


FORMS = {
    "tuple": Form(),
    "dict": Dict(),
    "dataclass": Dataclass(),
    "named tuple": Named(),
    "twice the same": TwiceTheSame(),
    "with view": WithView(),
    "with input": WithInput(),
    "with unused": WithUnused(),
}


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
