"""Commands of pages, as `penstock`, `python` and `torchrun --standalone` run them, without their start-up.

Every process is a fork of a server (forked_python.py), which takes milliseconds instead of seconds.
"""

import shlex
import socket
import subprocess
import tempfile
import time

from tests.support.forked_python import ForkedPython


def ranks_of(command):
    """The number of ranks and the script with its arguments that a command runs; None for other commands.

    The number is 0 for a process without torchrun, and the first argument is `penstock` for the command of that name.
    """
    if set(command) & set("|&;<>$\n`"):
        return None
    words = shlex.split(command)
    if words[:1] == ["penstock"]:
        return 0, words
    if words[:1] == ["python"] and len(words) > 1 and words[1].endswith(".py"):
        return 0, words[1:]
    if words[:3] == ["torchrun", "--standalone", "--nproc-per-node"]:
        return int(words[3]), words[4:]
    return None


def run_script(num_ranks, argv, folder, environment, timeout_s):
    """Run a script as so many ranks, 0 for a process without torchrun, and return what subprocess.run would."""
    arguments = ["-m", *argv] if argv[0] == "penstock" else argv
    port = free_port()
    settings = [_settings_of(rank, num_ranks, port) for rank in range(num_ranks)] or [{}]
    with tempfile.NamedTemporaryFile("r", encoding="utf-8") as output:
        started = [ForkedPython(arguments, folder, environment | own, output=output.name) for own in settings]
        codes = _wait(started, timeout_s)
        return subprocess.CompletedProcess(argv, max(codes), output.read())


def _wait(started, timeout_s):
    end_s = time.monotonic() + timeout_s
    codes = []
    for process in started:
        try:
            codes.append(abs(process.wait(max(end_s - time.monotonic(), 0))))
        except subprocess.TimeoutExpired:
            codes.append(124)
    return codes


def _settings_of(rank, num_ranks, port):
    """What torchrun tells a process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(num_ranks),
        "LOCAL_WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_RUN_ID": "page",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def free_port():
    """Return a port that no process listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]
