"""The keywords of `Pipeline`, told apart from the options of its schedule's family."""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from penstock.errors import ConfigError, nearest, require_choice
from penstock.execute.arguments import TIME_RULE, is_time, is_whole_number, require, require_device
from penstock.execute.backend import find_backend
from penstock.execute.batch.cutting import BatchRule
from penstock.execute.batch.microbatch import BatchSpec, is_merge_spec
from penstock.execute.batch.reader import StreamRules
from penstock.execute.losses.loss import Count, Scale
from penstock.execute.observing.clock import Clock
from penstock.execute.observing.observer import Observer
from penstock.execute.overlap import Overlap
from penstock.execute.parameters.gradient_store import MAIN_GRAD
from penstock.execute.transport.protocol import Transport, missing_members
from penstock.ir.schedule import Schedule
from penstock.ir.transports import COALESCED, POSTED, RENDEZVOUS, TransportModel, find_transports

DEBUG_LEVELS = ("off", "messages", "values")
SUM, MEAN = REPLICA_GRADIENTS = ("sum", "mean")
DEFAULT_DEADLINE_S = 60.0
_MAX_SEED = 2**63 - 1
_FUNCTION_OPTIONS = ("count", "reduce_stage", "optimizer_step", "overlap")
_BOOL_OPTIONS = ("allow_ragged", "check_batches", "variable_shapes", "main_gradients", "ranges", "one_stream")


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineOptions:
    """The keywords of `Pipeline` beside the options of its schedule.

    Raises:
        ConfigError: an option is of another kind than is said here.
    """

    weights: Sequence[float] | None = None
    """Relative cost per layer, for the split; default: the `weight` of a layer's spec, else 1."""
    reduction: str = "mean"
    """Whether the loss function returns the mean of a microbatch, or its "sum"."""
    count: Count | None = None
    """count(target) -> what the mean is taken over, such as tokens; default: rows of the batch, where torch's cross
    entropy is the loss less the targets of its `ignore_index`. Ranks without a last stage need none."""
    scale_loss: float | Scale | None = None
    """The factor of every loss where its backward begins, those that layers add included: a number, or a
    function. Gradients are scaled then, what is reported is not. Where it is a method of a `torch.amp.GradScaler`, the
    scalers of all ranks take one decision."""
    compile: bool | str = False
    """Whether torch.compile compiles the layers of this rank in place: True takes Inductor where its compiler is found,
    else "aot_eager"; or the name of a backend. Weight gradients wait for W with True, "inductor" and "aot_eager"."""
    allow_ragged: bool = False
    """Whether microbatches may differ in size by one row, and slices in length by one."""
    specs: BatchSpec | None = None
    """How the batch is split; default: every tensor on dim 0."""
    check_batches: bool = True
    """Whether the ranks compare the values that they were given, at the first step and at each 100th after it."""
    merge: Any = None
    """How outputs are merged; default: concatenated on dim 0."""
    slices: int | None = None
    """Into how many slices a microbatch is cut; default: 1 for a name, else what the schedule is for."""
    slice_dim: int = 1
    """The dimension of the sequence, on which tensors that have it are cut into slices."""
    slice_specs: BatchSpec | None = None
    """How a microbatch is cut into slices; default: on `slice_dim` what `specs` do not replicate."""
    merge_slices: Any = None
    """How outputs of slices are merged; default: concatenated on `slice_dim`."""
    tied: Sequence[tuple[str, str]] = ()
    """Pairs of parameter names that mean one parameter."""
    seed: int | None = None
    """Where random numbers in the layers' forwards (dropout) begin: each layer, microbatch and training step draws its
    own, the same for any split. None: they come from torch's generators as they stand."""
    messages: str = POSTED.name
    """How messages travel: "posted" one by one, receives ahead of their use; "coalesced": those between two
    computations of a rank together, over one communicator instead of two, and none ahead; "rendezvous": a send waits
    until its receive is posted. The program is proved for it."""
    microbatch_size: int | None = None
    """Rows of a microbatch, in place of `microbatches`: each batch is cut into as many as its rows make."""
    layers_per_stage: int | None = None
    """How many layers a stage has, in the mean, in place of `stages_per_rank`: so many stages there are."""
    variable_shapes: bool = False
    """Whether a stage's output may change shape between batches of one layout; costs a header per message."""
    deadline_s: float = DEFAULT_DEADLINE_S
    """How long any wait for another rank may last."""
    memory_limit: Any = None
    """The most that a rank may hold, as in `penstock.check`: bytes, for which `costs` are needed, or activations."""
    costs: Any = None
    """`Costs` or `LayerCosts`, for a limit in bytes."""
    device: torch.device | str | None = None
    """Where this rank's stages live; default: the current GPU where the group carries its messages, else the CPU."""
    frees_other_stages: bool | None = None
    """Whether layers that other ranks run, if they are modules, are moved to the meta device: their memory is freed,
    and their state or gradients cannot be taken for the whole model's. None: they are, unless ranks are threads of one
    process, which share the layers."""
    transport: Transport | None = None
    """The carrier of messages; default: torch.distributed where it is initialised, else this process alone."""
    data_warn_s: float | None = 1.0
    """A microbatch of a `Stream` that takes longer than this to pull is warned of, at most once a step; None: never."""
    clock: Clock = field(default_factory=Clock)
    """The clock of recorded steps."""
    reduce_stage: Callable[[int], None] | None = None
    """Called with a stage's index when its gradients are whole: where data parallelism reduces. Of copies of a stage on
    one rank, once; of copies on several ranks, on each, before their gradients are summed."""
    optimizer_step: Callable[[], None] | None = None
    """Called at the end of each training step's program; given on every rank, or on none."""

    main_gradients: bool = False
    """Whether gradients are added up in `.main_grad`, in float32 where weights have fewer bits, and `.grad` is left as
    it is. `reduce_stage` and `optimizer_step` find them there; zero them by setting `.main_grad` to None."""

    shard: str = "none"
    """Whether the replicas of a mesh share out nothing; or weights, gradients and optimizer state. Of these a rank
    gathers few stages at a time ("full"), or all for a step ("optimizer")."""
    residency: int | None = 2
    """With "full", how many stages of a rank may be whole at once, those being gathered included; None: all."""
    look_ahead: int = 1
    """How many computations before its first use a gather starts, if there is room."""
    replica_gradients: str = "sum"
    """How gradients of the replicas of a mesh become those of the job: by their "sum", losses being divided by the rows
    of all replicas before the backward; or by their "mean", losses being as many times larger as there are replicas, so
    that fewer gradients are too small for float16."""

    debug: str = "off"
    """"messages": every message says what it is, and its receiver compares. "values": also, every value must be finite,
    and copies of parameters equal; norms are logged. Both cost time; the same on every rank."""
    ranges: bool = False
    """Whether every instruction is a named range for torch.profiler, and for NVTX on CUDA."""
    run_ahead: int | None = 2
    """On a device with events, as a GPU, how many computations the host may have queued that have not ended, receives
    then waited for by the stream; None: the host waits for each receive, as it does on other devices."""
    one_stream: bool = False
    """Whether all that a device runs of a step runs in order, as if on one stream, to look for faults: computations,
    copies, messages in groups (as with "coalesced"), reductions. The same bits, and slower."""
    offload: Sequence[int] = ()
    """Stages whose activations wait in the memory of the host, until shortly before their backward; on a device with
    streams they are copied beside the computations."""
    observers: Sequence[Observer] = ()
    """Further observers of every step: subclasses of `penstock.Observer`."""
    overlap: Overlap | None = None
    """overlap(first, second): runs the two computations of an overlapped pair, each once; default: one by one."""

    def __post_init__(self) -> None:
        """Refuse every option that has a wrong type or value, one after another, in the order of the checks.

        `require(key, value, is_right, expected)` raises a ConfigError that names the option, unless `is_right`. All
        options are checked when they are made, before any message goes to another rank: a rank that failed later would
        leave the other ranks waiting for it. What depends on the model or the schedule is checked once these are known.
        """
        # Connections, device and compiler.
        require("deadline_s", self.deadline_s, is_time(self.deadline_s), TIME_RULE)
        missing = [] if self.transport is None else missing_members(self.transport)
        expected = f"None, or a penstock Transport, which has {', '.join(missing)}"
        require("transport", self.transport, not missing, expected)
        require_device(self.device)
        is_name = isinstance(self.compile, bool | str)
        require("compile", self.compile, is_name, "True, False or the name of a backend of torch.compile")
        if self.compile:
            find_backend(self.compile)
        # Options of which several have one type.
        for name in _FUNCTION_OPTIONS:
            value = getattr(self, name)
            require(name, value, value is None or callable(value), "a function, or None")
        for name in _BOOL_OPTIONS:
            value = getattr(self, name)
            require(name, value, isinstance(value, bool), "True or False")
        is_choice = self.frees_other_stages is None or isinstance(self.frees_other_stages, bool)
        require("frees_other_stages", self.frees_other_stages, is_choice, "True, False or None")
        self._require_messages()
        # How a batch is cut into microbatches and slices, and outputs are merged.
        for name in ("specs", "slice_specs"):
            value = getattr(self, name)
            require(name, value, value is None or isinstance(value, BatchSpec), "a BatchSpec, or None")
        for name in ("merge", "merge_slices"):
            value = getattr(self, name)
            expected = "a function of the list of outputs, such as ps.Concat(), a dict, tuple or list of them, or None"
            require(name, value, is_merge_spec(value), expected)
        require("tied", self.tied, _are_pairs(self.tied), "a list of pairs of parameter names")
        require("slice_dim", self.slice_dim, isinstance(self.slice_dim, int), "the number of a dimension")
        # Numbers in ranges, in most cases with None for no limit.
        is_seed = self.seed is None or (is_whole_number(self.seed, 0) and self.seed <= _MAX_SEED)
        require("seed", self.seed, is_seed, "a whole number from 0 to 2**63 - 1, or None")
        is_number = self.microbatch_size is None or is_whole_number(self.microbatch_size, 1)
        require("microbatch_size", self.microbatch_size, is_number, "1 or more rows, or None")
        is_number = self.layers_per_stage is None or is_whole_number(self.layers_per_stage, 1)
        require("layers_per_stage", self.layers_per_stage, is_number, "1 or more layers, or None")
        is_limit = self.run_ahead is None or is_whole_number(self.run_ahead, 1)
        require("run_ahead", self.run_ahead, is_limit, "1 or more computations that the host may run ahead, or None")
        is_limit = self.data_warn_s is None or is_time(self.data_warn_s)
        require("data_warn_s", self.data_warn_s, is_limit, f"{TIME_RULE}, or None")
        require("clock", self.clock, isinstance(self.clock, Clock), "a penstock Clock")
        observers = self.observers
        is_list = isinstance(observers, Sequence) and all(isinstance(observer, Observer) for observer in observers)
        require("observers", observers, is_list, "a list of penstock Observers")
        is_number = self.residency is None or is_whole_number(self.residency, 1)
        require("residency", self.residency, is_number, "1 or more stages of a rank that may be whole, or None for all")
        require("look_ahead", self.look_ahead, is_whole_number(self.look_ahead, 0), "0 or more computations")
        require_choice("replica_gradients", self.replica_gradients, REPLICA_GRADIENTS)
        stages = self.offload
        is_list = isinstance(stages, Sequence) and all(is_whole_number(stage, 0) for stage in stages)
        require("offload", stages, is_list, "a list of stages, such as [0, 1]")
        if self.debug not in DEBUG_LEVELS:
            hint = nearest(str(self.debug), DEBUG_LEVELS)
            require("debug", self.debug, False, f"one of {', '.join(DEBUG_LEVELS)}.{hint}")

    def _require_messages(self) -> None:
        """Refuse an unknown way of messages, and what does not go with it. Raises: ConfigError."""
        require_choice("messages", self.messages, [model.name for model in (POSTED, COALESCED, RENDEZVOUS)])
        if self.one_stream:
            self._require_in_order()
        if self.messages == POSTED.name:
            return
        if self.messages == RENDEZVOUS.name and self.variable_shapes:
            fix = "a message of unknown shape has no receive that is posted; leave out variable_shapes, or messages"
            raise ConfigError(f"{self.messages!r} with variable_shapes=True: {fix}", key="messages")
        if self.debug != "off":
            fix = f"debug={self.debug!r} sends a header with each message, which travel one by one; give one of the two"
            raise ConfigError(f"{self.messages!r}: {fix}", key="messages")

    def _require_in_order(self) -> None:
        """Refuse what cannot run on one stream. Raises: ConfigError."""
        reason_by_option = {
            "overlap": "its pairs run on streams of their own" if self.overlap is not None else "",
            "messages": "each send waits for its receive by the hosts" if self.messages == RENDEZVOUS.name else "",
            "debug": "a header goes with each message, one by one, and not in groups" if self.debug != "off" else "",
        }
        for name, reason in reason_by_option.items():
            if reason:
                problem = f"True beside {name}={getattr(self, name)!r}: {reason}; leave out one of the two"
                raise ConfigError(problem, key="one_stream")

    @property
    def transport_model(self) -> TransportModel:
        """The model of messages for which programs are proved."""
        return COALESCED if self.one_stream else find_transports(self.messages)[0]

    @property
    def coalesces(self) -> bool:
        """Whether messages are launched in groups."""
        return self.transport_model == COALESCED

    @property
    def is_sharded(self) -> bool:
        """Whether replicas share out parameters."""
        return self.shard != "none"

    @property
    def averages_replicas(self) -> bool:
        """Whether gradients are averaged over the replicas, and not summed."""
        return self.replica_gradients == MEAN

    @property
    def gradient_attribute(self) -> str:
        """Where a parameter has its gradient."""
        return MAIN_GRAD if self.main_gradients else "grad"

    def batch_rule(self, schedule: Schedule) -> BatchRule:
        """Return how a batch is cut for a schedule."""
        return BatchRule(
            schedule.num_microbatches,
            schedule.num_slices,
            self.allow_ragged,
            self.specs,
            self.slice_dim,
            self.slice_specs,
            self.microbatch_size,
        )

    def stream_rules(self) -> StreamRules:
        """Return what the microbatches of a stream must be like."""
        return StreamRules(
            has_variable_shapes=self.variable_shapes,
            is_sum=self.reduction == "sum",
            has_count=self.count is not None,
            warn_s=self.data_warn_s,
        )


