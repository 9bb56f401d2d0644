"""The vocabulary, continued: outputs in other memory, hooks, layers that look around, and layers that take keywords."""

from torch import nn
from torch.autograd import Function
from torch.nn import functional as F

import penstock as ps
from tests.random_models.layers import WithLinear, WithWeight, kind, zeros

# ---- outputs in another shape of memory


@kind(is_strided=True)
class SlicesOutput(nn.Module):
    """Returns a part of a wider output: a view with gaps."""

    def __init__(self, width, dtype):
        super().__init__()
        self.linear = nn.Linear(width, width + 3, dtype=dtype)

    def forward(self, hidden):
        return self.linear(hidden)[..., 1:-2]


@kind(is_strided=True)
class Expands(nn.Module):
    """Returns one column as if it were many."""

    def __init__(self, width, dtype):
        super().__init__()
        self.linear, self.width = nn.Linear(width, 1, dtype=dtype), width

    def forward(self, hidden):
        return self.linear(hidden).expand(-1, -1, self.width)


@kind(is_strided=True)
class Transposed(WithLinear):
    """Returns what lies in another order in memory."""

    def forward(self, hidden):
        return self.linear(hidden).transpose(0, 1).contiguous().transpose(0, 1)


# ---- what waits for W besides products of plain layers


class _Asking(Function):
    @staticmethod
    def forward(ctx, hidden, weight, bias):
        ctx.save_for_backward(hidden)
        ctx.weight = weight
        return hidden @ weight.t() + bias

    @staticmethod
    def backward(ctx, gradient):
        of_hidden = of_weight = of_bias = None
        if ps.wants_input_gradient(ctx) and ctx.needs_input_grad[0]:
            of_hidden = gradient @ ctx.weight
        if ps.wants_weight_gradient(ctx) and ctx.needs_input_grad[1]:
            of_weight = gradient.flatten(0, 1).t() @ ctx.saved_tensors[0].flatten(0, 1)
        if ps.wants_weight_gradient(ctx) and ctx.needs_input_grad[2]:
            of_bias = gradient  # autograd sums it to the shape of the bias
        return of_hidden, of_weight, of_bias


@kind()
class AskingAffine(nn.Module):
    """A custom function of activations and weights whose backward asks which half is wanted."""

    def __init__(self, width, dtype):
        super().__init__()
        self.weight, self.bias = zeros(width, width, dtype=dtype), zeros(width, dtype=dtype)

    def forward(self, hidden):
        return _Asking.apply(hidden, self.weight, self.bias)


class _Sine(Function):
    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight)
        return weight.sin(), weight.cos()

    @staticmethod
    def backward(ctx, of_sine, of_cosine):
        (weight,) = ctx.saved_tensors
        return of_sine * weight.cos() - of_cosine * weight.sin()


@kind()
def branches(draw, width, dtype):
    return _Branches(width, dtype, draw.choice(["added", "multiplied", "both", "in a product too", "in I too"]))


class _Branches(nn.Module):
    """A linear layer next to what is made of another weight alone."""

    def __init__(self, width, dtype, use):
        super().__init__()
        self.linear, self.weight, self.use = nn.Linear(width, width, dtype=dtype), zeros(width, width, dtype=dtype), use

    def forward(self, hidden):
        sine, cosine = _Sine.apply(self.weight)
        if self.use == "added":
            return self.linear(hidden) + sine.mean(0)
        if self.use == "multiplied":
            return self.linear(hidden) * (sine @ cosine)[0]
        if self.use == "both":
            return self.linear(hidden) * sine[0] + cosine[1]
        if self.use == "in a product too":
            return self.linear(hidden) @ sine + cosine.sum(0)
        return self.linear(hidden) + sine[0] + self.weight[1]


# ---- hooks


@kind()
def hooked(draw, width, dtype):
    layer = nn.Linear(width, width, dtype=dtype)
    where = draw.choice(["output", "parameter", "gradient", "tensor"])
    if where == "output":
        layer.register_forward_hook(lambda module, args, output: output * 0.5)
    if where == "parameter":
        layer.weight.register_hook(lambda gradient: gradient * 0.5)
    if where == "gradient":
        layer.register_full_backward_hook(_halve_inward)
    if where == "tensor":
        layer.register_forward_hook(_hook_output)
    return layer


def _halve_inward(module, inward, outward):
    return None if inward[0] is None else (inward[0] * 0.5,)


def _hook_output(module, args, output):
    if output.requires_grad:
        output.register_hook(lambda gradient: gradient * 2)


# ---- layers that look around: other positions, other rows


@kind(looks_around=True, is_strided=True)
class Convolution(nn.Module):
    """A convolution over the sequence."""

    def __init__(self, width, dtype):
        super().__init__()
        self.convolution = nn.Conv1d(width, width, 3, padding=1, dtype=dtype)

    def forward(self, hidden):
        return self.convolution(hidden.transpose(1, 2)).transpose(1, 2)


