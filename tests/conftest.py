"""What holds for every test: fixed seeds, one torch thread, how hypothesis draws, GPU tests only on GPUs."""

import gc
import os
import random
import re
import signal
import sys

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis.database import DirectoryBasedExampleDatabase
from xdist.scheduler import LoadFileScheduling

# By default the same examples every time. In a full run others every time: one that fails is printed with the decorator
# that repeats it, and stays in a folder, so that later runs begin with it.
EXAMPLES = os.path.join(os.path.dirname(os.path.dirname(__file__)), ".hypothesis", "examples")
settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True, database=None)
settings.register_profile(
    "full",
    max_examples=500,
    deadline=None,
    derandomize=False,
    database=DirectoryBasedExampleDatabase(EXAMPLES),
    print_blob=True,
    # Neither a busy machine nor a run of unlucky draws is a fault of what is tested.
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)
settings.load_profile("quick")

# The command line must find the package in processes that tests start, installed or not.
_SOURCE = os.path.join(os.path.dirname(os.path.dirname(__file__)), "src")


SETTINGS_OF_A_SHELL = re.compile(
    r"((LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
    r"|COLUMNS|LINES|TERM|NO_COLOR|FORCE_COLOR|TTY_\w+|PYTHONWARNINGS)$"
)
"""Matches the variables by which torchrun tells a process its rank, and those that change what a command prints."""


def pytest_sessionstart():
    """Give tests the same environment in every shell; pytest's own output has begun, in the user's colors."""
    for name in filter(SETTINGS_OF_A_SHELL.match, list(os.environ)):
        del os.environ[name]
    os.environ["OMP_NUM_THREADS"] = "1"  # of ranks, which share the cores


def pytest_configure(config):
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        # A script's background job begins so, and whatever a test starts would, which is to be ended by Ctrl-C.
        signal.signal(signal.SIGINT, signal.default_int_handler)
    known = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    if _SOURCE not in known:
        os.environ["PYTHONPATH"] = os.pathsep.join([_SOURCE, *filter(None, known)])


pytest_plugins = ["tests.emulated.fixtures"]

LONGEST = (
    "tests/acceptance/steps/test_gradients.py",
    "tests/exactness/",
    "tests/random_models/",
    "tests/acceptance/steps/test_soak.py",
    "tests/acceptance/runs/test_pages.py",
    "tests/acceptance/steps/test_compiled_steps.py",
    "tests/acceptance/replicas/test_shard_features.py",
    "tests/execute/split/test_compiled_block.py",
)
"""These begin first, so that at the end no worker has long to go while the other waits."""

SPREAD = ("tests/acceptance/steps/test_gradients.py", "tests/acceptance/replicas/test_shard_features.py")
"""Their tests take half an hour and more together in a full run, and share nothing: any worker takes the next one."""


class FilesOrTests(LoadFileScheduling):
    """A worker runs a file whole, since its tests share ranks; of SPREAD it runs one test at a time."""

    def _split_scope(self, nodeid):
        return nodeid if nodeid.startswith(SPREAD) else super()._split_scope(nodeid)


def pytest_xdist_make_scheduler(config, log):
    return FilesOrTests(config, log) if config.getvalue("dist") == "loadfile" else None


def pytest_addoption(parser):
    parser.addoption(
        "--all", action="store_true", dest="runs_slow_tests", help="run the tests marked slow or emulated too"
    )


def runs_in_full():
    return settings().max_examples > settings.get_profile("quick").max_examples


def deselect_other_tiers(config, items):
    """Leave tests marked full to `make test-full`, and those marked slow or emulated to `make test-all`."""
    runs_slow_tests = config.option.runs_slow_tests
    skipped_tiers = [] if runs_in_full() else ["full"] if runs_slow_tests else ["full", "slow", "emulated"]
    deselected = [item for item in items if any(map(item.get_closest_marker, skipped_tiers))]
    if deselected:
        config.hook.pytest_deselected(items=deselected)
        selected_ids = {id(item) for item in items} - {id(item) for item in deselected}
        items[:] = [item for item in items if id(item) in selected_ids]


def pytest_collection_modifyitems(config, items):
    deselect_other_tiers(config, items)
    items.sort(key=lambda item: not item.nodeid.startswith(LONGEST))  # stable: all others stay in their order
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch  # only here: most test files must be able to run without it

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.hookimpl(trylast=True)
def pytest_collection_finish():
    """Let no collection look at what all tests are made of: a second each, and many tests collect or count objects."""
    gc.collect()
    gc.freeze()


@pytest.fixture
def setting(request, monkeypatch):
    """The options with which a mesh shares parameters; "in place" is for replicas that sum all gradients in place."""
    if request.param != "in place":
        return request.param
    from penstock.execute.parameters import summed  # only here: it needs torch

    monkeypatch.setattr(summed, "LARGE_BYTES", 0)
    return {"shard": "none"}


def rank_pool(num_ranks):
    """A fixture: processes that serve all tests of this process which ask for them."""

    @pytest.fixture(scope="session")
    def pool():
        from tests.support.ranks import RankPool  # only here: it needs torch

        with RankPool(num_ranks) as ranks:
            yield ranks

    return pool


two_ranks, three_ranks, four_ranks = map(rank_pool, (2, 3, 4))


@pytest.fixture
def is_full():
    """Whether all of a test is to run, as in `make test-full`, and not a sample of it."""
    return runs_in_full()


@pytest.fixture(autouse=True)
def fixed_seeds():
    random.seed(0)
    np.random.seed(0)  # the global generator, in case a test or a library uses it
    torch = sys.modules.get("torch")
    if torch is not None and hasattr(torch, "set_num_threads"):
        torch.manual_seed(0)
        torch.set_num_threads(1)
