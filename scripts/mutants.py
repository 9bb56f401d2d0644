"""Plant mutants in src, one at a time, and record which tests catch them.

python scripts/mutants.py --seed 1 --count 60 -o build/mutants.json     plant new ones, over all folders by their lines
python scripts/mutants.py --again build/mutants.json -o build/now.json  plant the same ones in the tree as it is now

A mutant changes one operator, constant, condition or statement. The tests run on a copy of the tree: first the test
file of the mutant's file, then the tests of its folder, then those that name its module, each until one fails. A mutant
that none of these catches may still be caught by others; it is recorded as `not caught`. The tests of `make test` run
first, and where all pass, those that `make test-all` adds.
"""

import ast
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = Path("src/penstock")
LIMIT_S = 300.0
"""Of one selection of tests; a mutant that makes them hang is caught, too."""
ONLY_ALL = "only make test-all:"
MOST_FILES = 12
"""That name a module, of those that run for one mutant."""
SWAPPED = {
    "==": "!=", "!=": "==", "<": "<=", "<=": "<", ">": ">=", ">=": ">", "is": "is not", "is not": "is", "in": "not in",
    "not in": "in", "+": "-", "-": "+", "*": "+", "//": "*", "/": "*", "%": "+", "|": "&", "&": "|", "and": "or",
    "or": "and",
}  # fmt: skip


@dataclass(frozen=True)
class Mutant:
    """One change of one line."""

    path: str
    """Under src/penstock."""
    function: str
    before: str
    """The line without its indentation."""
    after: str
    caught_by: str = ""
    """The first test that failed; empty while none has."""


@cache
def mutants_of(path: Path) -> list[tuple[int, Mutant]]:
    """List what may be changed in a file, with the numbers of the lines."""
    return list(_mutants_of(path))


def _mutants_of(path: Path) -> Iterator[tuple[int, Mutant]]:
    text = path.read_text()
    lines = text.splitlines()
    for function in _functions(ast.parse(text)):
        for node in _own_nodes(function):
            number = getattr(node, "lineno", 0)
            if not number or getattr(node, "end_lineno", 0) != number:
                continue
            line = lines[number - 1]
            for changed in _changes(node, line.encode()):
                name = str(path.relative_to(ROOT / PACKAGE))
                yield number, Mutant(name, function.name, line.strip(), changed.decode().strip())


def _functions(tree: ast.AST) -> Iterator[ast.FunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef))


def _own_nodes(function: ast.FunctionDef) -> Iterator[ast.AST]:
    """List the nodes of a function's body, but not those of annotations, messages of errors and functions within it."""
    waiting: list[ast.AST] = list(function.body)
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Raise | ast.JoinedStr | ast.Assert):
            continue
        yield node
        skipped = {id(getattr(node, "annotation", None))}
        waiting += [each for each in ast.iter_child_nodes(node) if id(each) not in skipped]


def _changes(node: ast.AST, line: bytes) -> Iterator[bytes]:
    """List what becomes of a line (in UTF-8, as columns count bytes) by changes of a node in it."""
    match node:
        case ast.Compare(left=left, comparators=[right]) | ast.BinOp(left=left, right=right):
            yield from _swapped(line, left.end_col_offset or 0, right.col_offset)
        case ast.BoolOp(values=[first, second, *_]):
            yield from _swapped(line, first.end_col_offset or 0, second.col_offset)
        case ast.Constant(value=bool() | int() as value):
            changed = str(not value) if isinstance(value, bool) else str(value + 1)
            yield _replaced(line, node, changed)
        case ast.If(test=test) | ast.IfExp(test=test) | ast.While(test=test) if test.end_lineno == test.lineno:
            segment = line[test.col_offset : test.end_col_offset].decode()
            yield _replaced(line, test, f"(not ({segment}))")
        case ast.Return(value=ast.expr() as value) if not (isinstance(value, ast.Constant) and not value.value):
            yield _replaced(line, node, "return None")
        case ast.Expr(value=ast.Call()) | ast.Assign(targets=[ast.Attribute() | ast.Subscript()]) | ast.AugAssign():
            yield _replaced(line, node, "pass")


def _swapped(line: bytes, begin: int, end: int) -> Iterator[bytes]:
    operator = line[begin:end].decode().strip("() ")
    if operator in SWAPPED:
        yield line[:begin] + line[begin:end].replace(operator.encode(), SWAPPED[operator].encode()) + line[end:]


def _replaced(line: bytes, node: ast.expr | ast.stmt, text: str) -> bytes:
    return line[: node.col_offset] + text.encode() + line[node.end_col_offset :]


def choose(seed: int, count: int) -> list[Mutant]:
    """Choose mutants: a line of src at random, then one of its changes."""
    chance = random.Random(seed)
    files = sorted((ROOT / PACKAGE).rglob("*.py"))
    lengths = [len(path.read_text().splitlines()) for path in files]
    found: dict[tuple[str, str], Mutant] = {}
    while len(found) < count:
        path, length = chance.choices(list(zip(files, lengths, strict=True)), weights=lengths)[0]
        number = chance.randint(1, length)
        changes = [mutant for line, mutant in mutants_of(path) if line == number]
        if changes:
            mutant = chance.choice(changes)
            found[mutant.path, mutant.before] = mutant
    return list(found.values())


