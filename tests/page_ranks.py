"""Commands of pages, as `penstock`, `python` and `torchrun --standalone` run them, without their start-up.

Every process is a fork of a server (forks.py), which takes milliseconds instead of seconds.
"""

import os
import runpy
import shlex
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.forks import forks


def ranks_of(command):
    """The number of ranks and the script with its arguments that a command runs; None for other commands.

    The number is 0 for a process without torchrun, and the first argument is `penstock` for the command of that name.
    """
    if set(command) & set("|&;<>$\n`"):
        return None
    words = shlex.split(command)
    if words[:1] == ["penstock"] and words[1:2] not in (["train"], ["profile"]):  # these start processes themselves
        return 0, words
    if words[:1] == ["python"] and len(words) > 1 and words[1].endswith(".py"):
        return 0, words[1:]
    if words[:3] == ["torchrun", "--standalone", "--nproc-per-node"]:
        return int(words[3]), words[4:]
    return None


def run_script(num_ranks, argv, folder, environment, timeout_s):
    """Run a script as so many ranks, 0 for a process without torchrun, and return what subprocess.run would."""
    with tempfile.TemporaryDirectory() as outside:
        output = Path(outside) / "output"
        output.touch()
        context = forks()
        port = _free_port()
        processes = []
        for rank in range(max(num_ranks, 1)):
            settings = environment | (_settings_of(rank, num_ranks, port) if num_ranks else {})
            processes.append(context.Process(target=_run, args=(argv, folder, settings, output)))
            processes[-1].start()
        codes = _wait(processes, timeout_s)
        return subprocess.CompletedProcess(argv, max(codes), output.read_text(encoding="utf-8"))


def _wait(processes, timeout_s):
    end_s = time.monotonic() + timeout_s
    for process in processes:
        process.join(max(end_s - time.monotonic(), 0))
    codes = [124 if process.exitcode is None else abs(process.exitcode) for process in processes]
    for process in processes:
        process.kill()
        process.join()
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


def _free_port():
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def _run(argv, folder, settings, output):
    file = os.open(output, os.O_WRONLY | os.O_APPEND)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(settings)
    os.chdir(folder)
    sys.argv = list(argv)
    sys.path.insert(0, str(folder))
    try:
        if argv[0] == "penstock":
            sys.exit(_entry(argv[1:]))
        import torch

        torch.set_num_threads(1)
        runpy.run_path(argv[0], run_name="__main__")
    finally:
        sys.stdout.flush()


def _entry(arguments):
    from penstock.cli.entry import main

    return main(arguments)
