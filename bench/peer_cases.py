"""What bench/peers.py trains: one decoder, in sizes at which different things take the time of a step."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from emulated_layer import EmulatedLayer
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from penstock.models import DecoderConfig, LayerSpec, cross_entropy_loss, decoder_layers

NUM_BLOCKS, NUM_HEADS = 8, 4
VOCABULARY = 256
LEARNING_RATE = 0.01
SLEEP_S = 0.010


@dataclass(frozen=True, slots=True)
class Case:
    """One size of the model, on so many ranks."""

    name: str
    num_ranks: int
    num_microbatches: int
    rows: int
    """Sequences of a microbatch."""
    length: int
    """Tokens of a sequence."""
    width: int
    has_small_blocks: bool = False
    """Each is a linear layer and a tanh (without which it would return a view, and torch could not split backwards)."""
    is_timed: bool = True
    sleep_s: float = 0.0
    """Of a rank and microbatch in F, and in I and W of a split backward; the blocks of a rank share it."""

    def blocks(self) -> list[LayerSpec]:
        """Describe the model; every block has the same first values, whatever process builds it."""
        if self.has_small_blocks:
            layers = [LayerSpec("linear", partial(nn.Linear, self.width, self.width)), LayerSpec("tanh", nn.Tanh)]
            groups = [[*layers, *self._sleep()]] * NUM_BLOCKS
        else:
            embedding, *blocks, norm, head = decoder_layers(self._decoder())
            groups = [[embedding, blocks[0]], *([block] for block in blocks[1:-1]), [blocks[-1], norm, head]]
        return [LayerSpec(f"blocks.{index}", partial(_build, group)) for index, group in enumerate(groups)]

    def part(self, stage: int, num_stages: int) -> nn.Sequential:
        """Build the blocks of one stage."""
        size = NUM_BLOCKS // num_stages
        return nn.Sequential(*(spec() for spec in self.blocks()[stage * size : (stage + 1) * size]))

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return the whole batch and its target, the same in every process."""
        chance = torch.Generator().manual_seed(0)
        num_rows = self.num_microbatches * self.rows
        if self.has_small_blocks:
            features = torch.randn(2, num_rows, self.length, self.width, generator=chance)
            return features[0], features[1]
        tokens = torch.randint(VOCABULARY, (num_rows, self.length + 1), generator=chance)
        return tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()

    def microbatches(self) -> list[tuple[Tensor, Tensor]]:
        """Return the same batch in pieces."""
        return list(zip(*(each.split(self.rows) for each in self.batch()), strict=True))

    @property
    def loss(self) -> Callable[[Tensor, Tensor], Tensor]:
        """The mean over a microbatch."""
        return mse_loss if self.has_small_blocks else cross_entropy_loss

    def _sleep(self) -> list[LayerSpec]:
        part_s = self.sleep_s * self.num_ranks / NUM_BLOCKS
        return [LayerSpec("sleep", partial(EmulatedLayer, part_s, 2 * part_s, weight_s=part_s))] if part_s else []

    def _decoder(self) -> DecoderConfig:
        return DecoderConfig(
            vocabulary=VOCABULARY, width=self.width, layers=NUM_BLOCKS, heads=NUM_HEADS,
            key_value_heads=NUM_HEADS, hidden=43 * self.width // 16, length=self.length,
        )  # fmt: skip


def _build(specs: Sequence[LayerSpec]) -> nn.Sequential:
    return nn.Sequential(*(spec() for spec in specs))


CASES = {
    case.name: case
    for case in (
        Case("decoder-2", 2, 8, rows=2, length=128, width=256),
        Case("decoder-4", 4, 16, rows=1, length=128, width=256, is_timed=False),
        Case("emulated-2", 2, 8, rows=4, length=1, width=64, has_small_blocks=True, sleep_s=SLEEP_S),
        Case("emulated-4", 4, 8, rows=4, length=1, width=64, has_small_blocks=True, sleep_s=SLEEP_S),
        Case("tiny-2", 2, 64, rows=4, length=1, width=64, has_small_blocks=True),
        Case("tiny-4", 4, 64, rows=4, length=1, width=64, has_small_blocks=True),
    )
}


def sgd(parameters: Sequence[nn.Parameter]) -> torch.optim.SGD:
    """Return the optimizer of every system: a loss that agrees after some steps had the same gradients before."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)
