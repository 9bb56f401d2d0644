"""Leaves that are no parameters of a stage get the gradients of one process, under whole and split backwards.

Autograd gives such a leaf a view of the gradient that W or another stage still needs. The microbatches have one row, as
that takes: a gradient of several rows is summed up into memory of its own.
"""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from penstock.execute.batch.microbatch import BatchSpec, Replicate
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import WIDTH, gradients_of, named, on_ranks, settle, values
from tests.support.reference import reference_step

NUM_LAYERS, NUM_MICROBATCHES = 4, 4
F64 = torch.float64


class Given(nn.Module):
    """Adds a soft prompt that comes as a keyword."""

    def __init__(self, seed):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH, dtype=F64), seed)

    def forward(self, x, prompt):
        return self.linear(x) + prompt[None]


class BeforeLinear(Given):
    """Adds it to the stage's input, whose gradient may then have the same memory."""

    def forward(self, x, prompt):
        return self.linear(x.view(x.shape) + prompt[None])


class Checkpointed(Given):
    """Computes both again within the backward, in a graph that no search from outside finds."""

    def forward(self, x, prompt):
        return checkpoint(super().forward, x, prompt, use_reentrant=True)


class Unregistered(nn.Module):
    """Holds a leaf that is no parameter."""

    def __init__(self, seed):
        super().__init__()
        self.linear = settle(nn.Linear(WIDTH, WIDTH, dtype=F64), seed)
        self.held = [values(seed, WIDTH, dtype=F64).requires_grad_()]

    def forward(self, x):
        return self.linear(x) + self.held[0][None]


class Sometimes(Unregistered):
    """Uses its leaf in some microbatches."""

    def forward(self, x):
        return super().forward(x) if x.sum() > 0 else self.linear(x)


class PlainLinear(nn.Linear):
    def __init__(self, seed):
        super().__init__(WIDTH, WIDTH, dtype=F64)
        settle(self, seed)


class Loss(nn.Module):
    """May have a parameter of its own."""

    def __init__(self, *, is_trained):
        super().__init__()
        self.offset = nn.Parameter(values(7, WIDTH, dtype=F64)) if is_trained else torch.zeros(WIDTH)

    def forward(self, output, target):
        return ((output.view(output.shape) + self.offset[None] - target) ** 2).mean()


def leaves_of(layers, loss, prompt):
    """Every leaf that no stage lists, by a name."""
    found = {"prompt": prompt, "offset": loss.offset}
    found |= {f"held {index}": layer.held[0] for index, layer in layers if hasattr(layer, "held")}
    return found.items()


def setting(kind):
    # At most one such leaf between two products: torch itself lets two of them share the memory of their gradients.
    layers, loss = [kind(seed) for seed in range(NUM_LAYERS)], Loss(is_trained=kind is PlainLinear)
    prompt = values(9, WIDTH, dtype=F64).requires_grad_()
    return layers, loss, prompt, {"prompt": prompt} if issubclass(kind, Given) else {}


CASES = [("gpipe", 1), ("1f1b", 2), ("interleaved-zb", 2), ("zb-h1", 1), ("zbv", 2), ("chimera", 2)]
SLOW_CASES = [("interleaved-1f1b", 1), ("zb-h1", 2), ("dualpipe-v", 2), ("dualpipe", 2)]


@pytest.mark.parametrize("kind", [PlainLinear, Given, BeforeLinear, Checkpointed, Unregistered, Sometimes])
@pytest.mark.parametrize(
    ("schedule", "num_ranks"), [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW_CASES)]
)
def test_all_leaves_get_the_gradients_of_one_process(schedule, num_ranks, kind):
    inputs, target = (values(seed, NUM_MICROBATCHES, WIDTH, dtype=F64) for seed in (1, 2))
    inputs.requires_grad_(kind is Checkpointed)  # reentrant checkpointing passes no gradient on otherwise
    specs = BatchSpec(kwargs={"prompt": Replicate()}) if issubclass(kind, Given) else None

    def case(wires):
        layers, loss, prompt, keywords = setting(kind)
        pipeline = Pipeline(layers, schedule, NUM_MICROBATCHES, loss, specs=specs, transport=wires)
        result = pipeline.step(inputs.detach().requires_grad_(inputs.requires_grad), target=target, **keywords)
        own = [item for stage in pipeline.stages for item in stage.layers.items()]  # with two routes, copies too
        return result.loss, gradients_of(pipeline.named_parameters()), gradients_of(leaves_of(own, loss, prompt))

    layers, loss, prompt, keywords = setting(kind)
    options = {"loss": loss, "num_microbatches": NUM_MICROBATCHES, "specs": specs}
    expected = reference_step(layers, (inputs,), keywords, target, **options).loss
    wanted, wanted_of_leaves = gradients_of(named(layers)), gradients_of(leaves_of(enumerate(layers), loss, prompt))
    found = on_ranks(num_ranks, case)

    for loss_found, gradients, _ in found:
        assert torch.equal(loss_found, expected)
        assert all(torch.allclose(gradient, wanted[name]) for name, gradient in gradients.items())
    for name, gradient in wanted_of_leaves.items():
        of_ranks = [own[name] for *_, own in found if own.get(name) is not None]
        assert (gradient is None) is (not of_ranks)
        assert gradient is None or torch.allclose(sum(of_ranks), gradient), name
