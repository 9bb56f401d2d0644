"""Run random cut models outside pytest: `python -m tests.random_cut_models --seeds 0..2000 --processes 1`."""

import argparse
import re
import sys
import time
import warnings
from collections import Counter

from tests.random_cut_models.running import judge, shrink


def main():
    parser = argparse.ArgumentParser(prog="python -m tests.random_cut_models", description=__doc__)
    parser.add_argument("--seeds", default="0..100", help="the first seed and the one behind the last: 0..100; or one")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--features", default="", help="names with commas, in place of those that a seed draws")
    parser.add_argument("--shrink", action="store_true", help="show a wrong case with the fewest features")
    parser.add_argument("--refusals", action="store_true", help="print each refusal too")
    options = parser.parse_args()
    begin, _, end = options.seeds.partition("..")
    seeds = range(int(begin), int(end) if end else int(begin) + 1)
    begin_s, verdicts = time.monotonic(), []

    def show(verdict):
        if options.shrink and verdict.outcome == "WRONG":
            verdict = shrink(verdict)
        verdicts.append(verdict)
        if verdict.outcome in ("WRONG", "IMPOSSIBLE") or (options.refusals and verdict.outcome == "REFUSED"):
            print(f"{verdict.outcome}: {verdict.command}\n{verdict.details}\n", flush=True)
        if len(verdicts) % 100 == 0:
            print(f"{len(verdicts)} cases in {time.monotonic() - begin_s:.0f} s: {counts(verdicts)}", flush=True)

    run_seeds(seeds, options, show)
    print(summary(verdicts))
    sys.exit(1 if any(verdict.outcome in ("WRONG", "IMPOSSIBLE") for verdict in verdicts) else 0)


def run_seeds(seeds, options, show):
    warnings.simplefilter("ignore")  # advice on few microbatches
    if options.features:
        for seed in seeds:
            show(judge(seed, options.features.split(",")))
        return
    from tests.random_cut_models.verdict import Verdict
    from tests.random_models.workers import run_cases  # a crash or a hang of a process is a verdict, too

    run_cases(seeds, options.processes, show, work=judge, verdict=Verdict)


def counts(verdicts):
    return ", ".join(f"{number} {outcome}" for outcome, number in Counter(v.outcome for v in verdicts).most_common())


def summary(verdicts):
    """Count the cases by how they ended, the wrong and refused ones by feature and by reason."""
    lines = [counts(verdicts)]
    for outcome in ("REFUSED", "IMPOSSIBLE", "WRONG"):
        cases = [verdict for verdict in verdicts if verdict.outcome == outcome]
        reasons = Counter(re.sub(r"[\d.]+(e-?\d+)?", "N", verdict.reason)[:160] for verdict in cases)
        lines += [f"{outcome} {number} times: {reason}" for reason, number in reasons.most_common(40)]
        lines += [f"{outcome} by feature: {by_feature(cases, verdicts)}"] if cases else []
        lines += [f"{outcome} seeds: {' '.join(str(verdict.seed) for verdict in cases)}"] if cases else []
    return "\n".join(lines)


def by_feature(cases, verdicts):
    """Say per feature how many of its cases are among these, and how many of them have no other feature."""
    total = Counter(name for verdict in verdicts for name in verdict.features)
    part = Counter(name for verdict in cases for name in verdict.features)
    alone = Counter(verdict.features[0] for verdict in cases if len(verdict.features) == 1)
    return ", ".join(f"{name} {number} of {total[name]} ({alone[name]} alone)" for name, number in part.most_common())


if __name__ == "__main__":
    main()
