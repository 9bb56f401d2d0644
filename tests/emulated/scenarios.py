"""What tests use to run scenarios; nothing here installs the device in the process of pytest."""

from tests.emulated.kept_process import ScenarioFailed
from tests.emulated.rank_threads import Options

POLICIES = [("lazy", 0), ("eager", 0), ("random", 1), ("random", 2)]
"""(policy, seed) for parametrize."""


class Emulated:
    """The fixture's value."""

    def __init__(self, process):
        self._process = process

    def attempt(self, function, *arguments, timeout_s=30.0, **options):
        """Run `function(rank, num_ranks, *arguments)` per rank; return results, reports and tracebacks."""
        return self._process.run(function, arguments, Options(**options), timeout_s=timeout_s)

    def run(self, function, *arguments, timeout_s=30.0, **options):
        """Run it and return the results by rank; raise ScenarioFailed on any report and any error."""
        outcome = self.attempt(function, *arguments, timeout_s=timeout_s, **options)
        lines = [str(report) for report in outcome.reports]
        lines += [f"rank {rank} raised:\n{text}" for rank, text in outcome.tracebacks.items()]
        if lines:
            raise ScenarioFailed("\n".join([f"{function.__name__} ({Options(**options)}):", *lines]))
        return outcome.results
