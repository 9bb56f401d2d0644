"""Steps with a planted cause: emulated work on ranks that are threads, through the trainer, and one thing made slow.

Work passes the time of `CLOCKS`, up to `NOISE` more than it is given, and nothing else does.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import torch

from bench.emulated_layer import EmulatedLayer
from penstock.execute.batch.stream import Stream
from penstock.execute.observing.clock import Clock
from penstock.pipeline import Pipeline
from penstock.searching.what_if import Setting
from penstock.train.settings.sections import OptimizerSection
from penstock.train.step import Trainer
from tests.support.rank_clocks import RankClocks, clocked

OPTIONS = OptimizerSection(learning_rate=1e-3, warmup_steps=0)
FORWARD_S, BACKWARD_S = 0.003, 0.006
NOISE = 0.1
MAX_WAIT_S = 60.0
CLOCKS = RankClocks(NOISE)


@dataclass(frozen=True)
class Planted:
    """A run of emulated work, and what is slow in it."""

    schedule: str = "1f1b"
    num_ranks: int = 3
    num_microbatches: int = 6
    layers_per_stage: int = 1
    slow_stages: dict = field(default_factory=dict)
    """Factors by stage."""
    slow_channels: dict = field(default_factory=dict)
    """Seconds by (sender, receiver)."""
    late_ranks: dict = field(default_factory=dict)
    """Seconds by rank, before the step."""
    slow_data: dict = field(default_factory=dict)
    """Seconds by rank, for a batch."""
    slow_streams: dict = field(default_factory=dict)
    """Seconds by rank and microbatch; if there are any, all ranks have streams."""

    @property
    def setting(self):
        return Setting(batch_size=self.num_microbatches, family=self.schedule, stages_per_rank=1)

    def record(self):
        """Return one recorded step, as a run records it; `CLOCKS` must stand in for the time of emulated layers."""
        connect = clocked(CLOCKS, lambda *ends, num_bytes: self.slow_channels.get(ends, 0.0))
        transports = connect(self.num_ranks, MAX_WAIT_S)
        with ThreadPoolExecutor(self.num_ranks) as threads:
            recorded, *_ = [rank.result() for rank in [threads.submit(self._run, wires) for wires in transports]]
        return recorded

    def _run(self, wires):
        layers = [
            EmulatedLayer(
                *(self.slow_stages.get(stage, 1) * s / self.layers_per_stage for s in (FORWARD_S, BACKWARD_S))
            )
            for stage in range(self.num_ranks)
            for _ in range(self.layers_per_stage)
        ]
        options = {"transport": wires, "clock": Clock(CLOCKS.monotonic)}
        pipeline = Pipeline(layers, self.schedule, self.num_microbatches, square_loss, **options)
        trainer = Trainer(pipeline, OPTIONS, num_steps=10)
        trainer.step(1, _Batches(0.0, self.num_microbatches))
        batches = _Batches(self.slow_data.get(wires.rank, 0.0), self.num_microbatches)
        if self.slow_streams:
            batches = _Streams(wires.rank, self.slow_streams, self.num_microbatches)
        CLOCKS.sleep(self.late_ranks.get(wires.rank, 0.0))
        recorded = trainer.step(2, batches, record=True).recorded
        pipeline.close()
        return recorded


@dataclass(frozen=True)
class _Batches:
    load_s: float
    size: int

    def __len__(self):
        return 1

    def __getitem__(self, index):
        CLOCKS.sleep(self.load_s)
        return torch.zeros(self.size, 4), torch.zeros(self.size, 4)


@dataclass(frozen=True)
class _Streams:
    rank: int
    slow: dict
    num_microbatches: int

    def __len__(self):
        return 1

    def __getitem__(self, index):
        return Stream(map(self._microbatch, range(self.num_microbatches)))

    def _microbatch(self, index):
        CLOCKS.sleep(self.slow.get((self.rank, index), 0.0))
        return torch.zeros(1, 4), torch.zeros(1, 4)


def square_loss(output, target):
    return ((output - target) ** 2).mean()
