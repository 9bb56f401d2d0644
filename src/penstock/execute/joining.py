"""How a rank joins the others of its group: also with wrong arguments, so that they hear of the mistake at once.

A rank that raised before it had joined would leave the others waiting for it until their deadline.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch.distributed as dist

from penstock.errors import ConfigError, DeadlineExceeded, PeerLost, PenstockError, count_of
from penstock.execute.arguments import PROCESS_GROUP, is_time, is_whole_number, require, require_process_group
from penstock.execute.control.collectives import Control
from penstock.execute.control.handshake import SetupReport
from penstock.execute.options import DEFAULT_DEADLINE_S, PipelineOptions, split_options
from penstock.execute.replicas.mesh import MESH, connect_mesh
from penstock.execute.transport.local import LocalTransport
from penstock.execute.transport.places import DATA, Places
from penstock.execute.transport.protocol import Transport, is_transport
from penstock.execute.transport.torch_dist import TorchTransport
from penstock.execute.transport.world import default_transport, ranks_of
from penstock.ir.transports import COALESCED, POSTED

T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Joined:
    """One rank's connection to the others, and the options that it was given."""

    options: PipelineOptions
    """The defaults where the rank's own cannot be used."""
    family_options: dict[str, Any]
    process_group: dist.ProcessGroup | None
    places: Places
    refusal: PenstockError | None
    """The error in this rank's options."""
    is_alone_on_purpose: bool = False
    """Whether the caller says that the model is this rank's own, and no part of one of several ranks."""
    has_mesh: bool = False

    @property
    def transport(self) -> Transport:
        """The messages of the pipeline."""
        return self.places.pipeline

    @property
    def control(self) -> Control:
        """The collectives of all ranks."""
        return Control.of(self.places)

    def together(self, make: Callable[[], T]) -> T:
        """Return what `make` returns; if it fails on any rank, or any rank's options are wrong, it fails on all.

        Raises:
            Exception: the rank's own, else a ConfigError with the words of the first rank that has one.
        """
        return self.exchange(make, lambda _: {})[0]

    def exchange(self, make: Callable[[], T], tell: Callable[[T], SetupReport]) -> tuple[T, list[SetupReport]]:
        """Do the same, and gather what `tell` says of it on every rank."""
        results: list[T] = []

        def report() -> SetupReport:
            if self.refusal is not None:
                raise self.refusal
            results.append(make())
            return tell(results[0])

        reports = self.control.together(report)
        return results[0], reports

    @contextmanager
    def leaving_on_failure(self) -> Iterator[None]:
        """Leave the others if anything fails within, so that none waits for this rank and the group can be used again.

        An error that all ranks raise alike closes the connections that `join` made. Any other error is this rank's
        alone, and ends the waits of the others too.
        """
        try:
            yield
        except (PeerLost, DeadlineExceeded):
            self.places.abort()
            raise
        except PenstockError:
            if self.options.transport is None or self.has_mesh:
                self.places.close()
            raise
        except BaseException:
            self.places.abort()
            raise

    def require_one_model(self, *, is_averaged: bool) -> None:
        """Refuse that every rank trains a model of its own by mistake; right where it `is_averaged` over them.

        Raises:
            ConfigError: the process group has this rank alone, though there are others.
        """
        if self.is_alone_on_purpose or is_averaged or len(self.ranks_of_group()) != 1 or dist.get_world_size() == 1:
            return
        raise ConfigError(
            f"it has this rank alone, so each of the {dist.get_world_size()} ranks would train a separate model. Pass "
            "process_group=None for one pipeline of all ranks, or ranks=1 if separate models are what you want",
            key=PROCESS_GROUP,
        )

    def ranks_of_group(self) -> list[int]:
        """Return the ranks as the default group counts them; none where they are not of torch.distributed."""
        return ranks_of(self.process_group) if isinstance(self.transport, TorchTransport) else []


