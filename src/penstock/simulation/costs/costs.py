"""`Costs`: how long each kind of action takes on each stage, what a message costs, and what stays in memory."""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.errors import ConfigError, shortened
from penstock.ir.live import StageBytes
from penstock.ir.operations import NUM_OPS, Kind, Op
from penstock.placement import Placement
from penstock.simulation.costs.analytic import Machine, figures
from penstock.simulation.costs.rules import MOST_BYTES, require_cost, require_costs, require_range
from penstock.simulation.costs.transformer import Transformer

PerStage = tuple[float, ...]
"""One entry per stage, or a single one that counts for every stage."""

FIELD_OF_KIND = {
    Kind.FORWARD: "forward_s",
    Kind.BACKWARD: "backward_s",
    Kind.BACKWARD_INPUT: "backward_input_s",
    Kind.BACKWARD_WEIGHT: "backward_weight_s",
    Kind.RECOMPUTE: "recompute_s",
}

FIELD_OF_OP = {Op.REDUCE_GRADIENT: "reduce_s", Op.OPTIMIZER_STEP: "optimizer_s", Op.UNSHARD: "unshard_s"}
FIELD_OF_OP |= {Op.OFFLOAD: "offload_s", Op.RELOAD: "reload_s", Op.LOAD: "load_s"}
"""Seconds per stage of operations that compute nothing; those without a field take no time."""
COMPUTE_FIELDS = (*FIELD_OF_KIND.values(), "split_forward_s")
"""The fields with seconds of computations, per stage."""
WORKSPACE_BYTES = ("forward_workspace_bytes", "backward_workspace_bytes")
"""The fields with bytes that a computation gives back at its end."""
VALUE_BYTES = ("activation_bytes", "weight_context_bytes", "checkpoint_bytes", "message_bytes", *WORKSPACE_BYTES)
"""The fields with bytes of what a microbatch leaves on a stage, or takes there while a computation runs."""
STATIC_BYTES = ("parameter_bytes", "gradient_bytes", "optimizer_bytes")
"""The fields with bytes that a stage always has."""
NO_COSTS = ("channels", "spreads", "source")


@dataclass(frozen=True, slots=True)
class Channel:
    """The costs of messages from one rank to one other, where they differ from the other channels."""

    sender: int
    receiver: int
    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf
    is_exclusive: bool = False

    def __post_init__(self) -> None:
        require_cost(self.latency_s, "channels.latency_s")
        require_cost(self.bandwidth_bytes_per_s, "channels.bandwidth_bytes_per_s")


