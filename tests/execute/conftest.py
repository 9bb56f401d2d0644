"""What several tests of execute/ need."""

import pytest


@pytest.fixture(scope="module")
def world():
    """A process group of this process alone."""
    import torch.distributed as dist  # only here: most tests must be able to run without it

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield store
    dist.destroy_process_group()
