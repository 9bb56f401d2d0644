"""Run random models outside pytest: `python -m tests.random_models --cases 2000 --seed 1 --jobs 2`."""

import argparse
import random
import re
import sys
import time
from collections import Counter

from tests.random_models.workers import run_cases


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.random_models", description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=None, help="the first case's; the next ones count up from it")
    parser.add_argument("--jobs", type=int, default=2)
    options = parser.parse_args()
    seed = random.randrange(10**9) if options.seed is None else options.seed
    print(f"seed {seed}, {options.cases} cases")
    begin_s, tally, verdicts = time.monotonic(), Counter(), []

    def show(verdict):
        tally[verdict.outcome] += 1
        verdicts.append(verdict)
        if verdict.outcome == "wrong":
            print(f"wrong: {verdict.command}\n{verdict.reason}\n{verdict.details}\n", flush=True)
        if len(verdicts) % 50 == 0:
            print(f"{len(verdicts)} cases in {time.monotonic() - begin_s:.0f} s: {dict(tally)}", flush=True)

    run_cases(range(seed, seed + options.cases), options.jobs, show)
    print(summary(verdicts))
    sys.exit(1 if tally["wrong"] else 0)


def summary(verdicts):
    """Count the cases by how they ended, and those that did not run by their reason."""
    lines = [", ".join(f"{number} {outcome}" for outcome, number in Counter(v.outcome for v in verdicts).items())]
    for outcome in ("refused", "impossible", "wrong"):
        own = [verdict for verdict in verdicts if verdict.outcome == outcome]
        reasons = Counter(re.sub(r"\d+", "N", verdict.reason)[:200] for verdict in own)
        lines += [f"{outcome} {number} times: {reason}" for reason, number in reasons.most_common()]
        lines += [f"  {outcome} seeds: {', '.join(str(verdict.seed) for verdict in own)}"] if own else []
    return "\n".join(lines)


if __name__ == "__main__":
    main()
