#!/usr/bin/env python3
"""List every `raise` in src that no test executes, so that an error that nobody has ever seen is found.

    python scripts/raises.py checkpoints execute/losses      the tests that mirror these folders
    python scripts/raises.py train --tests tests/train tests/cli -- -n2 --all
    python scripts/raises.py . --list --notes notes.txt      what several runs with these notes left, without a run

Folders are those of src/penstock; `.` is all of it. What follows `--` goes to pytest. Each line printed is a place and
what it raises, then the count of those that were not executed and of all. With --notes, places that earlier runs noted
in this file count too, as long as no line of src has moved. With --at-most the exit status is 1 where more were not
executed.

Every Python of the run, ranks and forks too, compiles Penstock with a note before each `raise`: it writes the place to
a file, the first time that a process comes there. A bare `raise` only hands an error on, and is left out.
"""

import argparse
import ast
import builtins
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = ROOT / "src" / "penstock"
NOTES = "PENSTOCK_RAISES"
"""The variable of the environment with the path of the file of notes."""
NOTE = "__note_raise__"
"""The name of the function that writes a note, among the built-in ones."""


def raises_of(path: Path) -> dict[int, str]:
    """Return what each `raise` of a file raises, by line."""
    text = path.read_text(encoding="utf-8")
    return {node.lineno: ast.unparse(node.exc) for node in ast.walk(ast.parse(text)) if _is_raise(node)}


def _is_raise(node: ast.AST) -> bool:
    return isinstance(node, ast.Raise) and node.exc is not None


# ---- within the processes of a run


class _Noting(ast.NodeTransformer):
    """Puts a note before each `raise` of a file."""

    def __init__(self, path: str) -> None:
        self._path = path

    def visit_Raise(self, node: ast.Raise) -> Any:
        if not _is_raise(node):
            return node
        call = ast.Call(ast.Name(NOTE, ast.Load()), [ast.Constant(f"{self._path}:{node.lineno}")], [])
        return [ast.copy_location(ast.Expr(call), node), node]


class _Loader(SourceFileLoader):
    """Compiles a module with notes, and keeps no compiled file."""

    def get_code(self, fullname: str) -> Any:
        tree = _Noting(self.path).visit(ast.parse(self.get_data(self.path)))
        return compile(ast.fix_missing_locations(tree), self.path, "exec", dont_inherit=True)


class _Finder(MetaPathFinder):
    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname.partition(".")[0] != PACKAGE.name:
            return None
        spec = PathFinder.find_spec(fullname, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec


def watch() -> None:
    """Note each `raise` of this process; called when Python starts."""
    # A test may change the environment later.
    path = os.environ.get(NOTES)
    if path is None:
        return
    noted_places: set[str] = set()

    def note(place: str) -> None:
        if place not in noted_places:
            noted_places.add(place)
            with open(path, "a", encoding="utf-8") as notes:
                notes.write(f"{place}\n")

    setattr(builtins, NOTE, note)
    sys.meta_path.insert(0, _Finder())


_AT_START = f"""
import importlib.util
spec = importlib.util.spec_from_file_location("raises", {str(Path(__file__).resolve())!r})
raises = importlib.util.module_from_spec(spec)
spec.loader.exec_module(raises)
raises.watch()
"""
"""The code of a `sitecustomize` module, which Python imports when it starts."""


# ---- the run


def run_noting(tests: Sequence[Path], options: Sequence[str], notes: Path) -> None:
    """Run tests; add to the file of notes the place of each `raise` that any process of them executes."""
    with tempfile.TemporaryDirectory(prefix="penstock-raises-") as folder:
        (Path(folder) / "sitecustomize.py").write_text(_AT_START)
        paths = [folder, str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = os.environ | {NOTES: str(notes), "PYTHONPATH": os.pathsep.join(paths)}
        command = [sys.executable, "-m", "pytest", "-q", *options, *map(str, tests)]
        status = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if status > 1:  # 1: a test failed, and yet what it executed counts
        raise SystemExit(f"pytest ended with status {status}; see what it printed above")


def sources_of(folders: Sequence[str]) -> Iterator[Path]:
    """Yield the files of some folders, or files, of src/penstock."""
    for path in (PACKAGE / folder for folder in folders):
        if not path.exists():
            raise SystemExit(f"{path}: there is no such folder or file")
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


def mirrors_of(folder: str) -> Path:
    """Return the tests that mirror a folder or file of src/penstock."""
    if folder == ".":
        return ROOT / "tests"
    path = Path(folder)
    if path.suffix != ".py":
        return ROOT / "tests" / path
    return ROOT / "tests" / (path.parent if path.parent.parts else "package") / f"test_{path.stem.strip('_')}.py"


def main() -> int:
    words = sys.argv[1:]
    first_option = words.index("--") if "--" in words else len(words)
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folders", nargs="+", metavar="FOLDER")
    parser.add_argument("--tests", nargs="+", type=Path, help="the tests to run in place of those that mirror FOLDER")
    parser.add_argument("--list", action="store_true", help="run nothing")
    parser.add_argument("--notes", type=Path, help="a file of places to which the run adds those that it executes")
    parser.add_argument("--at-most", type=int)
    arguments = parser.parse_args(words[:first_option])
    raises = {
        f"{path}:{line}": text for path in sources_of(arguments.folders) for line, text in raises_of(path).items()
    }
    with tempfile.TemporaryDirectory(prefix="penstock-raises-") as folder:
        notes = (arguments.notes or Path(folder) / "notes").absolute()
        notes.touch()
        if not arguments.list:
            run_noting(arguments.tests or list(map(mirrors_of, arguments.folders)), words[first_option + 1 :], notes)
        executed = set(notes.read_text(encoding="utf-8").splitlines())
    missing = {place: text for place, text in raises.items() if place not in executed}
    for place, text in missing.items():
        print(f"{Path(place).relative_to(ROOT)}: {text[:100]}")
    print(f"{len(missing)} of {len(raises)} were not executed")
    return int(arguments.at_most is not None and len(missing) > arguments.at_most)


if __name__ == "__main__":
    sys.exit(main())
