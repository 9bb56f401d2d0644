"""Verify small models of one's own, and end with status 1 where one is not as expected.

python scripts/verify_models.py                                 all of tests/support/cut_models.py must be right
python scripts/verify_models.py --refused pairs,translator      these may be refused; none may be wrong

With `scripts/mutants.py --under models/cutting --command`, it says which faults of the cut `ps.verify` finds: the last
line names the first model that shows one, the tensor that differs, and its module.
"""

import sys
from argparse import ArgumentParser
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "src")]

import penstock as ps  # noqa: E402
from tests.support.cut_models import CASES  # noqa: E402


def verdict_of(name: str) -> tuple[str, str]:
    """Return whether a model is right, wrong or refused, and the words of the report."""
    case = CASES[name]
    try:
        report = ps.verify(case.model(), case.points, *case.batches())
    except Exception as error:  # a mutant may fail anywhere
        return "refused", f"{type(error).__name__}: {error}"
    words = report.refusal or (str(report.differences[0]) if report.differences else "")
    return "right" if report.is_right else "refused" if report.refusal else "wrong", words.partition("\n")[0]


def main() -> int:
    """Verify all models; return the exit status."""
    parser = ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--refused", default="", help="names of models that may be refused, with commas between them")
    may_be_refused = parser.parse_args().refused.split(",")
    faults = []
    for name in CASES:
        verdict, words = verdict_of(name)
        line = f"{name}: {verdict}{f': {words}' if words else ''}"
        print(line, flush=True)
        if verdict == "wrong" or (verdict == "refused" and name not in may_be_refused):
            faults.append(line)
    if faults:
        print(f"{len(faults)} of {len(CASES)} models; {faults[0]}")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
