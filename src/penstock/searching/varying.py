"""Variation of settings: what a list schedule may do on single ranks is changed at random, and kept if not worse.

A setting decides for all microbatches at once, so one change can do what takes a move of every microbatch.
"""

from dataclasses import replace

import numpy as np

from penstock.searching.candidates import Candidate
from penstock.searching.listing import Setting, list_schedule
from penstock.searching.settings import WAITS

MOST_CHANGES = 3
"""The most choices of a setting that change at once."""
LARGEST_STEP = 2
"""The most by which a number of microbatches under way changes."""


class Variation:
    """Varies the settings of some list schedules of one problem, in turns."""

    def __init__(self, candidates: list[Candidate], seed: int, *, by_span: bool) -> None:
        self.pool, self._by_span = list(candidates), by_span
        self._random = np.random.default_rng(seed)
        self._turn = 0

    def step(self) -> Candidate | None:
        """Change the setting of one candidate; return what it comes to if that is shorter."""
        index = self._turn % len(self.pool)
        self._turn += 1
        start = self.pool[index]
        assert start.setting is not None
        setting = self._varied(start.setting, start)
        sequence = list_schedule(start.problem, setting)
        if sequence is None:
            return None
        varied = Candidate.of(start.problem, sequence, "list", by_span=self._by_span, setting=setting)
        if varied.objective_s > start.objective_s:
            return None
        self.pool[index] = varied
        return varied if varied.objective_s < start.objective_s else None

    def _varied(self, setting: Setting, start: Candidate) -> Setting:
        draw, num_ranks = self._random.integers, start.problem.num_ranks
        most, waits = setting.most_under_way.copy(), setting.waits_for_share.copy()
        inputs, depths = setting.prefers_inputs.copy(), setting.deep_first.copy()
        has_depth = len(most) > num_ranks
        for _ in range(int(draw(1, MOST_CHANGES + 1))):
            choice, rank = int(draw(3 + has_depth)), int(draw(num_ranks))
            if choice == 0:
                stage = int(draw(len(most)))
                step = int(draw(-LARGEST_STEP, LARGEST_STEP + 1))
                is_free = most[stage] >= start.problem.num_microbatches
                most[stage] = draw(1, 2 * num_ranks + 1) if is_free else max(most[stage] + step, 1)
            elif choice == 1:
                waits[rank] = self._random.choice(WAITS)
            elif choice == 2:
                inputs[rank] = not inputs[rank]
            else:
                depths[rank] = not depths[rank]
        return replace(setting, most_under_way=most, waits_for_share=waits, prefers_inputs=inputs, deep_first=depths)
