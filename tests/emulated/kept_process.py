"""One process beside each process of pytest, in which all scenarios of rank threads run.

The device is for the whole process, cannot be taken back, and takes a second to install. The process is a fork of the
server of tests/support/forks.py. A scenario that does not end in time costs the process; the next one gets another.
"""

import gc
import os
import pickle
import traceback

from tests.support.forks import forks

LONGEST_START_S = 100.0


class ScenarioFailed(Exception):
    """A rank raised, the checker has reported something, or the scenario did not end in time."""


class KeptProcess:
    """The process, started when it is first needed."""

    def __init__(self):
        self._process = self._connection = None

    def run(self, function, arguments, options, *, timeout_s=30.0):
        """Run a scenario and return its outcome; raise ScenarioFailed if it does not end in time."""
        if self._process is None:
            self._start()
        self._connection.send_bytes(pickle.dumps((function, arguments, options)))
        is_fine, answer = self._receive(timeout_s, function.__name__)
        if not is_fine:
            raise ScenarioFailed(answer)
        return answer

    def close(self):
        if self._process is not None:
            self._connection.close()
            self._process.kill()  # it has nothing to write or to give back
            self._process.join()
            self._process = self._connection = None

    def _start(self):
        context = forks()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._receive(LONGEST_START_S, "the start of the device")

    def _receive(self, timeout_s, what):
        try:
            if self._connection.poll(timeout_s):
                return pickle.loads(self._connection.recv_bytes())
            fate = f"did not end in {timeout_s} s"
        except (EOFError, ConnectionError):
            self._process.join()
            fate = f"ended its process with exit code {self._process.exitcode}"
        except BaseException:  # a time limit of pytest or Ctrl-C: the answer that comes would be taken for the next one
            self.close()
            raise
        self.close()
        raise ScenarioFailed(f"{what} {fate}")


def _serve(connection):
    import torch

    from tests.emulated.install import install
    from tests.emulated.rank_threads import run_scenario

    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    install()
    gc.collect()
    gc.freeze()  # so that the collection after each scenario looks at little
    connection.send_bytes(pickle.dumps((True, None)))
    while True:
        try:
            received = connection.recv_bytes()
        except EOFError:
            os._exit(0)
        try:
            answer = True, run_scenario(*pickle.loads(received))
        except BaseException:
            answer = False, traceback.format_exc()
        connection.send_bytes(pickle.dumps(answer))
