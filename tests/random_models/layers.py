"""The vocabulary of layers: what users write, each in its smallest form, from [batch, seq, width] to the same shape.

A layer here is drawn from a `random.Random` of its own, so that the same seed makes the same layer anywhere.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.autograd import Function
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize

KINDS = {}
WIDTH, LENGTH = 6, 6


@dataclass(frozen=True)
class Kind:
    """What must be known of a layer to put it into a model and to compare it."""

    make: object
    """Takes a `random.Random`, the width and the dtype."""
    takes: tuple = ()
    """The keywords that its forward names."""
    looks_around: bool = False
    """It reads other positions of the sequence, or other rows, so sequences cannot be cut into slices."""
    has_state: bool = False
    """Its forward changes buffers, so the same layer cannot be used twice, nor recomputed."""
    is_strided: bool = False
    """What it returns, or its gradient, lies in another order in memory or with gaps: sums round differently."""
    changes_product: bool = False
    """It changes the result of a product in place, and torch's selective checkpoint may keep no result that changes."""
    is_end: bool = False
    """It begins or ends a model of words, and stands nowhere else."""


def kind(**properties):
    """Enter a function that makes a layer, or the class of one, into the vocabulary under its own name."""

    def enter(make):
        is_class = isinstance(make, type)
        KINDS[make.__name__] = Kind((lambda draw, width, dtype: make(width, dtype)) if is_class else make, **properties)
        return make

    return enter


def zeros(*shape, dtype):
    return nn.Parameter(torch.zeros(shape, dtype=dtype))


# ---- plain layers


class WithLinear(nn.Module):
    """The begin of layers that do something around a linear layer."""

    def __init__(self, width, dtype):
        super().__init__()
        self.linear = nn.Linear(width, width, dtype=dtype)


class WithWeight(nn.Module):
    """The begin of layers that have one matrix."""

    def __init__(self, width, dtype):
        super().__init__()
        self.weight = zeros(width, width, dtype=dtype)


@kind()
def linear(draw, width, dtype):
    return nn.Linear(width, width, bias=draw.random() < 0.5, dtype=dtype)


@kind()
def mlp(draw, width, dtype):
    activation = draw.choice([nn.ReLU, nn.GELU, nn.SiLU, nn.Tanh])()
    return nn.Sequential(nn.Linear(width, 9, dtype=dtype), activation, nn.Linear(9, width, dtype=dtype))


@kind()
def norm(draw, width, dtype):
    make = draw.choice([nn.LayerNorm, nn.RMSNorm])
    return nn.Sequential(make(width, dtype=dtype), nn.Linear(width, width, dtype=dtype))


@kind()
class Residual(nn.Module):
    """A block as in a transformer: its input added to what it makes of it."""

    def __init__(self, width, dtype):
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=dtype)
        self.up, self.down = nn.Linear(width, 8, dtype=dtype), nn.Linear(8, width, dtype=dtype)

    def forward(self, hidden):
        return hidden + self.down(F.gelu(self.up(self.norm(hidden))))


@kind()
def no_parameters(draw, width, dtype):
    return draw.choice([nn.Tanh, nn.Identity, nn.Softplus])()


@kind()
class PassesThrough(nn.Module):
    """Returns the very tensor that it got, and has a parameter that it never uses."""

    def __init__(self, width, dtype):
        super().__init__()
        self.weight = zeros(width, dtype=dtype)

    def forward(self, hidden):
        return hidden


@kind()
class Unused(nn.Module):
    """Has a parameter without use, and computes something that nobody reads."""

    def __init__(self, width, dtype):
        super().__init__()
        self.used, self.ignored = nn.Linear(width, width, dtype=dtype), nn.Linear(width, width, dtype=dtype)
        self.idle = zeros(3, dtype=dtype)

    def forward(self, hidden):
        self.ignored(hidden)
        return self.used(hidden)


@kind()
class Twice(WithWeight):
    """Uses one matrix twice, the second time transposed."""

    def forward(self, hidden):
        return torch.tanh(hidden @ self.weight) @ self.weight.t()


@kind()
class Collections(nn.Module):
    """Keeps its parameters in a list and a dict, one of them a scalar; uses parts of a larger matrix."""

    def __init__(self, width, dtype):
        super().__init__()
        self.gains = nn.ParameterList([zeros(width, dtype=dtype), zeros(dtype=dtype)])
        self.weights = nn.ParameterDict({"large": zeros(2 * width, width, dtype=dtype)})
        self.width = width

    def forward(self, hidden):
        first, second = self.weights["large"].split(self.width)
        return F.linear(hidden * self.gains[0], first) + F.linear(hidden, second) * self.gains[1]


@kind()
class Einsum(nn.Module):
    """Two contractions with weights of three dimensions."""

    def __init__(self, width, dtype):
        super().__init__()
        self.up, self.down = zeros(width, 2, 4, dtype=dtype), zeros(2, 4, width, dtype=dtype)

    def forward(self, hidden):
        heads = torch.einsum("bsw,whd->bshd", hidden, self.up)
        return torch.einsum("bshd,hdw->bsw", heads.relu(), self.down)


@kind()
class Vmapped(WithWeight):
    """Applies a function of one row to all rows by `torch.func.vmap`."""

    def forward(self, hidden):
        return torch.func.vmap(lambda row: torch.tanh(row @ self.weight))(hidden)