@kind(looks_around=True, has_state=True, is_strided=True)
class BatchNorm(nn.Module):
    """Normalizes over rows and positions, with running statistics."""

    def __init__(self, width, dtype):
        super().__init__()
        self.norm = nn.BatchNorm1d(width, dtype=dtype)

    def forward(self, hidden):
        return self.norm(hidden.transpose(1, 2)).transpose(1, 2)


@kind(looks_around=True, is_strided=True, changes_product=True)
def recurrent(draw, width, dtype):
    make = draw.choice([nn.GRU, nn.LSTM, nn.RNN])
    return _Recurrent(make(width, width, batch_first=True, num_layers=draw.choice([1, 1, 2]), dtype=dtype))


class _Recurrent(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, hidden):
        return self.inner(hidden)[0]


@kind(looks_around=True, takes=("src_key_padding_mask",), is_strided=True)
def encoder(draw, width, dtype):
    return nn.TransformerEncoderLayer(
        width, 2, 8, dropout=0.0, batch_first=True, norm_first=draw.random() < 0.5, dtype=dtype
    )


class _Heads(nn.Module):
    """Projects to queries, keys and values of two heads."""

    def __init__(self, width, dtype):
        super().__init__()
        self.project = nn.Linear(width, 3 * width, bias=False, dtype=dtype)
        self.merge = nn.Linear(width, width, dtype=dtype)

    def heads(self, hidden):
        parts = self.project(hidden).unflatten(-1, (3, 2, -1))
        return parts.permute(2, 0, 3, 1, 4)  # [3, batch, head, seq, width of a head]


@kind(looks_around=True, is_strided=True, takes=("mask",))
class Attention(_Heads):
    """Attention as written by hand, over the positions that a mask leaves."""

    def forward(self, hidden, mask=None):  # [batch, seq, width], [batch, seq]
        query, key, value = self.heads(hidden)
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        if mask is not None:
            scores = scores.masked_fill(~mask[:, None, None, :], -1e9)
        mixed = scores.softmax(-1) @ value
        return hidden + self.merge(mixed.transpose(1, 2).flatten(2))


@kind(looks_around=True, is_strided=True)
class FusedAttention(_Heads):
    """Attention by torch's own function."""

    def forward(self, hidden):
        query, key, value = self.heads(hidden)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.merge(mixed.transpose(1, 2).flatten(2))


@kind(looks_around=True, is_strided=True)
class SharedAttention(nn.Module):
    """Attention whose queries and keys are one projection, and whose values are the input."""

    def __init__(self, width, dtype):
        super().__init__()
        self.project = nn.Linear(width, width, bias=False, dtype=dtype)

    def forward(self, hidden):
        found = self.project(hidden)
        return (found @ found.transpose(-1, -2)).softmax(-1) @ hidden


@kind(looks_around=True, is_strided=True)
class MultiHead(nn.Module):
    """torch's own attention module."""

    def __init__(self, width, dtype):
        super().__init__()
        self.attention = nn.MultiheadAttention(width, 2, batch_first=True, dtype=dtype)

    def forward(self, hidden):
        return self.attention(hidden, hidden, hidden, need_weights=False)[0]


# ---- layers that take keywords


@kind(takes=("mask",))
class Masked(WithLinear):
    """Blanks the positions that a mask excludes."""

    def forward(self, hidden, mask=None):
        output = self.linear(hidden)
        return output if mask is None else output * mask.unsqueeze(-1)


@kind(takes=("scale",))
class Scaled(WithWeight):
    """Takes a scalar by keyword alone."""

    def forward(self, hidden, *, scale=1.0):
        return hidden @ self.weight * scale


@kind(takes=("scale", "position"))
class Positioned(nn.Module):
    """Adds a vector for each position; takes two keywords."""

    def __init__(self, width, dtype):
        super().__init__()
        self.embedding = nn.Embedding(8, width, dtype=dtype)

    def forward(self, hidden, position=None, scale=1.0):  # [batch, seq, width], [batch, seq]
        return hidden if position is None else hidden * scale + self.embedding(position)


@kind(takes=("table",))
class Shifted(nn.Module):
    """Adds a table that is the same for all rows, one row per position."""

    def __init__(self, width, dtype):
        super().__init__()
        self.gain = zeros(width, dtype=dtype)

    def forward(self, hidden, table=None):  # [batch, seq, width], [seq, width]
        return hidden if table is None else hidden + self.gain * table


# ---- the ends of a model


NUM_WORDS = 11


@kind(is_end=True)
def embedding(draw, width, dtype):
    return nn.Embedding(NUM_WORDS, width, padding_idx=draw.choice([None, None, 0]), dtype=dtype)


@kind(is_end=True)
def sparse_embedding(draw, width, dtype):
    return nn.Embedding(NUM_WORDS, width, sparse=True, dtype=dtype)


@kind(is_end=True)
def head(draw, width, dtype):
    return nn.Linear(width, NUM_WORDS, bias=False, dtype=dtype)
