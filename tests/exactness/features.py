"""The models, losses and batches of the exactness product: what a user may do in a layer, one feature each.

Every model reads tokens and gives a score per word, so that every loss fits every model. All values are float64.
"""

from functools import partial

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm
from torch.utils.checkpoint import checkpoint

from penstock.execute.batch.microbatch import PreSplit
from penstock.models import Skip
from tests.support.local_pipelines import IGNORED, VOCABULARY, WIDTH, block, count_tokens, settle, token_loss
from tests.support.own_weight_gradients import Fused, Plain, layers_of
from tests.support.using import AskingProduct

FLOAT64 = torch.float64
LENGTH = 6
"""Divides evenly into as many slices as there are."""
SEED = 11


class Recomputed(nn.Module):
    """A layer whose forward runs again in its backward."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return checkpoint(self.inner, x, use_reentrant=False)


class Skipping(nn.Module):
    """Hands its output on under some names, and takes in what others have forwarded."""

    def __init__(self, inner, puts=(), gets=()):
        super().__init__()
        self.inner = inner
        self.puts = nn.ModuleList(map(Skip, puts))
        self.gets = nn.ModuleList(map(Skip, gets))

    def forward(self, x):
        for skip in self.gets:
            handed_on = skip.get()
            x = x + handed_on["hidden"] * handed_on["scale"]
        output = self.inner(x)
        for skip in self.puts:
            skip.put({"hidden": output, "scale": 0.5, "length": torch.tensor(output.shape[-2])})
        return output


class DictBlock(nn.Module):
    """Takes and returns a dict with tensors that need a gradient and ones that do not, and other values."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, state):
        hidden = self.inner(state["hidden"]) * state["mask"] + state["bias"]
        return {**state, "hidden": hidden, "depth": state["depth"] + 1}


class DictBegin(DictBlock):
    """The first layer of a model whose layers pass dicts."""

    def forward(self, tokens):
        hidden = self.inner(tokens)
        mask = (tokens % 3 != 0)[..., None]
        return {"depth": 0, "hidden": hidden, "bias": hidden.mean(-1, keepdim=True), "mask": mask, "note": None}


class DictEnd(DictBlock):
    """The last layer of a model whose layers pass dicts."""

    def forward(self, state):
        return self.inner(state["hidden"]) / state["depth"]


class Squared(torch.autograd.Function):
    """A function of a weight alone."""

    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight)
        return weight**2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2 * ctx.saved_tensors[0]


class Custom(nn.Module):
    """Runs functions of the user's own around a layer: of activations and a weight, and of a weight alone."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH, dtype=FLOAT64))
        self.vector = nn.Parameter(torch.empty(WIDTH, dtype=FLOAT64))

    def forward(self, x):
        return AskingProduct.apply(self.inner(x), self.weight) + Squared.apply(self.vector)


class LowRank(nn.Module):
    """Adds a difference of low rank to a frozen matrix, and another to its output."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner
        self.frozen = nn.Linear(WIDTH, WIDTH, dtype=FLOAT64).requires_grad_(False)
        self.down, self.up = (nn.Parameter(torch.empty(*size, dtype=FLOAT64)) for size in ((2, WIDTH), (WIDTH, 2)))

    def forward(self, x):
        difference = self.up @ self.down
        return F.linear(self.inner(x), self.frozen.weight + difference, self.frozen.bias) + difference[0]


# ---- models: a number of layers, at least 3, to the layers


def embedding():
    return settle(nn.Embedding(VOCABULARY, WIDTH, dtype=FLOAT64), 100)


def head():
    return settle(nn.Linear(WIDTH, VOCABULARY, bias=False, dtype=FLOAT64), 101)


def blocks(num_layers):
    return [block(seed, FLOAT64) for seed in range(num_layers - 2)]


def plain(num_layers):
    return [embedding(), *blocks(num_layers), head()]


def tied(num_layers):
    first, *middle, last = plain(num_layers)
    last.weight = first.weight
    return [first, *middle, last]


