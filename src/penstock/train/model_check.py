"""A run's cut model, compared with the unsplit one before the first step (`model.verify`), where one rank holds it."""

import os
from functools import partial

import torch
from torch import Tensor

from penstock.errors import ConfigError, PenstockError
from penstock.execute.accelerator import is_queued
from penstock.execute.batch.stream import Part
from penstock.execute.control.collectives import Control
from penstock.execute.control.long_work import work_together
from penstock.execute.transport.protocol import Transport
from penstock.execute.values.tree import map_leaves
from penstock.hugging_face.from_transformers import from_transformers
from penstock.hugging_face.source import with_values
from penstock.ir.units import format_bytes
from penstock.train.data.user_data import Dataset
from penstock.train.devices import device_of_rank
from penstock.train.folder.run_folder import RunFolder
from penstock.train.model_source import TRANSFORMERS, loss_of
from penstock.train.settings.config import RunConfig
from penstock.train.together import same_words
from penstock.verifying.report import VerifyReport
from penstock.verifying.verify import verify

AUTO = "auto"
LIMIT_S = 1800.0
"""Seconds that a comparison may take."""
ROOM = 6
"""Bytes that a comparison needs for each byte of parameters: both models, a copy, their gradients, and what is kept."""
MAX_ROWS, MAX_LENGTH = 2, 32
"""The part of the first batch that is compared: enough for two microbatches."""


def check_model_together(config: RunConfig, dataset: Dataset, folder: RunFolder, transport: Transport) -> str:
    """Let rank 0 compare the model, while all ranks wait for it and notice one that is lost; every rank calls it.

    Returns the line that says so, on rank 0. Raises: PenstockError, on every rank: as `check_model`; or it takes long.
    """
    check = partial(check_model, config, dataset, folder) if transport.rank == 0 else str
    stalled = PenstockError(f"the model is not verified after {LIMIT_S:g} s; set model.verify = false")
    control = Control(transport, limit_s=config.run.deadline_s)
    return work_together(control, check, limit_s=LIMIT_S, stalled=stalled, fails_as=same_words)


def check_model(config: RunConfig, dataset: Dataset, folder: RunFolder) -> str:
    """Compare the model of a run that begins, and return a line that says so, or why not; rank 0 alone calls it.

    Raises:
        PenstockError: the layers compute something else than the model, or refuse it.
    """
    setting = config.model.verify
    if setting is False or not config.model.transformers or folder.checkpoints.steps():
        return ""
    layers = from_transformers(config.model.transformers, dtype=config.model.torch_dtype)
    num_bytes = ROOM * sum(parameter.numel() * parameter.element_size() for parameter in layers.whole.parameters())
    available_bytes = _available_bytes(device_of_rank(config))
    if setting == AUTO and num_bytes > available_bytes:
        return (
            f"the model is not verified: that takes {format_bytes(num_bytes)} on one rank, and "
            f"{format_bytes(available_bytes)} are free; penstock verify compares a small model of its kind"
        )
    report = verify_run(config, dataset)
    report.raise_if_wrong()
    return f"verified: the layers compute what the whole model does, within {report.largest_error:.2g}"


def verify_run(config: RunConfig, dataset: Dataset) -> VerifyReport:
    """Compare the cut model of a run with the unsplit one, on a small part of its first batch.

    Raises:
        ConfigError: the run's model is not cut.
    """
    model, device = config.model, device_of_rank(config)
    if not model.transformers:
        kind = f"a list of layers, {model.source}" if model.source else "the decoder, a list of layers"
        raise ConfigError(
            f"the model is {kind}, and no unsplit model to compare with; name a model in model.transformers, or give "
            "FILE:FUNCTION, which returns a model, its points and batches",
            key=TRANSFORMERS,
        )
    layers = from_transformers(model.transformers, dtype=model.torch_dtype)
    whole = with_values(model.transformers, model.torch_dtype).to(device)
    batch = dataset.batch(0)
    args, keywords, target = map_leaves(lambda leaf: _part_of(leaf, device), (batch.args, batch.kwargs, batch.target))
    part = Part(*args, target=target, **keywords)
    return verify(whole, layers, part, loss=loss_of(config, dataset.vocabulary))


def _part_of(leaf: object, device: torch.device) -> object:
    if not isinstance(leaf, Tensor) or leaf.dim() == 0:
        return leaf
    rows = leaf[:MAX_ROWS]
    return (rows if leaf.dim() == 1 else rows[:, :MAX_LENGTH]).to(device)


def _available_bytes(device: torch.device) -> int:
    if is_queued(device):
        return int(torch.get_device_module(device).mem_get_info(device)[0])
    return int(os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
