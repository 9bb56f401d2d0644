"""The lock of a run folder: it tells whether a process of a run is still there.

    begins a run     takes the lock alone, then shares it
    every rank       shares it until its process ends

The system releases a lock when its last holder ends, however it ends. The ranks share it so that a folder is not free
before they are gone, even if the process that started them was killed. `.lock` names the holders for messages only.
"""

import errno
import fcntl
import os
import socket
import stat
from contextlib import suppress
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from penstock.errors import PenstockError, warn
from penstock.execute.control.diagnosis import process_trouble
from penstock.train.folder.run_folder import LOCK

WITHOUT_LOCKS = (errno.ENOLCK, errno.ENOTSUP, errno.ENOSYS)
"""The answers of file systems without locks."""


@dataclass(frozen=True, slots=True, eq=False)
class RunLock:
    """The hold of this process on a folder, until it is closed."""

    file: FileIO

    @classmethod
    def take(cls, folder: Path) -> "RunLock | None":
        """Hold an existing folder alone; None if another process holds it. Raises: PenstockError, OSError."""
        while True:
            file = _open(folder)
            if not _lock(file, fcntl.LOCK_EX):
                file.close()
                return None
            if _is_in_place(file):
                file.truncate(0)
                _sign(file)
                return cls(file)
            file.close()  # another process removed the file before the lock was ours

    @classmethod
    def join(cls, folder: Path) -> "RunLock | None":
        """Share the folder with the run that has it; None where there is no lock, or one process holds it alone.

        Raises: PenstockError, OSError.
        """
        if not (folder / LOCK).exists():
            return None
        file = _open(folder)
        if not _lock(file, fcntl.LOCK_SH):
            file.close()
            return None
        _sign(file)
        return cls(file)

    def share(self) -> bool:
        """Let the ranks of this run hold the folder, too; false if another process came first."""
        return _lock(self.file, fcntl.LOCK_SH)

    def remove(self) -> None:
        """Remove the file, for a folder in which no run began."""
        with suppress(OSError):
            os.unlink(self.file.name)

    def close(self) -> None:
        self.file.close()


def holder_of(folder: Path) -> str:
    """Return which process holds a folder, for a message; empty if none does."""
    try:
        file = FileIO(folder / LOCK, "rb", opener=_without_following)
    except OSError:
        return ""  # every run makes the file
    with file:
        if _lock(file, fcntl.LOCK_EX):
            return ""
        lines = [line.split() for line in file.read(4096).decode(errors="replace").splitlines()]
    holders = [(int(words[0]), words[1]) for words in lines if len(words) == 2 and words[0].isdecimal()]
    local_host = socket.gethostname()
    alive = [pid for pid, host in holders if host == local_host and process_trouble(pid) != "gone"]
    elsewhere = [f"process {pid} on {host}" for pid, host in holders if host != local_host]
    return f"process {alive[0]}" if alive else (elsewhere or ["another process"])[0]


def _open(folder: Path) -> FileIO:
    """Open the lock file, and make it if need be. Raises: OSError; PenstockError, if it is no regular file."""
    path = folder / LOCK
    if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
        raise PenstockError(f"{path}: is not a regular file, as runs make it; remove it")
    return FileIO(path, "a+", opener=_without_following)


def _without_following(path: str, flags: int) -> int:
    """Open a file, but none that a link names: what is written must not land elsewhere."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK, 0o666)


def _lock(file: FileIO, operation: int) -> bool:
    """Take a lock without waiting; where the file system has none, warn and go on."""
    try:
        fcntl.flock(file, operation | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in WITHOUT_LOCKS:
            raise
        warn("this file system has no locks; do not start two runs in one folder")
    return True


def _is_in_place(file: FileIO) -> bool:
    """Return whether the name still stands for this file."""
    try:
        return os.path.samestat(os.stat(file.name), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def _sign(file: FileIO) -> None:
    file.write(f"{os.getpid()} {socket.gethostname()}\n".encode())
