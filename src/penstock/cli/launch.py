"""Start ranks through torch's elastic launcher, reachable from this machine only, and join them as one of them.

    launcher                           rank 0 .. P-1
    listens on 127.0.0.1 [1]
    starts the ranks  ---------------> join_ranks: connects to [1], gloo on the loopback interface
    waits                              runs; a failure is written to [1] (see rank.py), and that all is done
    a rank ended badly: ends the rest, reads the failures from [1], picks the first cause

torch's own rendezvous listens on every address and re-uses its store across restarts, so that a restarted rank may read
a dead one's address. Hence the rendezvous below, and a prefix of its own for each attempt.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from types import FrameType

import torch
import torch.distributed as dist
from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo, RendezvousStoreInfo

from penstock.cli.failure import RankFailure, first_cause, read_failures, unfinished
from penstock.cli.lifetime import end_stragglers, interrupts_handled_by, run_id_of
from penstock.errors import ConfigError, PeerLost
from penstock.execute.transport.torchrun import backend_for
from penstock.train import devices

LOOPBACK = "127.0.0.1"
MAX_WAIT_S = 1
"""Seconds that ranks may take to end after a signal before they are killed."""


class LoopbackRendezvous(RendezvousHandler):
    """The meeting point of one machine's ranks: a store that listens on 127.0.0.1 and lives as long as the launch."""

    def __init__(self, port: int = 0) -> None:
        """Listen at once; port 0 takes a free one. Raises: ConfigError where the port is taken."""
        listener = _listen_on_loopback(port)
        self.port = int(listener.getsockname()[1])
        self.store = dist.TCPStore(LOOPBACK, self.port, is_master=True, master_listen_fd=listener.detach())

    def get_backend(self) -> str:
        return "loopback"

    @property
    def use_agent_store(self) -> bool:
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        store = dist.PrefixStore("launcher", self.store)
        return RendezvousInfo(store, 0, 1, RendezvousStoreInfo(LOOPBACK, self.port))

    def is_closed(self) -> bool:
        return False

    def set_closed(self) -> None:
        """Do nothing: no other launcher can join this one."""

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return run_id_of(os.getpid())

    def shutdown(self) -> bool:
        return True


def launch_ranks(
    command: Sequence[str], *, num_ranks: int, port: int = 0, may_stop: bool = False
) -> RankFailure | None:
    """Run `command` once per rank until all end; return the first cause of a failure, or None.

    It uses torch's elastic launcher on this machine; `port` 0 chooses a free one. Call it from the main thread. An
    interrupt (SIGINT, SIGTERM or SIGHUP) ends every rank within two seconds, stopped ones too. With `may_stop`, the
    first interrupt is passed on as SIGTERM, on which ranks may save before they end. Raises: ConfigError where the port
    is taken; KeyboardInterrupt after an interrupt.
    """
    rendezvous = LoopbackRendezvous(port)
    spec = WorkerSpec(
        role="penstock",
        local_world_size=num_ranks,
        rdzv_handler=rendezvous,
        entrypoint=command[0],
        # torch's launcher substitutes ${...} in arguments, so that a dollar has to be doubled.
        args=tuple(argument.replace("$", "$$") for argument in command[1:]),
        max_restarts=0,
        monitor_interval=0.1,
    )
    agent = LocalElasticAgent(spec, DefaultLogsSpecs(log_dir=os.devnull), shutdown_timeout=MAX_WAIT_S)
    interrupt = _Interrupt(agent, may_stop=may_stop)
    try:
        with _environment_of_ranks(), _quiet_logging(), interrupts_handled_by(interrupt), _straggler_watch(interrupt):
            result = agent.run()
    except SignalException:  # torch's launcher raises it for the one signal that is left to it, SIGQUIT
        raise KeyboardInterrupt from None
    if interrupt.was_asked:
        raise KeyboardInterrupt
    if not result.is_failed():
        return unfinished(rendezvous.store, num_ranks)
    exit_codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
    return first_cause(exit_codes, read_failures(rendezvous.store, num_ranks))


def join_ranks(environment: Mapping[str, str], *, device: str = "auto", timeout_s: float = 300.0) -> None:
    """Initialise torch.distributed as the rank that `environment` names (torchrun's variables, or our launcher's).

    The backend is gloo, and NCCL or its like where the ranks compute on GPUs, as `device` says (`run.device`).
    Raises: ConfigError for a variable that is missing or no number, and where this machine has too few GPUs;
    PeerLost where the other ranks are not met within `timeout_s`.
    """
    rank, num_ranks = read_number(environment, "RANK"), read_number(environment, "WORLD_SIZE")
    backend = _choose_backend(environment, device)
    timeout = timedelta(seconds=timeout_s)
    try:
        if environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
            store = dist.PrefixStore(attempt_prefix(environment), connect_store(environment, timeout))
            dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=timeout)
        else:
            dist.init_process_group(backend, init_method="env://", rank=rank, world_size=num_ranks, timeout=timeout)
    except (RuntimeError, ValueError) as error:
        where = f"{environment.get('MASTER_ADDR', '?')}:{environment.get('MASTER_PORT', '?')}"
        raise PeerLost(  # where the cause is a rank that was killed, the launcher reports that one instead
            f"rank {rank} of {num_ranks} could not meet the others at {where} within {timeout_s:.0f} s ({error}). "
            "See that every rank was started and reaches that address."
        ) from error


