"""A disk that is really full: the run ends with the name of the file, and nothing that was whole is lost."""

import os
import re
import shutil
import subprocess

import pytest
from safetensors.torch import load_file

from penstock.checkpoints.folder import CheckpointFolder
from penstock.checkpoints.verification import verify
from penstock.cli import main
from tests.support.tiny_run import files_below, settings, write_tiny_run

PAGE_BYTES = 4096
MOST_PAGES = 40


@pytest.fixture
def here(tmp_path, monkeypatch):
    write_tiny_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def small_disk(tmp_path):
    """A disk of 512 KiB, and a function that leaves so many bytes of it free."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("disks cannot be mounted here")

    def leave_free(size_bytes):
        subprocess.run(["rm", "-rf", *disk.iterdir()], check=True)
        status = os.statvfs(disk)
        (disk / "filler").write_bytes(b"x" * (status.f_bavail * status.f_bsize - size_bytes))

    leave_free.disk = disk
    yield leave_free
    subprocess.run(["umount", "--lazy", str(disk)], check=True)


def complaint_of(capsys, run):
    """Run a command on a full disk; return its message, without the name of the program, or nothing if it fits."""
    if main(run) == 0:
        return ""
    complained = capsys.readouterr().err
    assert re.fullmatch(r"penstock: disk/run\S*: .*\n", complained), complained
    assert ". Free some space" in complained or "created" in complained
    return complained.removeprefix("penstock: ")


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_file_ends_the_run_with_the_name_of_that_file(here, small_disk, capsys):
    disk, named = small_disk.disk, []
    run = ["train", "run.toml", *settings("run.folder=disk/run", "metrics.every=99", "checkpoint.every=0")]

    for num_pages in range(MOST_PAGES):
        small_disk(num_pages * PAGE_BYTES)
        complained = complaint_of(capsys, run)
        if not complained:
            break
        assert not [name for name in files_below(disk) if name.endswith(".partial")]
        named.append(re.match(r"\S*?(\.?[a-z]*): ", complained)[1])

    # The system counts the pages of such a disk loosely, so that one file or another may slip through.
    assert {".unfinished", ".safetensors"} < set(named)
    assert len(set(named)) >= 4


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_full_disk_leaves_the_checkpoints_before_and_the_run_goes_on_when_there_is_space(
    here, small_disk, capsys, asynchronous
):
    common = ("checkpoint.every=1", "checkpoint.keep_last=9", f"checkpoint.asynchronous={asynchronous}")
    assert main(["train", "run.toml", *settings("run.folder=whole", *common)]) == 0
    capsys.readouterr()
    run = ["train", "run.toml", *settings("run.folder=disk/run", *common)]
    size = sum(path.stat().st_size for path in (here / "whole" / "checkpoints" / "step-1").iterdir())

    small_disk(2 * size + 24 * PAGE_BYTES)  # room for two of them, what else a run writes, and less than a third
    complained = complaint_of(capsys, run)

    assert re.search(r"disk/run/checkpoints/step-3\.[0-9a-f]+\.partial/\S+\.safetensors: cannot be written", complained)
    checkpoints = CheckpointFolder(small_disk.disk / "run" / "checkpoints")
    assert checkpoints.steps() == [2, 1]
    assert [verify(checkpoints.of_step(step)).step for step in checkpoints.steps()] == [2, 1]
    assert not list(checkpoints.path.glob("*.partial"))

    shutil.move(small_disk.disk / "run", here / "run")
    assert main(["train", "run.toml", *settings("run.folder=run", *common)]) == 0
    assert "continuing after step 2 " in capsys.readouterr().out
    found, expected = (load_file(here / name / "weights.safetensors") for name in ("run", "whole"))
    assert all(found[name].equal(expected[name]) for name in expected)


@pytest.mark.slow
@pytest.mark.parametrize("num_pages", [12, 16])
def test_a_disk_without_space_for_a_checkpoint_is_found_before_a_step(here, small_disk, capsys, num_pages):
    small_disk(num_pages * PAGE_BYTES)  # the weights alone take 13 pages, and what comes before them some

    complained = complaint_of(capsys, ["train", "run.toml", *settings("run.folder=disk/run", "checkpoint.every=2")])

    assert re.match(
        r"disk/run/checkpoints: the disk has .*iB left, and a checkpoint takes more than the 4.\.. KiB of the weights",
        complained,
    )
    assert "run/metrics.jsonl" not in files_below(small_disk.disk)
