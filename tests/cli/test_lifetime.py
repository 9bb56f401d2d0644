"""When processes end."""

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import contextmanager

import pytest

from penstock.cli import lifetime
from penstock.cli.lifetime import end_stragglers
from tests.cli.processes import LONGEST_S, stop, wait_until

BLOCKED = """
import ctypes, sys, threading
from penstock.cli.lifetime import end_when_told
end_when_told()
print('ready', flush=True)
ctypes.CDLL(None).sem_wait(ctypes.create_string_buffer(64))  # a wait in C that Python's handlers cannot end
"""


def start(program):
    return subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def fork(action):
    """Run `action` in a copy of this process and return its id; 99 is its status where it returns."""
    child = os.fork()
    if child == 0:
        action()
        os._exit(99)
    return child


def exit_code(child):
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.parametrize(
    "number",
    [signal.SIGTERM, *(pytest.param(other, marks=pytest.mark.slow) for other in (signal.SIGINT, signal.SIGHUP))],
)
def test_a_rank_that_waits_in_c_code_ends_without_a_trace(number):
    rank = start(BLOCKED)
    rank.stdout.readline()

    rank.send_signal(number)
    printed = rank.communicate(timeout=LONGEST_S)

    assert rank.returncode == -number
    assert printed == ("", "")


def test_an_interrupt_raises_where_files_are_open_and_leaves_at_once_where_none_are_or_the_launcher_is_gone():
    def action():
        with lifetime.interrupts_handled_by(lifetime.leave_at_once):
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt), lifetime.interrupts_handled_by(signal.default_int_handler):
        os.kill(os.getpid(), signal.SIGTERM)
    assert exit_code(fork(action)) == exit_code(fork(lambda: lifetime.die_with(1))) == 130


@contextmanager
def hang_up_handled_by(handler):
    """These tests may themselves run under nohup, which ignores SIGHUP."""
    before = signal.signal(signal.SIGHUP, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGHUP, before)


def test_handlers_are_put_back_and_a_hang_up_that_nohup_ignores_stays_ignored():
    with hang_up_handled_by(signal.SIG_DFL):
        before = [signal.getsignal(number) for number in lifetime.INTERRUPTS]

        with lifetime.interrupts_handled_by(signal.default_int_handler):
            inside = [signal.getsignal(number) for number in lifetime.INTERRUPTS]

        assert inside == [signal.default_int_handler] * 3
        assert [signal.getsignal(number) for number in lifetime.INTERRUPTS] == before
    with hang_up_handled_by(signal.SIG_IGN), lifetime.interrupts_handled_by(signal.default_int_handler):
        assert signal.getsignal(signal.SIGHUP) == signal.SIG_IGN


def test_a_rank_knows_the_launcher_that_started_it():
    assert lifetime.launcher_of({"TORCHELASTIC_RUN_ID": lifetime.run_id_of(123)}) == 123
    assert lifetime.launcher_of({"TORCHELASTIC_RUN_ID": "none"}) is None
    assert lifetime.launcher_of({"TORCHELASTIC_RUN_ID": "my-7"}) is None
    assert lifetime.launcher_of({}) is None


@pytest.mark.parametrize("bind", [lifetime.die_with, lambda launcher: lifetime.leave_after(launcher, poll_s=0.01)])
def test_a_rank_ends_with_its_launcher(bind):
    ends, begin = os.pipe(), os.pipe()

    def launch():
        launcher = os.getpid()

        def rank():
            os.close(begin[1])
            os.close(ends[0])
            if bind is lifetime.die_with:
                bind(launcher)
                os.write(ends[1], b"r")
                time.sleep(600)
            os.write(ends[1], b"r")
            bind(launcher)

        fork(rank)
        os.read(begin[0], 1)

    launcher = fork(launch)
    os.close(ends[1])
    assert os.read(ends[0], 1) == b"r"
    os.write(begin[1], b"e")
    assert exit_code(launcher) == 99

    os.set_blocking(ends[0], False)
    _wait_for_end(ends[0])
    for descriptor in (ends[0], *begin):
        os.close(descriptor)


def _wait_for_end(descriptor):
    """Wait until every holder of the pipe's other end is gone."""

    def is_closed():
        try:
            return os.read(descriptor, 1) == b""
        except BlockingIOError:
            return False

    wait_until(is_closed)


# ---- stragglers


def test_only_a_stopped_process_that_was_told_to_end_is_killed():
    children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"]) for _ in range(3)]
    told, stopped, running = children
    for child in (told, stopped):
        stop(child.pid)
    told.send_signal(signal.SIGTERM)
    over = threading.Event()
    watch = threading.Thread(
        target=end_stragglers, args=(lambda: [child.pid for child in children], over), kwargs={"max_wait_s": 0.2}
    )
    begin_s = time.monotonic()

    watch.start()
    wait_until(lambda: told.poll() is not None)
    over.set()
    watch.join()

    assert told.returncode == -signal.SIGKILL
    assert time.monotonic() - begin_s >= 0.2
    assert (stopped.poll(), running.poll()) == (None, None)
    for child in (stopped, running):
        child.kill()
        child.wait()


def test_a_process_that_is_gone_is_no_problem():
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    over = threading.Event()
    asked = []

    def processes():
        asked.append(child.pid)
        over.set()
        return asked

    end_stragglers(processes, over, max_wait_s=0.0)

    assert asked == [child.pid]
