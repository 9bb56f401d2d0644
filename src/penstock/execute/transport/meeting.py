"""What the ranks of a process group compare when they meet in its store: kinds of devices, ways of messages, meshes."""

from collections.abc import Sequence

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore

from penstock.errors import ConfigError
from penstock.execute.transport.rank_names import RankNames
from penstock.execute.transport.rendezvous import Rendezvous
from penstock.execute.undocumented_backends import store_of

ADDRESSES = "addresses"
"""The first round of texts in a rendezvous: what `require_one_kind` compares, and where the rank can be reached."""
MEETING_PREFIX = "penstock"
"""Prefix of the keys by which the ranks of a group meet in its store."""
IN_GROUPS = "+groups"
"""Behind a kind of device whose messages go in groups."""
_MESH = "mesh"
"""The word that stands in the place of a kind of device before a text about meshes."""


def meet_with_meshes(mesh_text: str, deadline_s: float) -> list[str]:
    """Exchange texts about meshes with all ranks of the default group, in the round of their rendezvous.

    Raises:
        ConfigError: some ranks make a transport without a mesh, and are told so.
        PeerLost, DeadlineExceeded: a rank does not come.
    """
    world = dist.group.WORLD
    assert world is not None
    store = PrefixStore(MEETING_PREFIX, store_of(world))
    rendezvous = Rendezvous(store, world.rank(), RankNames.plain(world.size()))
    rendezvous.enter()
    texts = [text.split(" ", 1) for text in rendezvous.exchange(ADDRESSES, f"{_MESH} {mesh_text}", deadline_s)]
    require_one_kind([kind for kind, _ in texts])
    return [text for _, text in texts]


def require_one_kind(kinds: Sequence[str]) -> None:
    """Make sure that all ranks compute on one kind of device, with messages of one way: others have other backends."""
    if 0 < kinds.count(_MESH) < len(kinds):
        with_mesh, without = kinds.index(_MESH), next(rank for rank, kind in enumerate(kinds) if kind != _MESH)
        raise ConfigError(f"rank {with_mesh} was given a mesh, rank {without} none; give all ranks one", key=_MESH)
    devices = [kind.removesuffix(IN_GROUPS) for kind in kinds]
    odd_ranks = [rank for rank, device in enumerate(devices) if device != devices[0]]
    if odd_ranks:
        raise ConfigError(
            f"the ranks compute on devices of different kinds: rank 0 on {devices[0]}, rank {odd_ranks[0]} on "
            f"{devices[odd_ranks[0]]}; give all ranks one kind",
            key="device",
        )
    if len(set(kinds)) > 1:
        in_groups = [kind.endswith(IN_GROUPS) for kind in kinds]
        problem = f"rank {in_groups.index(True)} launches messages in groups, rank {in_groups.index(False)} does not"
        raise ConfigError(f"{problem}; give 'coalesced' on all ranks or on none", key="messages")
