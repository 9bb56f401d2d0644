"""Questions of the tests of the command line about processes."""

import os
import signal
import time
from contextlib import suppress
from pathlib import Path

LISTENING = "0A"
LOOPBACK = "0100007F"
LONGEST_S = 60.0
"""In which a busy machine does what takes a second."""
PATIENT_S = 30.0
"""For so long torch's launcher waits for a process that does not end."""


def wait_until(is_true, *, timeout_s=LONGEST_S):
    end_s = time.monotonic() + timeout_s
    while not is_true():
        assert time.monotonic() < end_s, "waited too long"
        time.sleep(0.02)


def state_of(process):
    """Return the letter of a process's state, such as T for stopped; Z also where it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return "Z"


def is_alive(process):
    return state_of(process) != "Z"


def stop(process):
    """Stop a process, and wait until it has."""
    os.kill(process, signal.SIGSTOP)
    wait_until(lambda: state_of(process) == "T")


def written_pids(folder, num_ranks):
    """Wait until every stub rank has written its file, and return their process ids."""
    files = [Path(folder, str(rank)) for rank in range(num_ranks)]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    return [int(file.read_text().split()[0]) for file in files]


def shared_memory(processes):
    """Return the names in /dev/shm of the memory and the semaphores that processes have mapped."""
    lines = [line.split() for process in processes for line in Path(f"/proc/{process}/maps").read_text().splitlines()]
    inodes = {fields[4] for fields in lines if len(fields) > 5 and fields[5].startswith("/dev/shm/")}
    return {entry.name for entry in os.scandir("/dev/shm") if str(entry.inode()) in inodes}


def listening_addresses(processes):
    """Return (address, port) of every TCP socket, IPv4 or IPv6, on which one of the processes listens."""
    inodes = set()
    for process in processes:
        for link in Path(f"/proc/{process}/fd").iterdir():
            with suppress(OSError):  # the process has closed it since
                target = str(link.readlink())
                inodes |= {target[8:-1]} if target.startswith("socket:[") else set()
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == LISTENING and fields[9] in inodes:
                address, port = fields[1].split(":")
                found.append((address, int(port, 16)))
    return found