def skip(num_layers):
    """A skip from the first layer to the last one and one between, a short one, and one within a layer's reach."""
    first, *middle, last = plain(num_layers)
    center = len(middle) // 2
    found = [Skipping(first, ["far"])]
    for index, inner in enumerate(middle):
        gets = ["far"] if index == center else []
        gets += [f"near {index - 1}"] if index % 2 else []
        puts = [] if index % 2 or index + 1 == len(middle) else [f"near {index}"]
        found.append(Skipping(inner, puts, gets))
    return [*found, Skipping(last, gets=["far"])]


def frozen(num_layers):
    layers = plain(num_layers)
    for index, layer in enumerate(layers):
        layer.requires_grad_(index % 3 != 0)
    layers[1][0].requires_grad_(False)
    return layers


def checkpointed(num_layers):
    first, *middle, last = plain(num_layers)
    return [first, *(Recomputed(each) if index % 2 == 0 else each for index, each in enumerate(middle)), last]


def dropout(num_layers):
    first, *middle, last = plain(num_layers)
    dropping = [nn.Sequential(nn.Dropout(0.25), each, nn.Dropout(0.25)) for each in middle]
    return [first, *(Recomputed(each) if index % 2 == 0 else each for index, each in enumerate(dropping)), last]


def dict_boundary(num_layers):
    first, *middle, last = plain(num_layers)
    return [DictBegin(first), *map(DictBlock, middle), DictEnd(last)]


def custom_function(num_layers):
    first, *middle, last = plain(num_layers)
    return [first, *(settle(Custom(each), seed) for seed, each in enumerate(middle)), last]


def low_rank(num_layers):
    first, *middle, last = plain(num_layers)
    return [first, *(settle(LowRank(each), seed) for seed, each in enumerate(middle)), last]


def parametrized(num_layers):
    first, *middle, last = plain(num_layers)
    for layer in middle:
        for module in [each for each in layer.modules() if isinstance(each, nn.Linear)]:
            weight_norm(module)
    return [first, *middle, last]


def fused(num_layers, kind=Fused):
    first, *middle, last = plain(num_layers)
    own = layers_of(kind, len(middle), FLOAT64)
    return [first, *(nn.Sequential(each, later) for each, later in zip(middle, own, strict=True)), last]


MODELS = {
    "plain": plain,
    "compiled": plain,
    "fused": fused,
    "custom function": custom_function,
    "low rank": low_rank,
    "parametrized": parametrized,
    "tied": tied,
    "skip": skip,
    "frozen": frozen,
    "checkpointed": checkpointed,
    "dropout": dropout,
    "dict boundary": dict_boundary,
    "ragged": plain,
    "variable length": plain,
}


# ---- losses: how the loss is computed, and what the pipeline is told of it


def mean_loss(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten())


def sum_loss(output, target):
    return F.cross_entropy(output.flatten(0, -2), target.flatten(), reduction="sum")


REFERENCES = {"fused": partial(fused, kind=Plain)}
"""The models of one process, where nobody asks fused layers for the gradients that they have left for later."""
LOSSES = {
    "mean": (mean_loss, {}),
    "sum": (sum_loss, {"reduction": "sum"}),
    "token": (token_loss, {"count": count_tokens}),
}


# ---- batches: a feature, a loss and a number of microbatches to the batch of a step


def batch(feature, loss, num_microbatches, step):
    """Return tokens and target; every step has other ones, and of another shape where lengths vary."""
    generator = torch.Generator().manual_seed(1000 + step)
    shapes = [(2, LENGTH)] * num_microbatches
    if feature == "ragged":
        shapes = [(2 * num_microbatches + 1, LENGTH - 1)]
    if feature == "variable length":
        shapes = [(1 + index % 2, 3 + (index + step) % 4) for index in range(num_microbatches)]
    parts = [torch.randint(VOCABULARY, (2, *shape), generator=generator) for shape in shapes]
    tokens, targets = [part[0] for part in parts], [part[1] for part in parts]
    if loss == "token":
        for target in targets:
            target[::2, 1:] = IGNORED
    if feature == "variable length":
        return PreSplit(tokens), PreSplit(targets)
    return torch.cat(tokens), torch.cat(targets)


def options(feature, loss):
    """What the pipeline is told."""
    ragged = {"allow_ragged": True} if feature in ("ragged", "variable length") else {}
    seeded = {"seed": SEED} if feature == "dropout" else {}
    return LOSSES[loss][1] | ragged | seeded
