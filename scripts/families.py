#!/usr/bin/env python
"""Try each family of transformers with a tiny model, and write docs/families.md: right, or refused with these words.

    python scripts/families.py                          all families, some 10 minutes; --write writes the page
    python scripts/families.py llama seq2seq:t5         these

Each runs in a process of its own. Exit status 1 if one is WRONG. --results FILE has all words, in JSON.
"""

import argparse
import json
import multiprocessing
import re
import sys
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "src"), str(ROOT)]

import torch  # noqa: E402
import transformers  # noqa: E402

from scripts.family_trials.families import LEFT_OUT, Family, families  # noqa: E402
from scripts.family_trials.trial import FORMS, REFUSED, RIGHT, WRONG, trial  # noqa: E402

PAGE = ROOT / "docs" / "families.md"
BEGIN, END = "<!-- written by scripts/families.py -->", "<!-- end of what scripts/families.py wrote -->"
LIMIT_S = 240.0
"""Seconds after which a trial is given up."""
MOST_WORDS = 20
"""Words of a refusal that the page has."""
Result = dict[str, Any]
"""The class of a model, the verdict of each form, and the seconds of the trial."""


def tried(family: Family) -> Result:
    """Return the result of a trial in a process of its own, so that a crash ends no other trial."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_try, args=(family, writer))
    begin_s = time.monotonic()
    process.start()
    writer.close()
    result: Result
    try:
        result = reader.recv() if reader.poll(LIMIT_S) else failed(f"no result after {LIMIT_S:g} s")
    except EOFError:
        process.join()
        result = failed(f"the process ended with status {process.exitcode}")
    process.kill()
    process.join()
    return result | {"seconds": round(time.monotonic() - begin_s, 1)}


def failed(reason: str) -> Result:
    """Return the result of a trial without verdicts."""
    return {"class": "", "forms": {form: {"word": WRONG, "reason": reason} for form in FORMS}}


def _try(family: Family, writer: Connection) -> None:
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    torch.set_num_threads(1)
    try:
        writer.send(trial(family))
    except Exception as error:
        writer.send(failed(f"its tiny model: {type(error).__name__}: {error}"))


def table(results: dict[str, Result]) -> str:
    """Return the rows of the page, a family each, and the words of each refusal."""
    counts = Counter(_summary(result) for result in results.values())
    lines = [
        f"{len(results)} families: {', '.join(f'{counts[word]} {word}' for word in (RIGHT, REFUSED, WRONG))}.",
        "",
        f"| family | class | {' | '.join(FORMS)} |",
        f"|{'---|' * (len(FORMS) + 2)}",
    ]
    for name, result in results.items():
        words = [result["forms"][form]["word"] for form in FORMS]
        lines.append(f"| `{name}` | `{result['class']}` | {' | '.join(words)} |")
    refused = [f"* `{name}`: {words}." for name, result in results.items() if (words := _reasons(result))]
    refused[:0] = ["", "Refused with these words:", ""]
    left_out = [f"* `{name}`: {reason}." for name, reason in LEFT_OUT.items()]
    return "\n".join([*lines, *refused, "", "Decoders that are not tried:", "", *left_out])


def _summary(result: Result) -> str:
    """Return the verdict of a family: the worst of its forms."""
    words = {verdict["word"] for verdict in result["forms"].values()}
    return next((word for word in (WRONG, REFUSED) if word in words), RIGHT)


def _reasons(result: Result) -> str:
    refusals = (verdict["reason"] for verdict in result["forms"].values() if verdict["word"] == REFUSED)
    return ". ".join(dict.fromkeys(_shortened(reason) for reason in refusals))


def _shortened(reason: str) -> str:
    """Return the first words of a message, up to its fix, without paths, the rank and the name of the setting."""
    reason = re.sub(r"^rank \d+(, \w+)?[:,] |PenstockError: |^source: ", "", reason)
    first = re.split(r"[;.] |\. ", re.sub(r"/tmp/\S+?(?=[:/ ])(/config\.json)?:? ?", "", reason))[0]
    words = first.replace("|", "/").split()
    return " ".join(words[:MOST_WORDS]) + (" .." if len(words) > MOST_WORDS else "")  # the page ends it with a point


def page(text: str, results: dict[str, Result]) -> str:
    """Return the page with these results between its marks."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{table(results)}\n\n{END}{rest.partition(END)[2]}"


def names_of_page(text: str) -> list[str]:
    """Return the families that the page has rows of."""
    return re.findall(r"^\| `([^`]+)` \| `", text, re.MULTILINE)


def main() -> int:
    """Try the families that are named; return 1 if one is wrong."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="families; all by default")
    parser.add_argument("--write", action="store_true", help="write docs/families.md")
    parser.add_argument("--results", type=Path, help="the file of all results, in JSON")
    parser.add_argument("--processes", type=int, default=1, help="number of trials at a time (default: 1)")
    options = parser.parse_args()
    chosen = {family.name: family for family in families()}
    unknown = sorted(set(options.names) - chosen.keys())
    if unknown:
        parser.error(f"{', '.join(unknown)}: no such family; expected names such as {', '.join(list(chosen)[:3])}")
    if options.names and options.write:
        parser.error("--write needs the results of all families; leave the names out")
    results: dict[str, Result] = {}
    names = [name for name in chosen if not options.names or name in options.names]
    threads = ThreadPoolExecutor(options.processes)  # each waits for the process of one trial
    for name, result in zip(names, threads.map(tried, [chosen[name] for name in names]), strict=True):
        results[name] = result
        words = ", ".join(f"{form} {verdict['word']}" for form, verdict in result["forms"].items())
        print(f"{name}: {words} ({result['seconds']:.0f} s)", flush=True)
        reasons = dict.fromkeys(verdict["reason"] for verdict in result["forms"].values() if verdict["word"] == WRONG)
        print("".join(f"    {reason[:400]}\n" for reason in reasons), end="", flush=True)
        if options.results:
            options.results.write_text(json.dumps(results, indent=1), encoding="utf-8")
    if options.write:
        PAGE.write_text(page(PAGE.read_text(encoding="utf-8"), results), encoding="utf-8")
    counts = Counter(_summary(result) for result in results.values())
    print(", ".join(f"{number} {word}" for word, number in sorted(counts.items())))
    return 1 if counts[WRONG] else 0


if __name__ == "__main__":
    sys.exit(main())
