"""The fixtures `emulated` and `on_device`, and the build of the device before the first test that needs it.

All tests get them by tests/conftest.py, so nothing here imports torch before it is needed.
"""

import os
import subprocess
import sys
import time

import pytest

from tests.emulated.build import ROOT, library, reason_not_to_build

LONGEST_BUILD_S = 900
_missing = []


def pytest_collection_finish(session):
    """Build here, where no time limit of a test counts it."""
    is_needed = any(item.get_closest_marker("emulated") for item in session.items)
    if session.config.option.collectonly or not is_needed:
        return
    reason = reason_not_to_build()
    if not reason and not library().exists():
        begin_s = time.monotonic()
        built = subprocess.run(
            [sys.executable, "-m", "tests.emulated.build"],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=LONGEST_BUILD_S,
        )
        print(f"\nthe emulated device was built in {time.monotonic() - begin_s:.0f} s", file=sys.stderr)
        if built.returncode:
            reason = f"the emulated device cannot be built:\n{built.stdout[-3000:]}\n{built.stderr[-3000:]}"
    _missing[:] = [reason] if reason else []


@pytest.fixture(scope="session")
def kept_process():
    from tests.emulated.kept_process import KeptProcess

    process = KeptProcess()
    yield process
    process.close()


@pytest.fixture(scope="session")
def emulated_is_there():
    """Skip, or fail in CI, where the device cannot be built."""
    if _missing and os.environ.get("CI"):
        pytest.fail(f"CI must be able to build the emulated device: {_missing[0]}")
    if _missing:
        pytest.skip(_missing[0])


@pytest.fixture
def emulated(emulated_is_there, kept_process):
    """Run scenarios on a clean device: `emulated.run` fails on any report, `emulated.attempt` returns them."""
    from tests.emulated.scenarios import Emulated

    return Emulated(kept_process)


@pytest.fixture(
    params=[pytest.param("emulated", marks=pytest.mark.emulated), pytest.param("cuda", marks=pytest.mark.gpu)]
)
def on_device(request):
    """Call `body(device, *arguments)` on an emulated device and on a GPU; a body is a function of a test module."""
    if request.param == "emulated":
        emulated = request.getfixturevalue("emulated")
        return lambda body, *arguments: emulated.run(_on_emulated_device, body, *arguments)[0]
    import torch

    return lambda body, *arguments: body(torch.device("cuda"), *arguments)


def _on_emulated_device(rank, num_ranks, body, *arguments):
    import torch

    return body(torch.device("emu", rank), *arguments)
