"""The bytes that optimizers and exchanges between replicas move, and the seconds that rings take for them."""


def ring_s(num_bytes: float, members: int, bytes_per_s: float, latency_s: float = 0.0) -> float:
    """Return the seconds in which each of the members of a ring gets the parts of the others; one alone needs none.

    This is a gather of `num_bytes` that the members share out, or a reduction whose sums stay where they are shared
    out; a reduction that gives each member all sums is one after the other. Each member sends (members - 1) / members
    of the bytes.
    """
    if members == 1:
        return 0.0
    return latency_s + num_bytes * (members - 1) / members / bytes_per_s


def adam_moved_bytes(
    parameter_bytes: float, gradient_bytes: float, state_bytes: float, *, has_master_copy: bool
) -> float:
    """Return the bytes that a fused Adam moves: gradients are read, its state is read and written, so are parameters.

    Beside a master copy, which is part of the state, parameters are written only.
    """
    times = 1 if has_master_copy else 2
    return gradient_bytes + times * parameter_bytes + 2 * state_bytes
