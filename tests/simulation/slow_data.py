"""Steps whose ranks wait for streamed data now and then: the second simulator, told to wait before computations."""

from dataclasses import replace
from heapq import heappush

import numpy as np

from penstock.ir.timeline import DataWait
from penstock.simulation import simulate
from tests.simulation.events import Events


class SlowDataEvents(Events):
    """Once a rank is about to run a row that data are slow for, it waits for them, whatever else it waits for."""

    def __init__(self, program, costs, slow):
        super().__init__(program, costs)
        self.slow, self.waits = dict(slow), []

    def starts_something(self, rank, now):
        waiting = self.waiting[rank]
        if waiting and self.free_s[rank] <= now and waiting[0] in self.slow:
            self.free_s[rank] = now + self.slow.pop(waiting[0])
            self.waits.append(DataWait(rank, int(self.program.microbatch[waiting[0]]), now, self.free_s[rank]))
            heappush(self.moments, self.free_s[rank])
            return True
        return super().starts_something(rank, now)


def with_slow_data(program, costs, slow, events=SlowDataEvents):
    """The step of a program; `slow` gives the seconds that data take before some of its rows."""
    played = events(program, costs, slow)
    start_s, end_s = played.times()
    waits = sorted(played.waits, key=lambda wait: (wait.rank, wait.begin_s))
    predicted = simulate(program, costs)
    return replace(predicted, start_s=np.array(start_s), end_s=np.array(end_s), data_waits=tuple(waits))


def slow_rows(program, seed, share=0.3):
    """Some computations, not the later halves of pairs, with quarters of seconds."""
    chance = np.random.default_rng(seed)
    is_second = np.append(False, program.joined[:-1])
    rows = np.flatnonzero(program.is_compute & ~is_second & (chance.random(program.num_instructions) < share))
    return {row: float(chance.integers(0, 12)) / 4 for row in rows.tolist()}
