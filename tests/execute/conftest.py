"""What several tests of execute/ need."""

import warnings

import pytest

from penstock.errors import PenstockWarning


@pytest.fixture(scope="module")
def world():
    """A process group of this process alone."""
    import torch.distributed as dist  # only here: most tests must be able to run without it

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    dist.destroy_process_group()


@pytest.fixture
def told_warnings():
    """Return the texts of Penstock's warnings so far; one that is given twice counts twice."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield lambda: [str(each.message) for each in caught if issubclass(each.category, PenstockWarning)]


@pytest.fixture
def nothing_stays_compiled():
    """Behind each test, torch forgets what it has compiled."""
    import torch  # only here: most tests must be able to run without it

    yield
    torch.compiler.reset()
