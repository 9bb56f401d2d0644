"""Joins the ranks that torchrun started, in a program that made no process group: torch's default group, made once.

All pipelines of a process share it, and the last one that is closed destroys it. Nothing else of the process is set:
no device, no environment variable, no thread count.

Outside of `cli/`, this file alone reads the environment: the variables by which torchrun, and launchers like it, tell a
process its rank.
"""

import atexit
import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from penstock.errors import ConfigError, PipelineError
from penstock.execute.transport.protocol import missing_ranks
from penstock.execute.transport.rank_names import RankNames
from penstock.execute.transport.rendezvous import LONGEST_PAUSE_S, await_keys
from penstock.execute.transport.uncaught import install
from penstock.running_time import running_s

LOG = logging.getLogger("penstock")
NAMES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_RESTART_COUNT, _AGENT_HAS_STORE = "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"
MAX_WAIT_S = 2.0
"""Seconds that the other ranks leave to the rank to blame, to report an error."""
_FIX = "Start every rank with torchrun, or unset RANK and WORLD_SIZE to train in this process alone"


@dataclass(frozen=True, slots=True)
class Launch:
    """The variables that a launcher sets for one of its processes."""

    rank: int
    num_ranks: int
    host: str
    port: int
    attempt: str = "0"
    """How often the launcher has restarted the ranks."""
    has_store: bool = False
    """Whether the launcher listens at the address; else rank 0 does."""
    error_file: str = ""
    """Where the launcher looks for the reason why this process failed, if it does."""

    @classmethod
    def read(cls, environment: Mapping[str, str]) -> "Launch | None":
        """Return what the environment variables of torchrun, or of a launcher like it, say of this process.

        None means that no launcher has set RANK and WORLD_SIZE, or that it has started one process alone, which needs
        no address to meet others.

        Raises:
            ConfigError: some variables are missing, or are not the numbers that they should be.
        """
        if not (environment.get("RANK") and environment.get("WORLD_SIZE")):
            return None
        rank, num_ranks = _number(environment, "RANK"), _number(environment, "WORLD_SIZE")
        if not rank < num_ranks:
            raise ConfigError(f"RANK is {rank}, but WORLD_SIZE is {num_ranks}; ranks count from 0. {_FIX}", key="RANK")
        missing = [name for name in NAMES if not environment.get(name)]
        if missing and num_ranks == 1:
            return None
        if missing:
            raise ConfigError(
                f"WORLD_SIZE is {num_ranks}, but {' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not "
                f"set, so the ranks cannot meet. {_FIX}",
                key=missing[0],
            )
        return cls(
            rank,
            num_ranks,
            host=environment["MASTER_ADDR"],
            port=_number(environment, "MASTER_PORT"),
            attempt=environment.get(_RESTART_COUNT, "0"),
            has_store=environment.get(_AGENT_HAS_STORE) == "True",
            error_file=environment.get(_ERROR_FILE, ""),
        )


def _number(environment: Mapping[str, str], name: str) -> int:
    text = environment[name]
    if not text.isdecimal():
        raise ConfigError(f"the environment variable is {text!r}; expected a whole number. {_FIX}", key=name)
    return int(text)


