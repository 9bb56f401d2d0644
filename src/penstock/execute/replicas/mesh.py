"""Reads a `DeviceMesh`, and connects a rank along its dimensions.

    meet       every rank of the default group tells its mesh, or what is wrong with it; all compare
    connect    one transport over the group of each dimension

A mesh of some ranks of the default group skips the meeting: the others may be in another call.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from penstock.errors import ConfigError, count_of, described, nearest
from penstock.execute.transport.local import LocalTransport
from penstock.execute.transport.meeting import meet_with_meshes
from penstock.execute.transport.places import DATA, PIPELINE, Places
from penstock.execute.transport.protocol import Transport
from penstock.execute.transport.rank_names import RankNames
from penstock.execute.transport.torchrun import join_default_group
from penstock.execute.transport.world import group_transport

MESH = "mesh"
DIMENSIONS = (DATA, PIPELINE)
NOT_YET = ("tensor", "replicate", "context", "expert")
"""Names of dimensions that are reserved."""


@dataclass(frozen=True, slots=True)
class MeshRanks:
    """The ranks of a mesh, by the numbers of torch's default group."""

    numbers: Sequence[Sequence[int]]
    """Numbers by replica and place along the pipeline."""

    @property
    def num_replicas(self) -> int:
        return len(self.numbers)

    @property
    def num_places(self) -> int:
        return len(self.numbers[0])

    def __str__(self) -> str:
        return f"{DATA} {self.num_replicas} x {PIPELINE} {self.num_places} of the ranks {list(map(list, self.numbers))}"

    def names(self) -> RankNames:
        """Return the names of the ranks, one replica after another; with their places where there are replicas."""
        numbers = [number for row in self.numbers for number in row]
        if self.num_replicas == 1:
            return RankNames(numbers, [f"rank {number}" for number in numbers])
        places = [{PIPELINE: place, DATA: data} for data, row in enumerate(self.numbers) for place, _ in enumerate(row)]
        return RankNames.on_mesh(numbers, places)


def read_mesh(mesh: object) -> MeshRanks:
    """Return the ranks of a `DeviceMesh` as a table: a row per replica, and in it a rank per place along the pipeline.

    The mesh has one dimension or two, in any order, which are named "pipeline" and "data".

    Raises:
        ConfigError: `mesh` is no DeviceMesh; a dimension has no name, or one that is unknown or reserved; this rank is
            not in the mesh.
    """
    if not isinstance(mesh, DeviceMesh):
        raise ConfigError(
            f"{described(mesh)}; expected a DeviceMesh, as of init_device_mesh(device, sizes, "
            f"mesh_dim_names={DIMENSIONS})",
            key=MESH,
        )
    names = mesh.mesh_dim_names
    if names is None:
        raise ConfigError(f"its dimensions have no names; make it with mesh_dim_names={DIMENSIONS}", key=MESH)
    for name in names:
        if name in NOT_YET:
            raise ConfigError(
                f"the dimension {name!r} cannot be used yet; the dimensions are {DATA!r} and {PIPELINE!r}", key=MESH
            )
        if name not in DIMENSIONS:
            raise ConfigError(
                f"the dimension {name!r} is unknown.{nearest(name, DIMENSIONS)} The dimensions are {DATA!r}, the "
                f"replicas, and {PIPELINE!r}, the ranks of each",
                key=MESH,
            )
    if mesh.get_coordinate() is None:
        raise ConfigError(
            f"rank {dist.get_rank()} is not in it: its ranks are {mesh.mesh.flatten().tolist()}; call Pipeline on "
            "these alone",
            key=MESH,
        )
    ranks = mesh.mesh  # [data, pipeline] after the next lines
    if ranks.dim() == 1:
        ranks = ranks.unsqueeze(0 if names[0] == PIPELINE else 1)
    elif names[0] == PIPELINE:
        ranks = ranks.t()
    return MeshRanks(ranks.tolist())