def connect_store(environment: Mapping[str, str], timeout: timedelta) -> dist.Store:
    """Connect to the store of the launcher that `environment` names."""
    host, port = environment.get("MASTER_ADDR", LOOPBACK), read_number(environment, "MASTER_PORT")
    return dist.TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)


def attempt_prefix(environment: Mapping[str, str]) -> str:
    """Return the prefix under which this attempt's ranks meet: the addresses of a dead attempt stay out of sight."""
    return f"attempt{environment.get('TORCHELASTIC_RESTART_COUNT', '0')}"


def _choose_backend(environment: Mapping[str, str], device: str) -> str:
    local_rank, num_local = int(environment.get("LOCAL_RANK", "0")), int(environment.get("LOCAL_WORLD_SIZE", "1"))
    kind = devices.choose_device(device, num_local, devices.look())
    if kind != devices.CPU:
        torch.accelerator.set_device_index(local_rank)
    return backend_for(torch.device(kind))


def read_number(environment: Mapping[str, str], name: str) -> int:
    """Read a variable that must hold a number. Raises: ConfigError."""
    text = environment.get(name, "")
    if not text.isdecimal():
        raise ConfigError(
            f"the environment variable {name} is {text!r}, not a number. Start every rank with torchrun, "
            "or unset RANK and WORLD_SIZE to have the ranks started here."
        )
    return int(text)


def _listen_on_loopback(port: int) -> socket.socket:
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(
            f"--port {port}: cannot listen on {LOOPBACK}:{port} ({error}). Give another port, or none: "
            "a free one is taken then."
        ) from error
    return listener


@contextmanager
def _environment_of_ranks() -> Iterator[None]:
    """Set the environment variables that ranks inherit and torch's launcher reads, while the block runs."""
    loopback_interface = "lo" if any(name == "lo" for _, name in socket.if_nameindex()) else "lo0"
    values = {
        "GLOO_SOCKET_IFNAME": loopback_interface,
        "NCCL_SOCKET_IFNAME": loopback_interface,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        # `_Interrupt` handles the interrupts: torch would pass SIGINT on, and handle a SIGHUP that nohup ignores.
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
    }
    earlier_values = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in earlier_values.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _quiet_logging() -> Iterator[None]:
    """Silence torch's launcher: we report the failure of a rank, once."""
    earlier_level = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(earlier_level)


class _Interrupt:
    """Handles the interrupts of a launch: it ends the ranks, after which torch's launcher returns by itself.

    It raises nothing. Python throws away what a handler raises where it happens to run within a finalizer, or right
    behind a fork, as while ranks are started; the launch would go on as if nobody had asked.
    """

    def __init__(self, agent: LocalElasticAgent, *, may_stop: bool) -> None:
        self._agent = agent
        self._may_stop = may_stop
        self._ending_since_s: float | None = None
        """`time.monotonic()` when the ranks were to be ended at once; None where they need not, or may still save."""
        self.was_asked = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        """Pass the first interrupt on, where ranks may save. Any other one ends every rank at once."""
        ranks = self.ranks()
        if self._may_stop and ranks and not self.was_asked:
            _signal(ranks, signal.SIGTERM)
        elif self._ending_since_s is None:
            self._ending_since_s = time.monotonic()
        self.was_asked = True
        self.end_ranks()

    def ranks(self) -> list[int]:
        """Return the processes of the ranks that have been started."""
        return [worker.id for worker in self._agent.get_worker_group().workers if worker.id is not None]

    def end_ranks(self) -> None:
        """End the ranks if they are to be ended; a thread calls it again and again, for ranks that start later.

        SIGHUP ends a rank at once and without a trace at any time, unless it is stopped: Python would print where a
        SIGINT met it while it starts, and on SIGTERM a rank takes its time (lifetime.py).
        """
        if self._ending_since_s is not None:
            is_late = time.monotonic() - self._ending_since_s > MAX_WAIT_S
            _signal(self.ranks(), signal.SIGKILL if is_late else signal.SIGHUP)


def _signal(processes: Sequence[int], number: signal.Signals) -> None:
    for process in processes:
        with suppress(ProcessLookupError):
            os.kill(process, number)


@contextmanager
def _straggler_watch(interrupt: _Interrupt) -> Iterator[None]:
    """Kill ranks that do not end when told to: torch would wait 30 s for a stopped process after another failed."""
    over = threading.Event()

    def ranks() -> list[int]:
        interrupt.end_ranks()
        return interrupt.ranks()

    watch = threading.Thread(target=end_stragglers, args=(ranks, over), kwargs={"max_wait_s": MAX_WAIT_S}, daemon=True)
    watch.start()
    try:
        yield
    finally:
        over.set()
        watch.join()
