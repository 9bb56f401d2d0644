"""How much work a call is, counted: unlike seconds, it is the same on an idle machine and on a busy one."""

import sys
from importlib.util import find_spec

PACKAGE_PREFIX = find_spec("penstock").submodule_search_locations[0] + "/"
"""What paths of the package's files begin with. Any folder above may be called penstock too, as a clone's is."""


def lines_run(call):
    """Return how many lines of Python run in the files of Penstock, those of every turn of a loop included."""
    num_lines = 0

    def trace(frame, event, _):
        nonlocal num_lines
        if not frame.f_code.co_filename.startswith(PACKAGE_PREFIX):
            return None
        num_lines += event == "line"
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return num_lines