def find(mutant: Mutant) -> tuple[Path, int] | None:
    """Find a mutant's line: in its file, in its function, or else where it stands in src but once."""
    places = [
        (path, number, other.function)
        for path in sorted((ROOT / PACKAGE).rglob("*.py"))
        for number, other in mutants_of(path)
        if (other.before, other.after) == (mutant.before, mutant.after)
    ]
    path = ROOT / PACKAGE / mutant.path
    for fits in (lambda each: (each[0], each[2]) == (path, mutant.function), lambda each: each[0] == path, bool):
        chosen = list(dict.fromkeys(each[:2] for each in places if fits(each)))
        if len(chosen) == 1 or (chosen and fits is not bool):
            return chosen[0]
    return None


def selections(path: Path) -> Iterator[list[str]]:
    """List tests of a file: its own, those of its folder, and those that name its module."""
    inner = path.relative_to(ROOT / PACKAGE)
    folder = Path("tests") / (inner.parent if len(inner.parts) > 1 else "package")
    own = folder / f"test_{inner.stem.strip('_')}.py"
    if (ROOT / own).exists():
        yield [str(own)]
    if (ROOT / folder).is_dir():
        yield [str(folder)]
    module = ".".join(["penstock", *inner.with_suffix("").parts])
    naming = re.compile(rf"{re.escape(module)}\b|{re.escape(inner.stem)}")
    tests = (each for each in sorted((ROOT / "tests").rglob("test_*.py")) if "house" not in each.parts)
    others = [
        str(each.relative_to(ROOT)) for each in tests if naming.search(each.read_text()) and folder not in each.parents
    ]
    if others:
        yield others[:MOST_FILES]


def caught_by(copy: Path, path: Path, tier: Sequence[str] = ()) -> str:
    """Return the first test that fails on the copy of the tree; empty if none does."""
    environment = os.environ | {"PYTHONPATH": str(copy / "src"), "OMP_NUM_THREADS": "1"}
    for selection in selections(path):
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tier, *selection]
        try:
            done = subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            return f"no end in {LIMIT_S:g} s: {' '.join(selection)}"
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", done.stdout, re.MULTILINE)
        if "file or directory not found" in done.stderr:
            raise SystemExit(done.stderr)
        if done.returncode not in (0, 5):  # 5: no tests
            return failed[1] if failed else f"exit status {done.returncode}: {' '.join(selection)}"
    return ""


def run(mutants: Sequence[Mutant], output: Path) -> None:
    """Plant each mutant in a copy, and write after each what was found."""
    found: list[dict[str, str]] = []
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "tree"
        shutil.copytree(ROOT, copy, ignore=shutil.ignore_patterns(".venv", ".git", "build", ".*_cache"))
        for number, mutant in enumerate(mutants, 1):
            begin_s = time.monotonic()
            place = find(mutant)
            if place is None:
                verdict = "its line is gone"
            else:
                path, line = place
                planted = copy / path.relative_to(ROOT)
                lines = path.read_text().splitlines(keepends=True)
                lines[line - 1] = lines[line - 1].replace(mutant.before, mutant.after)
                planted.write_text("".join(lines))
                verdict = caught_by(copy, path)
                if not verdict:
                    slow_test = caught_by(copy, path, ["--all", "-m", "slow or emulated"])
                    verdict = f"{ONLY_ALL} {slow_test}" if slow_test else "not caught"
                shutil.copyfile(path, planted)
            found.append(asdict(mutant) | {"caught_by": verdict})
            output.write_text(json.dumps(found, indent=1) + "\n")
            print(f"{number}/{len(mutants)}  {mutant.path}: {mutant.before}  ->  {mutant.after}")
            print(f"    {verdict}  ({time.monotonic() - begin_s:.0f} s)", flush=True)
    missed = sum(each["caught_by"] == "not caught" for each in found)
    slow = sum(each["caught_by"].startswith(ONLY_ALL) for each in found)
    print(f"{len(found)} mutants: {slow} caught by make test-all alone, {missed} not caught; written to {output}")


def main() -> None:
    """Read the arguments."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=int(time.time()))
    parser.add_argument("--count", type=int, default=60)
    parser.add_argument("--again", type=Path)
    parser.add_argument("-o", "--output", type=Path, required=True)
    arguments = parser.parse_args()
    if arguments.again is not None:
        mutants = [Mutant(**each) for each in json.loads(arguments.again.read_text())]
    else:
        print(f"seed {arguments.seed}")
        mutants = choose(arguments.seed, arguments.count)
    arguments.output.parent.mkdir(parents=True, exist_ok=True)
    run(mutants, arguments.output)


if __name__ == "__main__":
    main()
