"""The least makespan or span of all orders of a small problem, by trying each in plain Python."""

import math

NONE = -1


def optimum(problem, *, by_span=False):
    """Return the least seconds of all orders that fit, infinite where none does.

    Each order is tried once: actions are put one behind the other in the order of their starts. An order is given up
    where what is left for one of its ranks makes it no better than the best so far.
    """
    return _Tries(problem, by_span).run()


class _Tries:
    def __init__(self, problem, by_span):
        self.by_span, self.best = by_span, math.inf
        columns = ("rank", "seconds", "source", "activation_source", "lag_s", "link", "wire_s", "limit")
        for name in (*columns, "taken_bytes", "freed_bytes"):
            setattr(self, name, getattr(problem, name).tolist())
        self.launch_s = problem.launch_s
        ranks, count = range(problem.num_ranks), problem.num_actions
        self.free, self.first = [0.0 for _ in ranks], [math.inf for _ in ranks]
        self.left = [sum(s for s, own in zip(self.seconds, self.rank, strict=True) if own == rank) for rank in ranks]
        self.held, self.link_free = [0 for _ in ranks], {}
        self.end, self.arrival = [math.inf] * count, [math.inf] * count
        self.todo = set(range(count))

    def run(self):
        self._go_on((0.0, 0))
        return self.best - self.launch_s

    def _go_on(self, last):
        if not self.todo:
            self.best = min(self.best, self._least())
            return
        if self._least() >= self.best:
            return
        for at, action in sorted(self._next(last)):
            self._try(action, at)

    def _least(self):
        """The least time of the ranks, with what they have run."""
        begins = self.first if self.by_span else [0.0] * len(self.first)
        ends = [free + left for free, left in zip(self.free, self.left, strict=True)]
        return max(end - min(begin, free) for end, begin, free in zip(ends, begins, self.free, strict=True))

    def _next(self, last):
        for action in self.todo:
            rank, source = self.rank[action], self.source[action]
            if any(each != NONE and each in self.todo for each in (source, self.activation_source[action])):
                continue
            if self.held[rank] + self.taken_bytes[action] > self.limit[rank]:
                continue
            at = self.free[rank]
            if source != NONE and self.rank[source] != rank:
                at = max(at, self.arrival[source] + self.lag_s[action])
            if (at, rank) >= last:
                yield at, action

    def _try(self, action, at):
        rank, link = self.rank[action], self.link[action]
        saved = self.free[rank], self.first[rank], self.held[rank], self.link_free.get(link, 0.0), self.left[rank]
        end = at + self.seconds[action]
        self.todo.remove(action)
        self.first[rank] = min(self.first[rank], at)
        self.free[rank] = self.end[action] = self.arrival[action] = end
        self.left[rank] -= self.seconds[action]
        self.held[rank] += self.taken_bytes[action] - self.freed_bytes[action]
        if link != NONE:
            self.arrival[action] = self.link_free[link] = max(saved[3], end) + self.wire_s[action]
        self._go_on((at, rank))
        self.todo.add(action)
        self.free[rank], self.first[rank], self.held[rank], self.link_free[link], self.left[rank] = saved