@dataclass(frozen=True, slots=True)
class Spread:
    """How much measured seconds of one kind on one stage differ; for the reader, simulation does not use it."""

    kind: Kind
    stage: int
    median_s: float
    quartile_range_s: float
    """The middle half of the measurements is within this many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedCosts:
    """The costs that are given alike per stage and per layer.

    A field with several entries takes any sequence of numbers, an array too, or one number for all; it is a tuple then.
    A transfer takes `latency_s` plus `message_bytes` / `bandwidth_bytes_per_s`. On a serialized link (`is_exclusive`)
    messages follow one another; otherwise they do not delay one another.
    """

    overlap_factor: float = 1.0
    """Two actions that run together take this times the sum of both."""
    microbatch_compute_factor: tuple[float, ...] = (1.0,)
    """How many times the given seconds each microbatch takes; one entry per microbatch, or one for all."""
    tied_reduce_s: tuple[float, ...] = (0.0,)
    """Reducing a tied gradient; one entry per tied group, or one for all."""

    latency_s: float = 0.0
    bandwidth_bytes_per_s: float = math.inf
    is_exclusive: bool = False
    channels: tuple[Channel, ...] = ()
    """The channels that differ from the three lines above."""
    awaits_receives: bool = False
    """Whether a message begins once its receive is posted too, as over gloo and NCCL; of programs, which post them."""
    launch_s: float = 0.0
    """Host time of every instruction, on top of what it does."""

    message_bytes: tuple[int, ...] = (0,)
    """Bytes of the output of a stage (or layer), and of its gradient."""
    activation_bytes: tuple[int, ...] = (0,)
    """Bytes that a forward keeps until its backward, its inputs among them."""
    weight_context_bytes: tuple[int, ...] = (0,)
    """Bytes kept between the input gradient and the weight gradient of a split backward."""
    checkpoint_bytes: tuple[int, ...] = ()
    """Bytes of the inputs that a recomputed forward keeps; the message that brings them unless given."""
    forward_workspace_bytes: tuple[int, ...] = (0,)
    """Bytes that a forward takes while it runs and gives back at its end, beside what it keeps."""
    backward_workspace_bytes: tuple[int, ...] = (0,)
    """Bytes that a backward, or either part of a split one, takes while it runs and gives back at its end."""
    microbatch_bytes_factor: tuple[float, ...] = (1.0,)
    """How many times these bytes each microbatch has."""
    parameter_bytes: tuple[int, ...] = (0,)
    gradient_bytes: tuple[int, ...] = (0,)
    optimizer_bytes: tuple[int, ...] = (0,)
    """Bytes of the optimizer's state, and of a master copy of the parameters if it has one."""

    replicas: int = 1
    """Replicas of the pipeline for which seconds of gathers and reductions are given; 1: whatever their number is."""
    shards: int = 1
    """The parts in which replicas store weights, gradients and optimizer state; 1: each replica stores all of them."""
    replica_latency_s: float = 0.0
    """Seconds of an exchange between replicas, beside its bytes over `replica_bandwidth_bytes_per_s`."""
    replica_bandwidth_bytes_per_s: float = math.inf

    seconds_range: tuple[float, ...] = (1.0, 1.0)
    """The least and the most times the given seconds that a run may take, where they are an estimate."""
    source: str = field(default="", compare=False)
    """Where these costs come from, for messages about them: a file, say."""

    def __post_init__(self) -> None:
        for cost in fields(self):
            has_entries = isinstance(cost.default, tuple)
            if has_entries:
                object.__setattr__(self, cost.name, entries_of(getattr(self, cost.name)))
            value = getattr(self, cost.name)
            if cost.name in NO_COSTS:
                continue
            if has_entries:
                require_costs(value, cost.name, may_be_empty=not cost.default)
            else:
                require_cost(value, cost.name)
        require_range(self.seconds_range, "seconds_range")
        for name in ("replicas", "shards"):
            if getattr(self, name) < 1 or getattr(self, name) != int(getattr(self, name)):
                raise ConfigError(f"{shortened(getattr(self, name))}; expected a whole number, 1 or more", key=name)
        counts = Counter((channel.sender, channel.receiver) for channel in self.channels)
        for (sender, receiver), count in counts.items():
            if count > 1:
                problem = f"the one from rank {sender} to rank {receiver} is given twice; keep one"
                raise ConfigError(problem, key="channels")

    def error(self, problem: str, key: str) -> ConfigError:
        """Return an error about one of the fields that says where it comes from."""
        return ConfigError(f"{problem} (in {self.source})" if self.source else problem, key=key)

    def spread_out(self, name: str, count: int, word: str) -> Sequence[float]:
        """Return the entries of a field for `count` things, such as stages; `word` names one of them in messages.

        Raises:
            ConfigError: if there are neither as many entries nor a single one.
        """
        entries: tuple[float, ...] = getattr(self, name)
        if len(entries) == 1:
            return entries * count
        if len(entries) != count:
            words = f"{word}es" if word.endswith("ch") else f"{word}s"
            more = ", or costs per layer for any number of stages" if word == "stage" else ""
            problem = f"{len(entries)} entries for {count} {words}; give one per {word}, or one for all{more}"
            raise self.error(problem, name)
        return entries


