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
from penstock.hugging_face.undocumented import has_balance_loss, router_class
from penstock.models.auxiliary import AuxiliaryLoss
from penstock.models.cutting.part import CutPart
from penstock.models.skip import Skip

NAME = "experts"
"""Under which the loss is reported."""


class Balance:
    """The experts of one model, as its layers know them."""

    def __init__(self, whole: Any, blocks: list[str]) -> None:
        """`blocks` are the names of the model's blocks. Raises: ConfigError, if no rule for its loss is known."""
        self.router: type[nn.Module] | None = router_class(whole)
        if self.router is None or not has_balance_loss(whole):
            raise ConfigError(
                f"{type(whole).__name__} has no load_balancing_loss_func over its routers, so output_router_logits=True"
                " cannot be trained in parts; set it to False",
                key="source",
            )
        self.num_experts = int(whole.num_experts)
        self.top_k = int(whole.num_experts_per_tok)
        self.weight = float(whole.router_aux_loss_coef)
        routed = [
            name
            for name in blocks
            if any(isinstance(each, self.router) for each in whole.get_submodule(name).modules())
        ]
        self._places = {name: place for place, name in enumerate(routed)}

    def kinds(self, kind: type[CutPart], names: list[str]) -> dict[str, Callable[..., CutPart]]:
        """Return what makes each layer; a block without experts is a plain one."""
        routed, closing = _routed(kind), _closing(kind)
        made: dict[str, Callable[..., CutPart]] = dict.fromkeys(names, kind)
        made |= {name: partial(routed, self, place) for name, place in self._places.items()}
        made[names[-1]] = partial(closing, self, len(self._places) - 1)
        return made

    def sums(self, logits: Tensor, mask: Tensor | None) -> Tensor:
        """Return [3, experts] of one layer, in float32: tokens sent to each expert, probabilities, and rows.

        `logits` is [tokens, experts]; `mask` [batch, seq] says which tokens count.
        """
        probabilities = logits.softmax(-1)
        chosen = probabilities.topk(self.top_k, dim=-1).indices
        counted = torch.ones(len(logits), device=logits.device) if mask is None else mask.reshape(-1).float()
        sent = torch.zeros(self.num_experts, device=logits.device)
        sent = sent.index_add(0, chosen.reshape(-1), counted.repeat_interleave(self.top_k))
        likely = (probabilities.float() * counted[:, None]).sum(0)
        return torch.stack([sent, likely, counted.sum().expand(self.num_experts)])

    def loss(self, sums: Tensor) -> Tensor:
        """Return the loss of the sums over all layers."""
        sent, likely, rows = sums.unbind()
        return (sent / rows * (likely / rows)).sum() * self.num_experts


def _routed(kind: type[CutPart]) -> Callable[..., CutPart]:
    class Routed(kind):  # type: ignore[misc, valid-type]
        """A block with experts."""

        def __init__(self, balance: Balance, place: int, *args: Any) -> None:
            super().__init__(*args)
            self._balance = balance
            self.own, self.before = Skip(f"{NAME} {place}"), Skip(f"{NAME} {place - 1}") if place else None

        def forward(self, *inputs: Any, **keywords: Any) -> Any:
            with _noting(self, self._balance.router) as notes:
                output = super().forward(*inputs, **keywords)
            mask = keywords.get("attention_mask")
            sums = torch.stack([self._balance.sums(logits, mask) for logits in notes]).sum(0)
            self.own.put(sums if self.before is None else sums + self.before.get())
            return output

    return Routed


def _closing(kind: type[CutPart]) -> Callable[..., CutPart]:
    class Closing(kind):  # type: ignore[misc, valid-type]
        """The last layer, which makes the loss."""

        def __init__(self, balance: Balance, place: int, *args: Any) -> None:
            super().__init__(*args)
            self._balance = balance
            self.skip, self.auxiliary = Skip(f"{NAME} {place}"), AuxiliaryLoss(NAME, balance.weight)

        def forward(self, *inputs: Any, **keywords: Any) -> Any:
            output = super().forward(*inputs, **keywords)
            self.auxiliary.add(self._balance.loss(self.skip.get()))
            return output

    return Closing


@contextmanager
def _noting(part: CutPart, router: type[nn.Module] | None) -> Iterator[list[Tensor]]:
    """Collect the logits of the routers of a layer; hooks stay for one forward, since copies of a layer share them."""
    notes: list[Tensor] = []

    def note(module: nn.Module, args: Any, output: Any) -> None:
        notes.append(output[0] if isinstance(output, tuple) else output)

    routers = [each for each in part.modules() if router is not None and isinstance(each, router)]
    handles = [each.register_forward_hook(note) for each in routers]
    try:
        yield notes
    finally:
        for handle in handles:
            handle.remove()