def join(process_group: Any, keywords: Mapping[str, Any], ranks: Any = None, mesh: Any = None) -> Joined:
    """Connect this rank to the other ranks of the group, even if its arguments are wrong; every rank calls this.

    `process_group`, `ranks` and `mesh` are those of `Pipeline`, `keywords` its other keywords. What is wrong with them
    is not raised here: it is the field `refusal` of the result, and is raised on all ranks in their next exchange. A
    rank that raised at once would leave the other ranks waiting until their deadline.

    Raises:
        ConfigError: on every rank, where a mesh is wrong, or the ranks have different meshes.
        PeerLost, DeadlineExceeded: a rank does not come; a rank whose options are wrong raises their error instead.
    """
    try:
        options, family_options = split_options(keywords)
        require_process_group(process_group)
        if mesh is not None:
            _require_mesh_alone(process_group, options)
        require("ranks", ranks, ranks is None or is_whole_number(ranks, 1), "a whole number, 1 or larger, or None")
        refusal = None
    except PenstockError as error:
        # The rank joins the default group, by those of its options that are right.
        options, family_options, process_group, refusal = _options_to_join(keywords), {}, None, error
    # The caller asks for one rank and names no group: then this process needs no torch.distributed.
    is_alone = ranks == 1 and process_group is None and refusal is None and mesh is None
    try:
        if mesh is not None:
            places, process_group = connect_mesh(
                mesh,
                options.deadline_s,
                device=options.device,
                coalesces=options.coalesces,
                one_stream=options.one_stream,
            )
        elif options.transport is not None:
            places = Places.of(options.transport)
        elif is_alone:
            places = Places.of(LocalTransport.create(1, options.deadline_s)[0])
        else:
            places = Places.of(
                default_transport(
                    process_group,
                    options.deadline_s,
                    device=options.device,
                    coalesces=options.coalesces,
                    one_stream=options.one_stream,
                )
            )
    except (PeerLost, DeadlineExceeded) as error:
        # A rank that was given a wrong group has waited in the default group, while the other ranks met elsewhere.
        if refusal is not None:
            raise refusal from error
        raise
    refusal = refusal or _wrong_number(ranks, places.pipeline.num_ranks) or _wrong_transport(options, places.pipeline)
    # A pipeline of this rank alone, beside other ranks, is refused as a mistake later, unless the caller asks for it.
    return Joined(
        options,
        family_options,
        process_group,
        places,
        refusal,
        is_alone_on_purpose=ranks == 1 or places.num_replicas > 1,
        has_mesh=mesh is not None,
    )


def _require_mesh_alone(group: dist.ProcessGroup | None, options: PipelineOptions) -> None:
    """Refuse what says otherwise which ranks there are, or reduces over them. Raises: ConfigError."""
    alternatives = {"a process group": group, "a transport": options.transport, "reduce_stage": options.reduce_stage}
    if conflicts := [name for name, value in alternatives.items() if value is not None]:
        raise ConfigError(
            f"it goes without {' and '.join(conflicts)}: the mesh says which ranks there are, and gradients are summed "
            f"along {DATA!r}",
            key=MESH,
        )


def _wrong_transport(options: PipelineOptions, transport: Transport) -> ConfigError | None:
    is_of_devices = isinstance(transport, TorchTransport) and transport.device_queue is not None
    waits_at_once = getattr(transport, "turns", None) is not None
    takes_turns = waits_at_once and getattr(transport, "launches_groups", False)
    if (options.one_stream or waits_at_once) and is_of_devices and not takes_turns:
        problem = "the transport lets messages run beside computations"
        if waits_at_once:
            problem = "the transport waits for each message at once, and two ranks that send would wait for ever"
        return ConfigError(f"{problem}; make it with coalesces=True and one_stream=True", key="one_stream")
    if options.coalesces or not getattr(transport, "launches_groups", False):
        return None
    problem = f"{options.messages!r}, but the transport launches messages in groups, over one communicator"
    return ConfigError(f"{problem}; give 'coalesced', or a transport without coalesces=True", key="messages")


def _wrong_number(ranks: int | None, num_ranks: int) -> ConfigError | None:
    if ranks in (None, num_ranks):
        return None
    group_advice = f"give a process group of {ranks}"
    advice = f"start them with torchrun --nproc-per-node {ranks}" if num_ranks == 1 else group_advice
    return ConfigError(
        f"{ranks}, but the pipeline has {count_of(num_ranks, 'rank')} here; {advice}, or leave it out", key="ranks"
    )


def _options_to_join(keywords: Mapping[str, Any]) -> PipelineOptions:
    """Return what connects this rank of options that were refused, as far as it is right."""
    transport, deadline_s = keywords.get("transport"), keywords.get("deadline_s")
    return PipelineOptions(
        transport=transport if is_transport(transport) else None,
        messages=COALESCED.name if keywords.get("messages") == COALESCED.name else POSTED.name,
        one_stream=keywords.get("one_stream") is True,
        deadline_s=float(deadline_s) if deadline_s is not None and is_time(deadline_s) else DEFAULT_DEADLINE_S,
    )
