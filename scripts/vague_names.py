#!/usr/bin/env python3
"""Count names in src that do not say what they hold: pronouns and participles that something is assigned to.

    python scripts/vague_names.py [--at-most N] [FOLDER ...]

Every assignment, argument, loop variable and attribute of a class that has such a name counts. Files are printed with
their lines and names, then a sum. With --at-most the exit status is 1 where the sum is larger.
"""

import argparse
import ast
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

_WORDS = """
each found own kept left given told theirs others other what whole apart ends made taken known named
seen met such before behind held everyone saved ours mine it them one both those these this that
here there gone done sent asked wanted begun noted passed said looked put got
"""
VAGUE = frozenset(_WORDS.split())


def vague_bindings(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of each binding that does not say what it holds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE:
            yield node.lineno, node.id
        elif isinstance(node, ast.arg) and node.arg in VAGUE:
            yield node.lineno, node.arg
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and node.attr.lstrip("_") in VAGUE:
            yield node.lineno, node.attr


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", nargs="*", type=Path, default=[Path(__file__).parent.parent / "src"])
    parser.add_argument("--at-most", type=int)
    arguments = parser.parse_args()
    counts: Counter[str] = Counter()
    for path in sorted(path for folder in arguments.folders for path in folder.rglob("*.py")):
        bindings = sorted(vague_bindings(ast.parse(path.read_text(encoding="utf-8"))))
        counts.update(name for _, name in bindings)
        if bindings:
            print(f"{path}: {', '.join(f'{name}:{line}' for line, name in bindings)}")
    print(f"{counts.total()} in all: {', '.join(f'{name} {count}' for name, count in counts.most_common(20))}")
    return int(arguments.at_most is not None and counts.total() > arguments.at_most)


if __name__ == "__main__":
    sys.exit(main())
