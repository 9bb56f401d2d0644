"""Replaces one name of a running process, and gives it back."""

import threading
from collections import Counter
from contextlib import contextmanager
from importlib import import_module

_planting, _num_planted, _originals = threading.Lock(), Counter(), {}


@contextmanager
def replaced(place, make):
    """Have a name replaced in this process while any rank runs: ranks are threads, and the name is the same for all."""
    owner, attribute = _owner_of(place)
    with _planting:
        _num_planted[place] += 1
        if _num_planted[place] == 1:
            _originals[place] = getattr(owner, attribute)
            setattr(owner, attribute, make(getattr(owner, attribute)))
    try:
        yield
    finally:
        with _planting:
            _num_planted[place] -= 1
            if not _num_planted[place]:
                setattr(owner, attribute, _originals.pop(place))


def _owner_of(place):
    """Return the object that holds the name of a place `module:name.within`, and the name's last part."""
    module, _, path = place.partition(":")
    *outer, attribute = path.split(".")
    owner = import_module(module)
    for name in outer:
        owner = getattr(owner, name)
    return owner, attribute