@kind()
class FunctionalCall(nn.Module):
    """Calls its inner layer with parameters that it computes."""

    def __init__(self, width, dtype):
        super().__init__()
        self.inner = nn.Linear(width, width, dtype=dtype)
        self.scale = zeros(dtype=dtype)

    def forward(self, hidden):
        weights = {name: value * (1 + self.scale) for name, value in self.inner.named_parameters()}
        return torch.func.functional_call(self.inner, weights, (hidden,))


# ---- custom autograd functions


class _Cube(Function):
    @staticmethod
    def forward(ctx, hidden):
        ctx.save_for_backward(hidden)
        return hidden**3 * 0.1

    @staticmethod
    def backward(ctx, gradient):
        (hidden,) = ctx.saved_tensors
        return gradient * 0.3 * hidden**2


class _Affine(Function):
    @staticmethod
    def forward(hidden, weight, bias):
        return hidden @ weight.t() + bias

    @staticmethod
    def setup_context(ctx, inputs, output):
        hidden, weight, _ = inputs
        ctx.save_for_backward(hidden, weight)

    @staticmethod
    def backward(ctx, gradient):
        hidden, weight = ctx.saved_tensors
        to_hidden = gradient @ weight if ctx.needs_input_grad[0] else None
        flat = gradient.flatten(0, 1)
        to_weight = flat.t() @ hidden.flatten(0, 1) if ctx.needs_input_grad[1] else None
        return to_hidden, to_weight, flat.sum(0) if ctx.needs_input_grad[2] else None


class _ScaleInPlace(Function):
    @staticmethod
    def forward(ctx, hidden, scale):
        ctx.scale = scale
        ctx.mark_dirty(hidden)
        return hidden.mul_(scale)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale, None


@kind()
class CustomActivation(WithLinear):
    """A custom function of activations alone, behind a linear layer."""

    def forward(self, hidden):
        return _Cube.apply(self.linear(hidden))


@kind()
class CustomAffine(nn.Module):
    """A custom function of activations and weights."""

    def __init__(self, width, dtype):
        super().__init__()
        self.weight, self.bias = zeros(width, width, dtype=dtype), zeros(width, dtype=dtype)

    def forward(self, hidden):
        return _Affine.apply(hidden, self.weight, self.bias)


@kind()
class CustomInPlace(WithLinear):
    """A custom function that changes what it gets, the output of a linear layer."""

    def forward(self, hidden):
        return _ScaleInPlace.apply(self.linear(hidden), 0.75)


# ---- weights that are computed


@kind()
def weight_norm(draw, width, dtype):
    return parametrizations.weight_norm(nn.Linear(width, width, bias=draw.random() < 0.5, dtype=dtype))


@kind(has_state=True)
def spectral_norm(draw, width, dtype):
    return parametrizations.spectral_norm(nn.Linear(width, width, dtype=dtype))


class _Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).t()


@kind()
def own_parametrization(draw, width, dtype):
    layer = nn.Linear(width, width, dtype=dtype)
    parametrize.register_parametrization(layer, "weight", _Symmetric())
    return layer


@kind()
def low_rank(draw, width, dtype):
    return _LowRank(width, dtype, is_frozen=draw.random() < 0.6)


class _LowRank(nn.Module):
    """A linear layer, often frozen, plus a product of two small matrices."""

    def __init__(self, width, dtype, is_frozen):
        super().__init__()
        self.base = nn.Linear(width, width, dtype=dtype).requires_grad_(not is_frozen)
        self.down, self.up = zeros(2, width, dtype=dtype), zeros(width, 2, dtype=dtype)

    def forward(self, hidden):
        return self.base(hidden) + F.linear(hidden, self.up @ self.down)


@kind()
class ScoresOfWeights(nn.Module):
    """Products whose operands are both made of parameters."""

    def __init__(self, width, dtype):
        super().__init__()
        self.left, self.right = zeros(width, 3, dtype=dtype), zeros(3, width, dtype=dtype)
        self.gate = zeros(width, dtype=dtype)

    def forward(self, hidden):
        return hidden @ torch.softmax((self.left * 2) @ (self.right + 1), -1) * (self.gate * self.gate)


# ---- changes in place


@kind(changes_product=True)
def relu_in_place(draw, width, dtype):
    return nn.Sequential(nn.Linear(width, width, bias=draw.random() < 0.5, dtype=dtype), nn.ReLU(inplace=True))


@kind(changes_product=True)
class SlicesInPlace(nn.Module):
    """Changes parts of its own output through views."""

    def __init__(self, width, dtype):
        super().__init__()
        self.linear = nn.Linear(width, width, bias=False, dtype=dtype)
        self.shift = zeros(2, dtype=dtype)

    def forward(self, hidden):
        output = self.linear(hidden)
        output[..., :2] += self.shift
        output.view(-1, output.shape[-1]).select(-1, 2).mul_(0.5)
        return output


@kind()
class FillsInPlace(nn.Module):
    """Writes its results into a new tensor, and returns that."""

    def __init__(self, width, dtype):
        super().__init__()
        self.first, self.second = nn.Linear(width, 2, dtype=dtype), nn.Linear(width, width - 2, dtype=dtype)

    def forward(self, hidden):
        output = torch.zeros_like(hidden)
        output[..., :2] = self.first(hidden)
        output[..., 2:].copy_(self.second(hidden))
        return output


@kind(changes_product=True)
class ChangesViewOfOutput(WithLinear):
    """Returns a view, the base of which it has changed in place."""

    def forward(self, hidden):
        flat = self.linear(hidden).flatten(1)
        flat.add_(0.5)
        return flat.view(hidden.shape).tanh_().view_as(hidden)
