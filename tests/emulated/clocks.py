"""Vector clocks: what a stream, a mark or a host knows to have ended, as one number per stream.

A clock is a list of int. Entry i is the number of operations of the stream with index i that are known to have ended;
what lies behind the end of the list is 0. Streams are few, so lists of Python beat arrays of numpy.
"""


def merge(into, other):
    """Raise the entries of `into` to those of `other`; return whether one has changed."""
    has_changed = False
    for index, count in enumerate(other):
        if index == len(into):
            into.extend(other[index:])
            return True
        if into[index] < count:
            into[index] = count
            has_changed = True
    return has_changed


def knows(clock, index, count):
    """Whether operation number `count` of the stream `index` is known to have ended."""
    return count == 0 or (index < len(clock) and clock[index] >= count)