def split_options(keywords: Mapping[str, Any]) -> tuple[PipelineOptions, dict[str, Any]]:
    """Return the options of the pipeline, and the other keywords, which are for the schedule's family."""
    names = {option.name for option in fields(PipelineOptions)}
    pipeline_options = {name: value for name, value in keywords.items() if name in names}
    return PipelineOptions(**pipeline_options), {name: keywords[name] for name in keywords if name not in names}


def _are_pairs(value: object) -> bool:
    return isinstance(value, Collection) and not isinstance(value, str) and all(map(_is_pair, value))


def _is_pair(value: object) -> bool:
    return isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(name, str) for name in value)


ARGUMENTS = ("schedule", "microbatches", "loss", "stages_per_rank", "split", "process_group", "ranks", "mesh")
"""Arguments of `Pipeline` beside its options; a misspelt one arrives here as an unknown option."""


_RENAMED = {"group": " It is process_group where it says the ranks, group_size where it counts microbatches."}
"""Hints for names that options had before."""


def refuse_unknown(keywords: Mapping[str, Any], schedule: str, family_options: Collection[str]) -> None:
    """Refuse what is neither an option of a pipeline nor of the family of its schedule, which `schedule` describes.

    Raises:
        ConfigError: naming the nearest that exists.
    """
    names = [*ARGUMENTS, *(option.name for option in fields(PipelineOptions)), *family_options]
    for name in keywords:
        if name not in family_options:
            raise ConfigError(
                f"neither Pipeline nor {schedule} has the option {name!r}.{_RENAMED.get(name) or nearest(name, names)} "
                f"{schedule} takes: {', '.join(family_options) or 'none'}",
                key=name,
            )
