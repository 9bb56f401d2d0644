"""Files of weights that tests look at: their names and tensors, which thread wrote them, and a rename that fails."""

import os
import threading

from safetensors.torch import load_file

from penstock.checkpoints import weight_files
from penstock.checkpoints.shards import write_tensors


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def all_tensors(folder):
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def note_writers(monkeypatch):
    """Return a table that will hold the names of the tensors that each thread writes."""
    written = {}

    def note(path, tensors):
        written.setdefault(threading.current_thread(), set()).update(tensors)
        write_tensors(path, tensors)

    monkeypatch.setattr(weight_files, "write_tensors", note)
    return written


def fill_disk_at_rename(monkeypatch, number):
    """Let one rename of a file of weights, counted from 1, find no space left."""
    replace, left = os.replace, [number]

    def crash(source, target):
        left[0] -= 1
        if not left[0]:
            raise OSError(28, "No space left on device", str(target))
        replace(source, target)

    monkeypatch.setattr(weight_files.os, "replace", crash)
