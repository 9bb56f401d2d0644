"""The lock tells whether a process of a run is there, however that process ended."""

import errno
import fcntl
import os
from contextlib import ExitStack, contextmanager

import pytest

from penstock.errors import PenstockError, PenstockWarning
from penstock.train.folder.run_lock import RunLock, holder_of
from tests.support.forks import forks


def hold_until_killed(folder, how, connection):
    lock = getattr(RunLock, how)(folder)
    connection.send(lock is not None)
    connection.recv()


@contextmanager
def holding(folder, how="take"):
    """Give a process that holds the folder until it is killed, and has no open file of this one."""
    context = forks()
    local_end, remote_end = context.Pipe()
    process = context.Process(target=hold_until_killed, args=(folder, how, remote_end), daemon=True)
    process.start()
    assert local_end.recv()
    yield process
    end(process)


@pytest.fixture
def hold(tmp_path):
    """Start processes that hold the folder."""
    with ExitStack() as stack:
        yield lambda how="take": stack.enter_context(holding(tmp_path, how))


def end(process):
    process.kill()
    process.join()


def test_one_process_holds_a_folder_and_is_named_until_it_is_killed(tmp_path, hold):
    assert RunLock.join(tmp_path) is None
    assert list(tmp_path.iterdir()) == []
    process = hold()

    assert RunLock.take(tmp_path) is None
    assert holder_of(tmp_path) == f"process {process.pid}"
    (tmp_path / ".lock").write_text("17 elsewhere\n")
    assert holder_of(tmp_path) == "process 17 on elsewhere"
    end(process)
    assert holder_of(tmp_path) == ""
    lock = RunLock.take(tmp_path)
    assert lock is not None
    lock.close()


def test_a_folder_is_held_until_the_last_rank_of_a_killed_run_has_ended(tmp_path, hold):
    """The process that began the run is gone, and one of its ranks is not yet."""
    lock = RunLock.take(tmp_path)
    assert lock.share()
    rank = hold("join")
    lock.close()

    assert RunLock.take(tmp_path) is None
    end(rank)
    after = RunLock.take(tmp_path)
    assert after is not None
    after.close()


def test_the_holder_that_is_named_is_one_that_lives(tmp_path, hold):
    first, second = hold("take"), None
    end(first)
    lock = RunLock.take(tmp_path)
    assert lock.share()
    second = hold("join")
    text = (tmp_path / ".lock").read_text()
    lock.close()

    assert [int(line.split()[0]) for line in text.splitlines()] == [os.getpid(), second.pid]
    (tmp_path / ".lock").write_text(f"{first.pid} {text.split()[1]}\n{second.pid} {text.split()[1]}\n")
    assert holder_of(tmp_path) == f"process {second.pid}"


def test_a_lock_file_that_was_removed_meanwhile_is_not_held(tmp_path, monkeypatch):
    """The process that removes the file holds it, and another process may have opened it before."""

    def lock_late(file, operation, flock=fcntl.flock):
        monkeypatch.undo()
        os.unlink(file.name)
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    lock = RunLock.take(tmp_path)

    assert (tmp_path / ".lock").read_text().startswith(f"{os.getpid()} ")
    assert RunLock.take(tmp_path) is None
    lock.close()


@pytest.mark.parametrize("is_there", [True, False])
def test_a_link_in_its_place_or_a_pipe_is_refused_and_its_target_left_alone(tmp_path, is_there):
    target = tmp_path / "thesis.tex"
    if is_there:
        target.write_text("all of it")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").symlink_to(target)

    with pytest.raises(PenstockError, match=r"run/\.lock: is not a regular file, as runs make it; remove it"):
        RunLock.take(tmp_path / "run")

    assert holder_of(tmp_path / "run") == ""
    assert (target.read_text() if is_there else target.exists()) == ("all of it" if is_there else False)
    os.mkfifo(tmp_path / ".lock")
    for look in (RunLock.take, RunLock.join):
        with pytest.raises(PenstockError, match="is not a regular file"):
            look(tmp_path)
    assert holder_of(tmp_path) == ""


def test_a_file_system_without_locks_is_warned_of(tmp_path, monkeypatch):
    def refuse(file, operation):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "flock", refuse)

    with pytest.warns(PenstockWarning, match="this file system has no locks"):
        lock = RunLock.take(tmp_path)
    lock.close()
