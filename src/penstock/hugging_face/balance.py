"""The loss that keeps the experts of a model balanced, where its config asks for it (`output_router_logits`).

    block 0 ──sums──► block 1 ──sums──► ... ──sums──► head: the loss

It multiplies sums over all layers (Switch Transformers, arXiv 2101.03961, equations 4 to 6), so it is no sum of losses
of layers. Each block adds its sums to those of the blocks before it, and the last layer makes the loss of a microbatch.
Their mean over the microbatches is trained, with the weight `router_aux_loss_coef`.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.hugging_face.undocumented import routing_of
from penstock.models.auxiliary import AuxiliaryLoss
from penstock.models.cutting.part import CutPart
from penstock.models.skip import Skip

NAME = "experts"
"""Under which the loss is reported."""


class Balance:
    """The experts of one model, as its layers know them."""

    def __init__(self, model: Any, blocks: list[str]) -> None:
        """`blocks` are the names of the model's blocks. Raises: ConfigError, if no rule for its loss is known."""
        routing = routing_of(model)
        if routing is None:
            raise ConfigError(
                f"{type(model).__name__} has no load_balancing_loss_func over its routers, so output_router_logits=True"
                " cannot be trained in parts; set it to False",
                key="source",
            )
        self.routing = routing
        blocks_with_experts = [
            name
            for name in blocks
            if any(isinstance(module, routing.router) for module in model.get_submodule(name).modules())
        ]
        self._index_by_block = {name: index for index, name in enumerate(blocks_with_experts)}

    def kinds(self, kind: type[CutPart], names: list[str]) -> dict[str, Callable[..., CutPart]]:
        """Return what makes each layer; a block without experts is a plain one."""
        block_class, last_layer_class = _block_class(kind), _last_layer_class(kind)
        constructors: dict[str, Callable[..., CutPart]] = dict.fromkeys(names, kind)
        constructors |= {name: partial(block_class, self, index) for name, index in self._index_by_block.items()}
        constructors[names[-1]] = partial(last_layer_class, self, len(self._index_by_block) - 1)
        return constructors

    def sums(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """Return [3, experts] of one layer, in float32: tokens sent to each expert, probabilities, and rows.

        `logits` is [tokens, experts]; `mask` [batch, seq] says which tokens count.
        """
        probabilities = logits.softmax(-1)
        expert_indices = probabilities.topk(self.routing.top_k, dim=-1).indices
        token_weights = torch.ones(len(logits), device=logits.device) if mask is None else mask.reshape(-1).float()
        tokens_by_expert = torch.zeros(self.routing.num_experts, device=logits.device)
        tokens_by_expert = tokens_by_expert.index_add(
            0, expert_indices.reshape(-1), token_weights.repeat_interleave(self.routing.top_k)
        )
        probability_by_expert = (probabilities.float() * token_weights[:, None]).sum(0)
        return torch.stack(
            [tokens_by_expert, probability_by_expert, token_weights.sum().expand(self.routing.num_experts)]
        )

    def loss(self, sums: Tensor) -> Tensor:
        """Return the loss of the sums over all layers."""
        tokens_by_expert, probability_by_expert, rows = sums.unbind()
        return (tokens_by_expert / rows * (probability_by_expert / rows)).sum() * self.routing.num_experts


def _block_class(kind: type[CutPart]) -> Callable[..., CutPart]:
    class Routed(kind):  # type: ignore[misc, valid-type]
        """A block with experts."""

        def __init__(self, balance: Balance, index: int, *args: Any) -> None:
            super().__init__(*args)
            self._balance = balance
            self.skip, self.previous_skip = Skip(f"{NAME} {index}"), Skip(f"{NAME} {index - 1}") if index else None

        def forward(self, *inputs: Any, **keywords: Any) -> Any:
            with _recorded_logits(self, self._balance.routing.router) as notes:
                output = super().forward(*inputs, **keywords)
            mask = keywords.get("attention_mask")
            sums = torch.stack([self._balance.sums(logits, mask) for logits in notes]).sum(0)
            self.skip.put(sums if self.previous_skip is None else sums + self.previous_skip.get())
            return output

    return Routed


def _last_layer_class(kind: type[CutPart]) -> Callable[..., CutPart]:
    class Closing(kind):  # type: ignore[misc, valid-type]
        """The last layer, which makes the loss."""

        tail = None
        """No loss may apply the layer to some positions, since it does more than that."""

        def __init__(self, balance: Balance, index: int, *args: Any) -> None:
            super().__init__(*args)
            self._balance = balance
            self.skip, self.auxiliary = Skip(f"{NAME} {index}"), AuxiliaryLoss(NAME, balance.routing.weight)

        def forward(self, *inputs: Any, **keywords: Any) -> Any:
            output = super().forward(*inputs, **keywords)
            self.auxiliary.add(self._balance.loss(self.skip.get()))
            return output

    return Closing


@contextmanager
def _recorded_logits(part: CutPart, router: type[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect the logits of the routers of a layer; hooks stay for one forward, since copies of a layer share them."""
    logits: list[Tensor] = []

    def record(module: nn.Module, args: Any, output: Any) -> None:
        logits.append(output[0] if isinstance(output, tuple) else output)

    routers = [module for module in part.modules() if isinstance(module, router)]
    handles = [module.register_forward_hook(record) for module in routers]
    try:
        yield logits
    finally:
        for handle in handles:
            handle.remove()
