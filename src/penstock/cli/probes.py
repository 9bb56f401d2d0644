"""Looks at a machine before training: one function per thing that it may lack."""

import os
import platform
import shutil
import socket
import sys
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec

import torch
import torch.distributed as dist

from penstock.execute.accelerator import accelerator_type, name_of, num_accelerators
from penstock.train.devices import look
from penstock.train.settings.optional_packages import OPTIONAL_PACKAGES, PICTURES

OLDEST_PYTHON = (3, 11)
OLDEST_TORCH = (2, 11)
SMALL_MEMORY_BYTES = 2 * 2**30
SMALL_DISK_BYTES = 2**30
RESOLVE_TIMEOUT_S = 1.0
EXTRAS = {package.name: package.extra for package in (PICTURES, *OPTIONAL_PACKAGES)}


@dataclass(frozen=True, slots=True)
class Finding:
    """One row of the report: the subject that was examined, its state, and the fix (empty where all is well)."""

    subject: str
    state: str
    fix: str = ""


def examine_system() -> list[Finding]:
    """Examine all that training needs of a machine; takes a few seconds at most."""
    return [
        examine_python(sys.version_info[:2]),
        examine_torch(torch.__version__),
        examine_backends(),
        examine_devices(),
        examine_cores(os.environ),
        examine_memory(available_memory_bytes()),
        examine_loopback("127.0.0.1"),
        examine_hostname(socket.gethostname()),
        *examine_disks({"disk, this folder": os.getcwd(), "disk, temporary": tempfile.gettempdir()}),
        *examine_extras(EXTRAS),
    ]


def examine_python(python_version: tuple[int, int]) -> Finding:
    fix = "" if python_version >= OLDEST_PYTHON else "install Python 3.11 or newer"
    return Finding("Python", platform.python_version(), fix)


def examine_torch(torch_version: str) -> Finding:
    major, minor = (int(part) for part in torch_version.split(".")[:2])
    return Finding("torch", torch_version, "" if (major, minor) >= OLDEST_TORCH else "install torch 2.11 or newer")


def examine_backends() -> Finding:
    if not dist.is_available():
        return Finding("backends", "none", "install a torch that is built with torch.distributed")
    available = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    names = ", ".join(name for name, is_there in available.items() if is_there) or "none"
    fixes = []
    if not available["gloo"]:
        fixes.append("install a torch that is built with gloo")
    machine = look()
    if machine.num_gpus > 1 and not machine.has_backend:
        fixes.append(f"install a torch that carries messages between these {machine.kind} devices, such as by NCCL")
    return Finding("backends", names, "; ".join(fixes))


def examine_devices() -> Finding:
    kind, num_gpus = accelerator_type(), num_accelerators()
    if kind is not None and num_gpus:
        names = [name_of(torch.device(kind, index)) for index in range(num_gpus)]
        counts = {name: names.count(name) for name in names}
        return Finding("GPUs", f"{', '.join(f'{count} x {name}' for name, count in counts.items())} ({kind})")
    is_unused = os.path.exists("/proc/driver/nvidia")
    return Finding("GPUs", "none", "a driver is there: install a torch built for CUDA" if is_unused else "")


def examine_cores(environment: Mapping[str, str]) -> Finding:
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    threads = environment.get("OMP_NUM_THREADS", "")
    state = f"{num_cores} cores, OMP_NUM_THREADS {threads or 'not set (each rank then takes 1 thread)'}"
    if threads and not threads.isdecimal():
        return Finding("cores", state, "set OMP_NUM_THREADS to a number, or unset it")
    is_too_many = bool(threads) and int(threads) > num_cores
    return Finding("cores", state, f"set OMP_NUM_THREADS to {num_cores} or less" if is_too_many else "")


def available_memory_bytes() -> int:
    """Return the memory that programs may still take, without swap; all memory where the system does not say."""
    try:
        with open("/proc/meminfo", encoding="utf-8") as lines:
            fields = dict(line.split(":", 1) for line in lines)
        return int(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def examine_memory(size_bytes: int) -> Finding:
    fix = "end other programs, or train a smaller model" if size_bytes < SMALL_MEMORY_BYTES else ""
    return Finding("memory", f"{_gib(size_bytes)} available", fix)


def examine_loopback(address: str) -> Finding:
    """Listen on `address`, connect to it and send a byte: what the ranks of one machine do."""
    try:
        received = _carry_byte(address)
    except OSError as error:
        return Finding("loopback", f"{address}: {error}", "bring the loopback interface up: ip link set lo up")
    return Finding("loopback", f"{address} listens, connects and carries {len(received)} byte")


def _carry_byte(address: str) -> bytes:
    with socket.create_server((address, 0)) as listener:
        listener.settimeout(1.0)
        with socket.create_connection(listener.getsockname()[:2], timeout=1.0) as client, listener.accept()[0] as peer:
            peer.settimeout(1.0)
            client.sendall(b"x")
            return peer.recv(1)


def examine_hostname(name: str) -> Finding:
    """Resolve the machine's own name: torch's launcher does, and waits where the answer does not come."""
    answers: list[str] = []
    lookup = threading.Thread(target=_resolve, args=(name, answers), daemon=True)
    lookup.start()
    lookup.join(RESOLVE_TIMEOUT_S)
    if answers:
        return Finding("hostname", f"{name} is {answers[0]}")
    return Finding("hostname", f"{name} does not resolve", f"add '127.0.0.1 {name}' to /etc/hosts")


def _resolve(name: str, answers: list[str]) -> None:
    try:
        answers.append(socket.gethostbyname(name))
    except OSError:
        return


def examine_disks(folders: Mapping[str, str]) -> Iterator[Finding]:
    for subject, folder in folders.items():
        free_bytes = shutil.disk_usage(folder).free
        fixes = []
        if free_bytes < SMALL_DISK_BYTES:
            fixes.append("free some space: weights and metrics need it")
        if not os.access(folder, os.W_OK):
            fixes.append("get the permission to write here")
        yield Finding(subject, f"{_gib(free_bytes)} free in {folder}", "; ".join(fixes))


def examine_extras(extras: Mapping[str, str]) -> Iterator[Finding]:
    for package, extra in extras.items():
        if find_spec(package) is None:
            yield Finding(package, "not installed", f"optional: pip install '.[{extra}]' in Penstock's clone")
        else:
            yield Finding(package, version(package))


def _gib(size_bytes: int) -> str:
    return f"{size_bytes / 2**30:.1f} GiB"
