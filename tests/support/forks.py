"""Processes that are forks of a server, which has imported torch, penstock and what else takes long to import.

Torch's optimizers import torch._dynamo, which takes as long as torch itself.
"""

import multiprocessing
import os
import tempfile
from contextlib import contextmanager
from multiprocessing import forkserver

PRELOADED = [
    "numpy",
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "penstock.pipeline",
    "penstock.cli.entry",
    "penstock.cli.launch",
    "penstock.train.loop",
    "pytest",
    "hypothesis",
]


SHORT_FOLDER, LONGEST_FOLDER = "/tmp", 70
"""The server listens on a socket in the temporary folder. Its path has 107 bytes at most, of which Python makes 32."""


def forks():
    """Return the context whose processes are such forks; the server starts with the first call."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    with _short_temporary_folder():
        forkserver.ensure_running()
    return context


@contextmanager
def _short_temporary_folder():
    before = tempfile.gettempdir()
    tempfile.tempdir = before if len(os.fsencode(before)) <= LONGEST_FOLDER else SHORT_FOLDER
    try:
        yield
    finally:
        tempfile.tempdir = before
