"""Ending processes that do not take their SIGTERM."""

import signal
import subprocess
import sys
import threading
import time

from penstock.cli.stragglers import end_stragglers
from tests.cli.processes import stop, wait_until


def test_only_a_stopped_process_that_was_told_to_end_is_killed():
    children = [subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"]) for _ in range(3)]
    told, stopped, running = children
    for child in (told, stopped):
        stop(child.pid)
    told.send_signal(signal.SIGTERM)
    over = threading.Event()
    watch = threading.Thread(
        target=end_stragglers, args=(lambda: [child.pid for child in children], over), kwargs={"patience_s": 0.2}
    )
    begin_s = time.monotonic()

    watch.start()
    wait_until(lambda: told.poll() is not None, timeout_s=3.0)
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

    end_stragglers(processes, over, patience_s=0.0)

    assert asked == [child.pid]
