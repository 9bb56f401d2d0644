"""Faults that are planted in a running process, each by replacing one name, and the reports that are to find them."""

import threading
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module

AHEAD, RECORDED, HOST_WAITS = "host too far ahead", "wrong recorded time", "more waits of the host"
"""Kinds of reports beside those of the checker."""
ALONE = (
    "throttled",
    "saved_checkpoints",
    "batches_of_the_host",
    "refilled_buffers",
    "averaged_weights",
    "peaks_of_activations",
    "measured_layers",
)
"""Scenarios of one rank."""
MODULES = (
    "tests.emulated.planted_scenarios",
    "tests.emulated.planted_hooks",
    "tests.emulated.planted_waits",
    "tests.emulated.planted_shards",
)
_planting, _num_planted, _originals = threading.Lock(), Counter(), {}


@dataclass(frozen=True)
class Fault:
    """One fault."""

    name: str
    scenario: str
    place: str
    """The module and the name within it that are replaced."""
    make: object
    """Called with what is there; returns what takes its place."""
    kind: str
    operations: tuple
    """How the names of the report's operations begin."""
    missed: str = ""
    """Why no report finds it, if none does."""


def table():
    """Return an empty table of faults by name, and what a fault comes in by: a decorator, where it gets no `make`."""
    faults = {}

    def plant(name, scenario, place, kind, *operations, make=None, missed=""):
        if make is None:
            return partial(add, name, scenario, place, kind, operations, missed)
        return add(name, scenario, place, kind, operations, missed, make)

    def add(name, scenario, place, kind, operations, missed, make):
        assert name not in faults, f"two faults are named {name!r}"
        faults[name] = Fault(name, scenario, place, make, kind, operations, missed)

    return faults, plant


def num_ranks_of(scenario):
    return 1 if scenario in ALONE else 2


def run_scenario_with(rank, num_ranks, scenario, fault):
    """Run a scenario on one rank, with a fault or with None."""
    run = next(getattr(module, scenario) for module in map(import_module, MODULES) if hasattr(module, scenario))
    if fault is None:
        return run(rank, num_ranks)
    with replaced(fault.place, fault.make):
        return run(rank, num_ranks)


def does_nothing(original):
    return lambda *arguments, **options: None


@contextmanager
def replaced(place, make):
    """Have a name replaced in this process while any rank runs: ranks are threads, and the name is the same for all."""
    owner, attribute = _found(place)
    with _planting:
        _num_planted[place] += 1
        if _num_planted[place] == 1:
            _originals[place] = getattr(owner, attribute)
            setattr(owner, attribute, make(getattr(owner, attribute)))
    try:
        yield
    finally:
        with _planting:
            _num_planted[place] -= 1
            if not _num_planted[place]:
                setattr(owner, attribute, _originals.pop(place))


def _found(place):
    module, _, path = place.partition(":")
    *outer, attribute = path.split(".")
    owner = import_module(module)
    for name in outer:
        owner = getattr(owner, name)
    return owner, attribute