@dataclass(frozen=True, slots=True, kw_only=True)
class Costs(SharedCosts):
    """Seconds and bytes per stage; per microbatch, or per slice of one where the sequence is cut.

    A list, an array or one number for all stages will do wherever there is an entry per stage.
    """

    forward_s: PerStage = ()
    """Seconds of a forward. A kind without entries is unknown, and a program that runs it is refused."""
    backward_input_s: PerStage = ()
    backward_weight_s: PerStage = ()
    backward_s: PerStage = ()
    """A whole backward; the sum of its parts unless given."""
    split_forward_s: PerStage = ()
    """A forward of a stage whose backwards run in two parts, which it has to prepare; as any other unless given."""
    recompute_s: PerStage = ()
    """A forward that runs again before its backward; as the first one unless given."""
    optimizer_s: PerStage = (0.0,)
    unshard_s: PerStage = (0.0,)
    """Gathering the parameters of a stage."""
    reduce_s: PerStage = (0.0,)
    """Reducing the gradients of a stage over its replicas; each gets all of them, or with `shards` its part."""
    offload_s: PerStage = (0.0,)
    """Copying what a stage keeps of one microbatch to the host; 0: hidden behind computations."""
    reload_s: PerStage = (0.0,)
    """Copying what `offload_s` moves back to the device."""
    load_s: PerStage = (0.0,)
    """Having what a stage takes of a microbatch there; only a program with LOAD rows waits for it."""

    spreads: tuple[Spread, ...] = ()

    @classmethod
    def uniform(
        cls,
        *,
        forward: float = 1.0,
        backward_input: float = 1.0,
        backward_weight: float = 1.0,
        backward: float | None = None,
        recompute: float | None = None,
        transfer: float = 0.0,
        **costs: Any,
    ) -> "Costs":
        """Return costs with the same seconds on every stage.

        `backward` is that of a whole backward, by default the sum of input and weight gradient; `recompute` is by
        default the forward. `transfer` is the latency of every message in seconds. `costs` are further fields of
        `Costs`; one that has an entry per stage may be given as one number for all.
        """
        fields_with_entries = {cost.name for cost in fields(cls) if isinstance(cost.default, tuple)}
        for name in fields_with_entries & costs.keys():
            costs[name] = entries_of(costs[name])
        return cls(
            forward_s=(forward,),
            backward_input_s=(backward_input,),
            backward_weight_s=(backward_weight,),
            backward_s=(backward_input + backward_weight if backward is None else backward,),
            recompute_s=() if recompute is None else (recompute,),
            latency_s=transfer,
            **costs,
        )

    @classmethod
    def analytic(cls, model: Transformer, machine: Machine, *, layers_per_stage: Sequence[int]) -> "Costs":
        """Return the costs of a transformer's FLOPs and bytes on a described machine, at the efficiency it states.

        The embedding belongs to the first stage and the head to the last, beside their layers.

        Raises:
            ConfigError: if the layers do not add up to those of the model.
        """
        return cls(**figures(model, machine, layers_per_stage))

    def of_share(self, share: float) -> "Costs":
        """Return the costs of so large a share of each microbatch, such as one slice of it: its seconds and bytes."""
        seconds = {name: tuple(share * entry for entry in getattr(self, name)) for name in COMPUTE_FIELDS}
        sizes = {name: tuple(round(share * entry) for entry in getattr(self, name)) for name in VALUE_BYTES}
        return replace(self, **seconds, **sizes)  # type: ignore[arg-type]

    def durations_s(self, num_stages: int, split_stages: Collection[int] = ()) -> NDArray[np.float64]:
        """[num_ops, num_stages] seconds of computations by operation and stage; NaN where unknown.

        Forwards of `split_stages` prepare backwards that run in parts.
        """
        table = np.zeros((NUM_OPS, num_stages))
        for kind, name in FIELD_OF_KIND.items():
            table[kind] = self.per_stage(name, num_stages) if getattr(self, name) else math.nan
        if not self.backward_s:
            table[Kind.BACKWARD] = table[Kind.BACKWARD_INPUT] + table[Kind.BACKWARD_WEIGHT]
        if not self.recompute_s:
            table[Kind.RECOMPUTE] = table[Kind.FORWARD]
        if self.split_forward_s:
            split = list(split_stages)
            table[Kind.FORWARD, split] = self.per_stage("split_forward_s", num_stages)[split]
        return table

    def stage_bytes(self, placement: Placement, num_microbatches: int) -> StageBytes:
        """Return the bytes that the stages of a placement make and keep, from which `ir.live` counts what is alive."""
        names = [name for name in (*VALUE_BYTES, *STATIC_BYTES) if getattr(self, name)]
        bytes_by_field = {
            name: np.array(self.spread_out(name, placement.num_stages, "stage"), np.int64) for name in names
        }
        factor = self.per_microbatch("microbatch_bytes_factor", num_microbatches)
        self._require_countable(bytes_by_field, factor)
        if not self.checkpoint_bytes:
            previous = np.array(placement.previous_stage)
            bytes_by_field["checkpoint_bytes"] = np.where(previous < 0, 0, bytes_by_field["message_bytes"][previous])
        return StageBytes(
            **{name.removesuffix("_bytes"): bytes_by_field[name] for name in VALUE_BYTES},
            static=-(-np.sum([bytes_by_field[name] for name in STATIC_BYTES], axis=0) // self.shards),
            weights=bytes_by_field["parameter_bytes"],
            gradient=bytes_by_field["gradient_bytes"],
            microbatch_factor=factor if (factor != 1).any() else None,
            not_given=tuple(name for name, sizes in bytes_by_field.items() if not sizes.any()),
        )

    def _require_countable(self, bytes_by_field: Mapping[str, NDArray[np.int64]], factor: NDArray[np.float64]) -> None:
        """Refuse bytes whose sum over all stages and microbatches could leave the range of 64 bits."""
        bytes_of_microbatch = sum(float(bytes_by_field[name].sum()) for name in VALUE_BYTES if name in bytes_by_field)
        static_bytes = sum(float(bytes_by_field[name].sum()) for name in STATIC_BYTES)
        if bytes_of_microbatch * float(factor.max()) * len(factor) + static_bytes > MOST_BYTES:
            raise self.error(f"they add up to more than {MOST_BYTES} bytes; give fewer", "costs")

    def per_stage(self, name: str, num_stages: int) -> NDArray[np.float64]:
        """[num_stages] one of the fields that have an entry per stage."""
        return np.array(self.spread_out(name, num_stages, "stage"), np.float64)

    def per_microbatch(self, name: str, num_microbatches: int) -> NDArray[np.float64]:
        """[num_microbatches] one of the factors."""
        return np.array(self.spread_out(name, num_microbatches, "microbatch"), np.float64)


def entries_of(value: Any) -> tuple[Any, ...]:
    """Return one value as the only entry, and a sequence, an array or a tensor as a tuple."""
    if hasattr(value, "tolist"):
        value = value.tolist()
    return tuple(value) if isinstance(value, Sequence) and not isinstance(value, str) else (value,)
