"""Processes that are forks of a server, which has imported torch, penstock and what else takes long to import.

Torch's optimizers import torch._dynamo, which takes as long as torch itself.
"""

import multiprocessing

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


def forks():
    """Return the context whose processes are such forks; the server starts with the first of them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    return context
