"""Running many cases in processes of their own, so that a crash or a hang is a verdict like any other."""

import time
import warnings
from multiprocessing.connection import wait

from tests.random_models.verdict import Verdict
from tests.support.forks import forks

LONGEST_CASE_S = 150.0


def run_cases(seeds, num_jobs=1, on_verdict=lambda verdict: None, *, work=None, verdict=Verdict):
    """Return the verdicts of these cases, in the order in which they came.

    `work(seed)` runs a case and returns its verdict; by default, a random model. `verdict` makes that of a crash.
    """
    waiting, verdicts = list(reversed(list(seeds))), []
    workers = [_Worker(work, verdict) for _ in range(min(num_jobs, len(waiting)))]
    try:
        for worker in workers:
            worker.begin(waiting.pop())
        while busy := [worker for worker in workers if worker.seed is not None]:
            wait([worker.connection for worker in busy], timeout=1.0)
            for verdict in [verdict for worker in busy if (verdict := worker.take())]:
                verdicts.append(verdict)
                on_verdict(verdict)
            for worker in workers:
                if worker.seed is None and waiting:
                    worker.begin(waiting.pop())
    finally:
        for worker in workers:
            worker.end()
    return verdicts


class _Worker:
    """One process, which is replaced when it dies or takes too long."""

    def __init__(self, work, verdict):
        self.work, self.verdict = work, verdict
        self.process = self.connection = self.seed = None

    def begin(self, seed):
        if self.process is None:
            context = forks()
            self.connection, other = context.Pipe()
            self.process = context.Process(target=_work, args=(other, self.work))
            self.process.start()
            other.close()
        self.seed, self.until_s = seed, time.monotonic() + LONGEST_CASE_S
        self.connection.send(seed)

    def take(self):
        """Return the verdict if there is one, of a process that ended or is late too."""
        if self.connection.poll():
            try:
                verdict = self.connection.recv()
            except (EOFError, ConnectionError):
                self.process.join()
                verdict = self.failed(f"the process died with exit code {self.process.exitcode}")
                self.stop()
        elif time.monotonic() > self.until_s:
            verdict = self.failed(f"not over after {LONGEST_CASE_S:g} s")
            self.stop()
        else:
            return None
        self.seed = None
        return verdict

    def failed(self, reason):
        return self.verdict(self.seed, "wrong" if self.work is None else "WRONG", reason)

    def stop(self):
        self.process.kill()
        self.process.join()
        self.connection.close()
        self.process = None

    def end(self):
        """Let the process end by itself if it can, with the ranks that it has started."""
        if self.process is None:
            return
        if self.seed is None:
            self.connection.close()
            self.process.join(10)
        self.process.kill()
        self.process.join()


def _work(connection, work):
    """Run what comes until the other end closes."""
    from tests.random_models.running import close_pools, judge

    work = work or judge

    warnings.simplefilter("ignore")  # advice on few microbatches, and on what a split backward cannot delay
    while True:
        try:
            seed = connection.recv()
        except (EOFError, ConnectionError):
            break
        connection.send(work(seed))
    close_pools()
