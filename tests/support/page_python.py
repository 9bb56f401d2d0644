"""The Python of a page: a fork of the tests' server (forks.py), in which its blocks run one after another."""

import contextlib
import io
import os
import sys
import traceback

from tests.support.forks import forks


class PagePython:
    """A process that begins with the first block."""

    def __init__(self, folder, environment):
        self._given = str(folder), environment
        self._process = self._connection = None

    def run(self, text, *, is_alone, timeout_s):
        """Run a block, with the names of the blocks before unless alone; return whether it ended, and what it said."""
        if self._process is None:
            context = forks()
            self._connection, other = context.Pipe()
            self._process = context.Process(target=_serve, args=(other, *self._given))
            self._process.start()
            other.close()
        self._connection.send((text, is_alone))
        if not self._connection.poll(timeout_s):
            return False, f"not over after {timeout_s} s"
        try:
            return self._connection.recv()
        except EOFError:
            self._process.join()
            return False, f"the process ended with {self._process.exitcode}"

    def close(self):
        if self._process is not None:
            self._connection.close()
            self._process.kill()
            self._process.join()


def _serve(connection, folder, environment):
    """Run what comes until the other end closes."""
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, folder)
    names = {"__name__": "__main__"}
    while True:
        try:
            text, is_alone = connection.recv()
        except EOFError:
            break
        connection.send(_run(text, {"__name__": "__main__"} if is_alone else names))


def _run(text, names):
    output = io.StringIO()
    try:
        with contextlib.redirect_stdout(output):
            exec(compile(text, "page", "exec"), names)
    except BaseException:
        return False, traceback.format_exc()
    return True, output.getvalue()
