"""How much work a call is, counted: unlike seconds, it is the same on an idle machine and on a busy one."""

import sys


def lines_run(call):
    """Return how many lines of Python run in the files of Penstock, those of every turn of a loop included."""
    num_lines = 0

    def trace(frame, event, _):
        nonlocal num_lines
        if "/penstock/" not in frame.f_code.co_filename:
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
