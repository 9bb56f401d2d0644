"""Short groups: how interleaving stays free of deadlocks with groups below p/2 (PipeOffload, arXiv 2503.01328).

A microbatch is back on rank 0 after p/2 turns at the earliest. A group with fewer microbatches comes to its next stage
when so many turns have passed, at the first visit that the other groups leave free. One microbatch per group, two
stages per rank, a and b, and a gap of two turns:

    turn      0  1  2  3  4  5  6  7
    forward  a0  . a1 b0 a2 b1  . b2
"""


def first_visits(num_local_stages: int, rounds: int) -> list[int]:
    """Return when a group comes to each stage, counted in groups: `rounds` later each time, or when a visit is free.

    A new group begins every `num_local_stages` visits, so visits that differ by a multiple of it are the same.
    """
    visits = [0]
    for _ in range(num_local_stages - 1):
        visit = visits[-1] + rounds
        while visit % num_local_stages in {earlier_visit % num_local_stages for earlier_visit in visits}:
            visit += 1
        visits.append(visit)
    return visits
