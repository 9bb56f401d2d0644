"""Python as a fork of a server (forks.py), with what takes long to import, and its ranks as forks of it.

It is like `subprocess.Popen([sys.executable, ...])` but for its start: it has a process group, an environment and
streams of its own. The ranks of `penstock` and torchrun are started, watched and ended by torch's launcher.
"""

import faulthandler
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import time
import traceback
from contextlib import suppress
from pathlib import Path

from tests.support.forks import forks

WRITING_S = 1.0
"""How long processes have to write their stacks."""


class ForkedPython:
    """A Python that runs, with what tests use of `subprocess.Popen`."""

    def __init__(self, arguments, folder, environment, *, plant="", output=None):
        """Start Python with these arguments; every process of it, ranks too, runs the code `plant` first.

        Where `output` is the path of a file, both streams go to its end.
        """
        self.args = list(arguments)
        self._outside = tempfile.TemporaryDirectory()
        self._files = [Path(self._outside.name) / name for name in ("stdout", "stderr")]
        for path in self._files:
            path.touch()
        files = [output or str(path) for path in self._files]
        given = (self.args, str(folder), environment, plant, files)
        self._process = forks().Process(target=_become, args=given)
        self._process.start()
        self.pid = self._process.pid

    @property
    def returncode(self):
        return self._process.exitcode

    def poll(self):
        return self.returncode

    def wait(self, timeout=None):
        self._process.join(timeout)
        if self.returncode is None:
            stacks = self._stacks()
            self.kill()
            error = subprocess.TimeoutExpired(self.args, timeout, *self._printed())
            error.add_note(f"stacks of the command and its ranks, and what they printed:\n{stacks}")
            raise error
        return self.returncode

    def communicate(self, timeout=None):
        """Wait for the end, and return what was printed on standard output and on standard error."""
        self.wait(timeout)
        return self._printed()

    def send_signal(self, number):
        os.kill(self.pid, number)

    def kill(self):
        """End the process and its ranks."""
        self._signal_all(signal.SIGKILL)
        self._process.join()

    def _stacks(self):
        """Have each process write the stacks of its threads (`_become`); return all that was written."""
        self._signal_all(signal.SIGUSR1)
        time.sleep(WRITING_S)
        return "".join(self._printed())

    def _signal_all(self, number):
        processes = [self.pid]
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended since
            processes += map(int, Path(f"/proc/{self.pid}/task/{self.pid}/children").read_text().split())
        for process in processes:
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def _printed(self):
        return tuple(path.read_text(encoding="utf-8") for path in self._files)


def _become(arguments, folder, environment, plant, files):
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    os.setsid()
    for number, path in enumerate(files, start=1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_APPEND), number)
    faulthandler.register(signal.SIGUSR1)
    os.chdir(folder)
    sys.path.insert(0, folder)
    subprocess_handler.Popen = _Rank
    _Rank.plant = plant
    _run_to_the_end(arguments, environment, plant)


class _Rank(subprocess.Popen):
    """A rank as torch's launcher starts it."""

    plant = ""

    def _execute_child(self, args, executable, preexec_fn, close_fds, pass_fds, cwd, env, *rest):
        assert args[0] == sys.executable, args
        self._child_created = True
        self.pid = os.fork()
        if self.pid == 0:
            os.setsid()
            Path("/proc/self/comm").write_text(f"rank {env['RANK']}")
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_DFL)
            _close_files()
            _run_to_the_end([word for word in args[1:] if word not in ("-u", "-P")], env, self.plant)


def _close_files():
    """Close what the launcher has open but its streams, and but pipes, over which Python speaks with its helpers."""
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the folder itself, which is closed by now
            if int(name) > 2 and not os.readlink(f"/proc/self/fd/{name}").startswith("pipe:"):
                os.close(int(name))


def _run_to_the_end(arguments, environment, plant):
    """Do what Python does with these arguments, and end the process as it does."""
    status = 1
    try:
        try:
            _run(arguments, environment, plant)
            status = 0
        except SystemExit:
            raise
        except BaseException:
            sys.excepthook(*sys.exc_info())
    except SystemExit as end:
        status = end.code or 0
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _run(arguments, environment, plant):
    os.environ.clear()
    os.environ.update(environment)
    tempfile.tempdir = None
    exec(compile(plant, "plant", "exec"), {})
    is_module = arguments[0] == "-m"
    sys.argv = list(arguments[is_module:])
    if is_module:
        runpy.run_module(arguments[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(arguments[0], run_name="__main__")