class DefaultGroup:
    """The default process group, while Penstock's pipelines hold it; one object per process."""

    def __init__(self) -> None:
        self._store: dist.Store | None = None  # kept: it is where the ranks meet again for a second group
        self._group: dist.ProcessGroup | None = None
        self._launch: Launch | None = None
        self._num_groups = 0
        self._num_users = 0

    def join(self, launch: Launch, device: torch.device, timeout_s: float) -> None:
        """Make the group, together with all ranks of the launch.

        Raises:
            DeadlineExceeded: a rank did not come within the timeout. PipelineError: the group cannot be made.
        """
        timeout, backend = timedelta(seconds=timeout_s), backend_for(device)
        try:
            store = self._meet(launch, timeout)
            dist.init_process_group(
                backend, store=store, rank=launch.rank, world_size=launch.num_ranks, timeout=timeout
            )
        except (RuntimeError, ValueError) as error:
            raise PipelineError(
                f"rank {launch.rank} of {launch.num_ranks} could not join the others at {launch.host}:"
                f"{launch.port} within {timeout_s:g} s ({error}). Check that every rank was started and reaches "
                "that address"
            ) from error
        if self._launch is None:
            install(self._claims, launch.error_file)
        self._group, self._num_users, self._launch = dist.group.WORLD, 0, launch
        atexit.register(self._destroy)  # of pipelines that nobody closes
        LOG.info("rank %d joined the %d ranks that torchrun started, over %s", launch.rank, launch.num_ranks, backend)

    def _claims(self, rank_to_blame: int | None) -> bool:
        """Whether this rank is to report why all ranks end: the one to blame, or the first to ask if that is silent."""
        launch, store = self._launch, self._store
        if launch is None or store is None:
            return True
        key = f"penstock/attempt{launch.attempt}/reported"
        try:
            await_keys(store, [key], MAX_WAIT_S if rank_to_blame not in (None, launch.rank) else 0.0)
            is_first = store.add(key, 1) == 1
            # Where rank 0 holds the store, it ends when the others have asked too, or a moment later.
            end_s = time.monotonic() + (MAX_WAIT_S if launch.rank == 0 and not launch.has_store else 0.0)
            while store.add(key, 0) < launch.num_ranks and time.monotonic() < end_s:
                time.sleep(LONGEST_PAUSE_S)
            return is_first
        except RuntimeError:  # the process with the store has ended
            return True

    def enter(self) -> Callable[[], None] | None:
        """Note one more user, and return what notes that it has left; None if the default group is another one.

        The last user that leaves destroys the group.
        """
        if not self._is_alive():
            return None
        self._num_users += 1
        return partial(self._leave, self._group)

    def _is_alive(self) -> bool:
        return self._group is not None and dist.is_initialized() and dist.group.WORLD is self._group

    def _leave(self, group: dist.ProcessGroup | None) -> None:
        if group is self._group:  # else the caller destroyed it, and pipelines have made another since
            self._num_users -= 1
            if self._num_users == 0:
                self._destroy()

    def _destroy(self) -> None:
        if self._is_alive():
            dist.destroy_process_group()
        self._group = None
        atexit.unregister(self._destroy)

    def _meet(self, launch: Launch, timeout: timedelta) -> dist.Store:
        """Return an empty store, in which all ranks have arrived. A group that follows another gets its own."""
        if self._store is None:
            self._store = dist.TCPStore(
                launch.host,
                launch.port,
                launch.num_ranks,
                is_master=launch.rank == 0 and not launch.has_store,
                timeout=timeout,
                wait_for_workers=False,
                multi_tenant=True,
            )
        self._num_groups += 1
        # Restarted ranks may find the store of an earlier attempt, with the addresses of processes that have ended.
        store = dist.PrefixStore(f"penstock/attempt{launch.attempt}/group{self._num_groups}", self._store)
        store.set(f"arrived/{launch.rank}", "")
        keys = [f"arrived/{rank}" for rank in range(launch.num_ranks)]
        begin_s = running_s()
        if late := await_keys(store, keys, timeout.total_seconds()):
            self._num_groups -= 1  # those that come later meet this rank in the same store, if it tries again
            raise missing_ranks(RankNames.plain(launch.num_ranks), launch.rank, late, running_s() - begin_s)
        return store


def backend_for(device: torch.device) -> str:
    """Return the backend for messages on a device; CPU tensors always have one too."""
    backend = dist.get_default_backend_for_device(device)
    return backend if device.type == "cpu" else f"cpu:gloo,{device.type}:{backend}"


OF_PROCESS = DefaultGroup()
"""The default group of this process, of which torch has one."""


def join_default_group(device: torch.device, timeout_s: float) -> None:
    """Join the ranks that torchrun started, if it has started this process and there is no default group yet.

    Raises:
        ConfigError: the variables of the launcher are wrong.
        PipelineError, DeadlineExceeded: the others are not met.
    """
    if dist.is_available() and not dist.is_initialized():
        launch = Launch.read(os.environ)
        if launch is not None:
            OF_PROCESS.join(launch, device, timeout_s)
