"""What users put around a layer: checkpoints, torch.compile, modules that forward whatever they get."""

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts


class _Wrapper(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner


class Forwards(_Wrapper):
    """Takes anything, and gives it to the layer inside."""

    def forward(self, *args, **kwargs):
        return self.inner(*args, **kwargs)


class Checkpointed(_Wrapper):
    """Recomputes the layer in its backward."""

    def forward(self, hidden, **kwargs):
        return checkpoint(self.inner, hidden, use_reentrant=False, **kwargs)


class Reentrant(_Wrapper):
    """Recomputes the layer in its backward, by a backward within the backward."""

    def forward(self, hidden, **kwargs):
        return checkpoint(lambda given: self.inner(given, **kwargs), hidden, use_reentrant=True)


def _save_products(context, operation, *args, **kwargs):
    is_product = operation in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(_Wrapper):
    """Recomputes the layer but for its matrix products, which are saved."""

    def forward(self, *args, **kwargs):
        def contexts():
            return create_selective_checkpoint_contexts(_save_products)

        return checkpoint(self.inner, *args, use_reentrant=False, context_fn=contexts, **kwargs)


def _of_torch(implementation):
    return lambda inner: checkpoint_wrapper(inner, checkpoint_impl=implementation)


def _compiled(backend):
    return lambda inner: torch.compile(inner, backend=backend)


RECOMPUTING = {
    "checkpoint": Checkpointed,
    "reentrant": Reentrant,
    "selective": Selective,
    "checkpoint_wrapper": _of_torch(CheckpointImpl.NO_REENTRANT),
    "reentrant checkpoint_wrapper": _of_torch(CheckpointImpl.REENTRANT),
}
COMPILED = {"compile eager": _compiled("eager"), "compile aot_eager": _compiled("aot_eager")}
WRAPPERS = {"forwards": Forwards, "sequential": nn.Sequential, **RECOMPUTING, **COMPILED}
"""By name: from a layer to the layer with something around it. `sequential` takes no keywords."""
