"""Each exit code of docs/reference/exit_codes.md, on one rank and on two, of commands as users run them.

The causes are planted by code that every process of a command runs, ranks included, before all else.
"""

import os
import re

import pytest

from penstock.cli.status import ExitStatus
from tests.support.tiny_run import PENSTOCK, TORCHRUN, fork_training, settings, start, write_tiny_run

PLANT = """
import torch.distributed as dist

from penstock import errors
from penstock.train import loop

def train(*_, **__):
    if dist.is_initialized():
        dist.barrier()  # a rank that still joins would fail of the other's end
    raise {error}

loop.train = train
"""
TIMEOUT_S = 100
CAUSES = {
    "wrong input": ('errors.ConfigError("planted", key="a.b")', ExitStatus.WRONG_INPUT, "penstock: a.b: planted\n"),
    "an error of a rank": (
        'errors.PipelineError("rank 0: planted", rank=0)', ExitStatus.RANK_FAILED, "penstock: rank 0: planted\n",
    ),
    "no memory": ('MemoryError("planted")', ExitStatus.RANK_FAILED, r"penstock: .*no memory is left .*[(]planted.*\n"),
    "a deadline": ('errors.DeadlineExceeded("rank 0: planted")', ExitStatus.HANG_ENDED, "penstock: rank 0: planted\n"),
    "not finite": ('errors.NotFinite("planted")', ExitStatus.NOT_FINITE, "penstock: planted\n"),
    "a bug": ('IndexError("planted")', ExitStatus.BUG, r"(?s)penstock: .*IndexError: planted\n\nThis is a bug.*\n"),
    "an interrupt": ("KeyboardInterrupt", ExitStatus.INTERRUPTED, ""),
}  # fmt: skip


def ended(process):
    """Wait for the end of a process, and return its status and its complaint."""
    complained = process.communicate(timeout=TIMEOUT_S)[1]
    return process.returncode, complained


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.full), 2])
@pytest.mark.parametrize(("error", "status", "message"), CAUSES.values(), ids=CAUSES)
def test_a_cause_has_one_code_and_one_message_on_any_number_of_ranks(tmp_path, error, status, message, ranks):
    write_tiny_run(tmp_path)

    found, complained = ended(fork_training(tmp_path, f"pipeline.ranks={ranks}", plant=PLANT.format(error=error)))

    assert found == status, complained
    assert re.fullmatch(message, complained), complained
    assert complained.count("penstock: ") == bool(message)


@pytest.mark.slow
def test_under_torchrun_a_rank_ends_with_its_own_code(tmp_path):
    write_tiny_run(tmp_path)
    (tmp_path / "sitecustomize.py").write_text(PLANT.format(error=CAUSES["not finite"][0]))
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    train = [*PENSTOCK, "train", "run.toml", *settings("pipeline.ranks=2")]

    found, complained = ended(start([*TORCHRUN, "2", *train], tmp_path, PYTHONPATH=paths))

    assert found == 1
    assert set(re.findall(r"exitcode\s*: (-?\d+)", complained)) <= {"7", "-15"}
    assert re.search(r"exitcode\s*: 7\b", complained)
    assert re.findall("^penstock: .*", complained, re.MULTILINE) == ["penstock: planted"]
