"""Where an operation was launched, noted at the price of a walk over frames; the text is made for a report only."""

import concurrent
import multiprocessing
import sys
import threading
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MOST_FRAMES = 6
MOST_SKIPPED = 60
"""How far below torch's and the device's own frames the walk looks for one of the user's."""
OF_SCENARIOS = ("test_", "pipelines")
"""How the files of this folder begin that are the user's; the others are the device."""
LIBRARIES = (threading.__file__, *(f"{package.__path__[0]}/" for package in (torch, concurrent, multiprocessing)), "<")
"""How the names of files begin that are nobody's here; code that was made from a text has a name in brackets."""
_is_shown: dict[str, bool] = {}


class Stack:
    """Frames from the innermost one: code objects and instruction offsets, which become lines when they are printed."""

    __slots__ = ("frames", "node")

    def __init__(self, frames, node):
        self.frames = frames
        self.node = node
        """The name of the autograd node in whose backward this ran, where the thread has no frames of the user."""

    def __str__(self):
        lines = [f"{_short(code.co_filename)}:{_line(code, offset)} {code.co_name}" for code, offset in self.frames]
        if self.node:
            lines.append(f"backward of {self.node}")
        return " < ".join(lines) or "a thread without frames of Python"


def capture():
    """Note the caller's stack, without frames of torch, of the standard library's threads and of the device itself."""
    frames, frame, num_left = [], sys._getframe(1), MOST_SKIPPED
    while frame is not None and num_left and len(frames) < MOST_FRAMES:
        code = frame.f_code
        shown = _is_shown.get(code.co_filename)
        if shown is None:
            shown = _is_shown[code.co_filename] = _may_be_shown(code.co_filename)
        if shown:
            frames.append((code, frame.f_lasti))
        frame = frame.f_back
        num_left -= 1
    node = None if frames else torch._C._current_autograd_node()
    return Stack(frames, node and node.name())


def _may_be_shown(filename):
    path = Path(filename)
    if HERE in path.parents:
        return path.name.startswith(OF_SCENARIOS)
    return not filename.startswith(LIBRARIES)


def _short(filename):
    path = Path(filename)
    return str(path.relative_to(ROOT)) if ROOT in path.parents else "/".join(path.parts[-2:])


def _line(code, offset):
    for begin, end, line in code.co_lines():
        if begin <= offset < end:
            return line
    return code.co_firstlineno
