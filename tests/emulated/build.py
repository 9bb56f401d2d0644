"""Compile the device's C++ part once per version of torch, and keep it in the cache folder of the user.

`reason_not_to_build()` says what is missing; `python -m tests.emulated.build` compiles; `load()` returns the extension,
compiled first if need be. Several processes may do so at once: one compiles, the others wait for it.
"""

import fcntl
import hashlib
import importlib.util
import os
import shlex
import shutil
import sys
import sysconfig
import time
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
NAME = "penstock_emulated"
SOURCES = sorted((Path(__file__).parent / "extension").glob("*"))
# -O0 halves the time to compile; the device spends its own time in Python.
FLAGS = ["-O0", "-g0", "-std=c++20", "-w", "-DUSE_DISTRIBUTED", "-DUSE_C10D"]


def reason_not_to_build():
    """Say what the build lacks, or return the empty text; nothing is needed where it was built before."""
    if library().exists():
        return ""
    if shutil.which(_compiler()) is None:
        return f"no C++20 compiler: {_compiler()} is not on the path (Debian: apt install g++)"
    headers = Path(sysconfig.get_paths()["include"]) / "Python.h"
    if not headers.exists():
        return f"no headers of Python: {headers} does not exist (Debian: apt install python3-dev)"
    if shutil.which("ninja", path=_path_with_scripts()) is None:
        return "no ninja (pip install ninja, or the extra `dev`)"
    return ""


def library():
    """Return where the compiled extension lies, or will; another torch, Python or source means another folder."""
    digest = hashlib.sha256(repr((sys.version, FLAGS)).encode())
    for path in SOURCES:
        digest.update(path.read_bytes())
    return _cache() / f"emulated-{version('torch')}-{digest.hexdigest()[:12]}" / f"{NAME}.so"


def _cache():
    """Return the tests' part of the user's cache folder, or of pytest's where the user has none that can be written."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "penstock-tests")
    with suppress(OSError):
        if cache.is_absolute():  # else the user has no home: neither HOME nor a line in the system's list of users
            cache.mkdir(parents=True, exist_ok=True)
            if os.access(cache, os.W_OK):
                return cache
    return ROOT / ".pytest_cache" / "penstock-tests"


def load():
    """Return the extension. It acts on torch as a whole only when its `install` is called."""
    import torch.distributed  # noqa: F401  # the extension uses its types of Python

    built = library()
    built.parent.mkdir(parents=True, exist_ok=True)
    with _lock_on(built.parent / "one-builds"):
        if not built.exists():
            return _compiled(built)
    spec = importlib.util.spec_from_file_location(NAME, built)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _compiled(built):
    from torch.utils import cpp_extension

    # Torch quotes every path that it gives the compiler but this one, in which a space would make two words.
    cpp_extension.TORCH_LIB_PATH = shlex.quote(cpp_extension.TORCH_LIB_PATH)
    os.environ["PATH"] = _path_with_scripts()
    scratch = built.parent / "scratch"
    shutil.rmtree(scratch, ignore_errors=True)  # of a build that was killed: torch would wait for its lock for ever
    scratch.mkdir()
    sources = [str(path) for path in SOURCES if path.suffix == ".cpp"]
    module = cpp_extension.load(NAME, sources, extra_cflags=FLAGS, build_directory=str(scratch))
    (scratch / built.name).rename(built)  # last, so that what lies there is whole
    return module


@contextmanager
def _lock_on(path):
    with open(path, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)  # the system releases it when the process ends, however that happens
        yield


def _compiler():
    return os.environ.get("CXX", "c++")


def _path_with_scripts():
    """Return PATH with the folder of this Python's own scripts, where pip puts ninja."""
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


if __name__ == "__main__":
    begin_s = time.monotonic()
    load()
    print(f"{library()}: ready after {time.monotonic() - begin_s:.0f} s")
