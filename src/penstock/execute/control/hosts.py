"""Which host a process runs on, as far as its processes share clocks and understand each other's process ids.

Looked up once per process: each look is a call into the system, and every pipeline needs it.

Guarantees: processes with equal texts share what the text is of; those that share it may have other texts, and are then
taken for strangers. Relies on: Linux tells boots and namespaces apart under /proc; elsewhere, that host names differ.
"""

import os
import socket
from functools import cache
from pathlib import Path

BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
NAMESPACES = Path("/proc/self/ns")


def host_of_clock() -> str:
    """Return what processes share whose monotonic clocks are one: the machine, its boot, its time namespace.

    Where the system does not tell them, no other process is known to share this one's clock.
    """
    return _host("time", os.getpid())


def host_of_processes() -> str:
    """Return what processes share that understand each other's process ids, and the times that they note."""
    return f"{host_of_clock()} {_host('pid', os.getpid())}"


@cache
def _host(namespace: str, pid: int) -> str:
    """The machine, its boot and a namespace of this process; a forked process has another id, and looks again."""
    try:
        boot = BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        return f"{socket.gethostname()} process {pid}"
    path = NAMESPACES / namespace
    return " ".join((socket.gethostname(), boot, os.readlink(path) if path.is_symlink() else "")).rstrip()
