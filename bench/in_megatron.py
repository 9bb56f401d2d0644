"""Megatron-core's schedules on the CPU over gloo, on the model of bench/peers.py.

Megatron-core allocates on "cuda" by name and waits for CUDA streams. In the process that calls `megatron_step`, torch's
constructors put such tensors on the CPU, and those waits return at once.
"""

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from peer_cases import NUM_BLOCKS, NUM_HEADS, Case, sgd
from torch import Tensor, nn

CONSTRUCTORS = ("empty", "zeros", "ones", "full", "tensor", "arange", "empty_like", "zeros_like", "ones_like", "randn")


class Part(nn.Module):
    """A stage as Megatron-core calls it: what it computes on is set before."""

    def __init__(self, layers: nn.Module, config: Any, model_type: Any) -> None:
        super().__init__()
        self.layers, self.config, self.model_type = layers, config, model_type
        self._received: Tensor | None = None

    def set_input_tensor(self, received: Any) -> None:
        self._received = received[0] if isinstance(received, list) else received

    def forward(self, tokens: Tensor) -> Tensor:
        output: Tensor = self.layers(tokens if self._received is None else self._received)
        return output


def megatron_step(case: Case, family: str) -> Callable[[], float | None]:
    """Return one step of 1F1B, or of its interleaved form with two stages a rank; the last rank knows the loss."""
    redirect_cuda()
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.transformer import TransformerConfig

    num_parts = 2 if family == "interleaved-1f1b" else 1
    virtual = {"virtual_pipeline_model_parallel_size": num_parts} if num_parts > 1 else {}
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=case.num_ranks, **virtual)
    config = TransformerConfig(
        num_layers=NUM_BLOCKS,
        num_attention_heads=NUM_HEADS,
        hidden_size=case.width,
        pipeline_model_parallel_size=case.num_ranks,
        pipeline_dtype=torch.float32,
        deallocate_pipeline_outputs=True,  # what Megatron-LM's own training sets
        batch_p2p_comm=num_parts == 1,  # the same
        **virtual,
    )
    num_stages = num_parts * case.num_ranks
    stages = range(dist.get_rank(), num_stages, case.num_ranks)
    parts = [Part(case.part(stage, num_stages), config, ModelType.encoder_or_decoder) for stage in stages]
    optimizer = sgd([parameter for part in parts for parameter in part.parameters()])
    microbatches, run = case.microbatches(), get_forward_backward_func()

    def forward_step(items: Iterator[tuple[Tensor, Tensor]], part: Part) -> tuple[Tensor, Callable[..., Any]]:
        tokens, target = next(items)

        def loss(output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
            mean = case.loss(output, target)
            return mean, {"loss": mean.detach().clone()}  # Megatron-core divides the loss in place

        return part(tokens), loss

    def step() -> float | None:
        optimizer.zero_grad()
        iterators = [iter(microbatches) for _ in parts]
        reports = run(
            forward_step_func=forward_step,
            data_iterator=iterators if num_parts > 1 else iterators[0],
            model=parts if num_parts > 1 else parts[0],
            num_microbatches=case.num_microbatches,
            seq_length=case.rows,  # only the shape of messages is made of these two, and here rows come first
            micro_batch_size=case.length,
            forward_only=False,
        )
        optimizer.step()
        return sum(float(report["loss"]) for report in reports) / len(reports) if reports else None

    return step


def redirect_cuda() -> None:
    """In this process, let "cuda" mean the CPU, and waiting for it nothing."""
    for name in CONSTRUCTORS:
        setattr(torch, name, _on_the_cpu(getattr(torch, name)))
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    torch.cuda.synchronize = lambda device=None: None  # type: ignore[assignment]


def _on_the_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    @functools.wraps(make)
    def redirected(*arguments: Any, **options: Any) -> Tensor:
        if "cuda" in str(options.get("device", "")):
            options["device"] = "cpu"
        return make(*arguments, **options)

    return redirected