def connect_mesh(
    mesh: DeviceMesh | Places,
    deadline_s: float,
    *,
    device: torch.device | str | None = None,
    coalesces: bool = False,
    one_stream: bool = False,
) -> tuple[Places, dist.ProcessGroup | None]:
    """Connect this rank to its pipeline and to its copies in other replicas; every rank of the mesh calls this.

    `Places`, the first result, has a transport to the ranks of the same replica ("pipeline") and, with several
    replicas, one to the ranks at the same place in all replicas ("data"). The second result is the process group of the
    pipeline, or None where the pipeline has one rank. A mesh that is a `Places` already is returned as it is. `device`
    is where the tensors of messages are, by default the current GPU if the group can send from it, else the CPU. With
    `coalesces`, messages along the pipeline go in groups; with `one_stream`, nothing runs beside computations.

    Raises:
        ConfigError: on every rank alike, where a mesh is wrong, or the ranks have different ones.
        PeerLost, DeadlineExceeded: a rank does not come.
    """
    if isinstance(mesh, Places):
        return mesh, None
    ranks = _meet(mesh, deadline_s)
    # Find the replica and the place of this rank. `names` lists all ranks, one replica after another.
    names, local_number = ranks.names(), dist.get_rank()
    (replica,) = (index for index, row in enumerate(ranks.numbers) if local_number in row)
    place = ranks.numbers[replica].index(local_number)
    pipeline_names = names.select(range(replica * ranks.num_places, (replica + 1) * ranks.num_places))
    data_names = names.select(range(place, len(names.numbers), ranks.num_places))
    group = mesh.get_group(PIPELINE) if ranks.num_places > 1 else None
    connected: list[Transport] = []
    try:
        if group is None:
            connected += LocalTransport.create(1, deadline_s, names=pipeline_names)
        else:
            ways = {"coalesces": coalesces, "one_stream": one_stream}
            connected.append(group_transport(group, deadline_s, device=device, names=pipeline_names, **ways))
        if ranks.num_replicas > 1:
            across = mesh.get_group(DATA)
            across_options = {"has_sums": True, "one_stream": one_stream}
            connected.append(group_transport(across, deadline_s, device=device, names=data_names, **across_options))
    except BaseException:
        # Peers that have connected already must not wait for this rank until their deadline.
        for transport in connected:
            transport.abort()
        raise
    data_mesh = mesh[DATA] if DATA in (mesh.mesh_dim_names or ()) else None
    return Places(connected[0], connected[1] if len(connected) > 1 else None, names, data_mesh), group


def _meet(mesh: object, deadline_s: float) -> MeshRanks:
    """Return the ranks of a mesh that all ranks have alike. Raises: ConfigError, PeerLost, DeadlineExceeded."""
    join_default_group(torch.device("cpu"), deadline_s)
    has_group = dist.is_available() and dist.is_initialized()
    try:
        ranks = read_mesh(mesh)
    except ConfigError as error:
        if has_group:  # the others wait for what this rank has to say
            meet_with_meshes(json.dumps({"mesh": None, "refusal": str(error)}), deadline_s)
        raise
    if not has_group:
        raise ConfigError("there is no process group; call init_device_mesh on every rank", key=MESH)
    if len(ranks.names().numbers) == dist.get_world_size():
        report = {"mesh": ranks.numbers, "refusal": None}
        _compare([json.loads(text) for text in meet_with_meshes(json.dumps(report), deadline_s)])
    return ranks


def _compare(reports: Sequence[dict[str, Any]]) -> None:
    for rank, report in enumerate(reports):
        if report["refusal"] is not None:
            raise ConfigError(f"rank {rank}: {report['refusal']}", key=MESH)
        if report["mesh"] != reports[0]["mesh"]:
            first_mesh, rank_mesh = (MeshRanks(mesh_report["mesh"]) for mesh_report in (reports[0], report))
            raise ConfigError(
                f"rank 0 has {first_mesh}, rank {rank} has {rank_mesh}; give every rank one mesh", key=MESH
            )


def require_sizes(places: Places, num_ranks: int) -> None:
    """Make sure that a schedule for so many ranks runs along the pipeline.

    Raises:
        ConfigError: naming the sizes that fit.
    """
    if places.pipeline.num_ranks == num_ranks:
        return
    total = len(places.names.numbers)
    fits = f"{DATA} {total // num_ranks} x {PIPELINE} {num_ranks}" if total % num_ranks == 0 else ""
    advice = f"Make it {fits}" if fits else f"Start a multiple of {num_ranks} ranks"
    raise ConfigError(
        f"the schedule is for {count_of(num_ranks, 'rank')}, but {PIPELINE!r} has {places.pipeline.num_ranks} of the "
        f"{total} ranks. {advice}, or give another schedule",
        key=MESH,
    )
