"""Replicas whose ranks are threads, on the emulated device and on the CPU."""

import torch
from torch import nn

from penstock.checkpoints.loading import load_checkpoint
from penstock.checkpoints.writer import save_checkpoint
from penstock.errors import PipelineError
from penstock.execute.transport import TorchTransport
from penstock.execute.transport.places import Places
from penstock.execute.undocumented_backends import mesh_without_groups
from penstock.execute.values.tensors import local_part
from penstock.pipeline import Pipeline
from tests.emulated.pipelines import DEADLINE_S, RankGroup
from tests.emulated.rank_threads import store_of_scenario
from tests.support.local_pipelines import float_layers, square_loss, values
from tests.support.mesh_pipelines import local_mesh

MICROBATCHES, ROWS, WIDTH = 4, 8, 6
HARMFUL_CALL = 3
"""Of a layer, in a step of 4 microbatches."""


def places_of(rank, num_places, num_replicas, device, deadline_s=DEADLINE_S, *, one_stream=False):
    """Connect this rank's thread along both dimensions, as processes are connected."""
    names = local_mesh(pipeline=num_places, data=num_replicas)[0].names
    replica, place = divmod(rank, num_places)
    own = names.select(range(replica * num_places, (replica + 1) * num_places))
    across = names.select(range(place, num_places * num_replicas, num_places))
    pipeline = RankGroup(place, num_places, store_of_scenario(f"pipeline of {replica}"))
    data = RankGroup(replica, num_replicas, store_of_scenario(f"replicas of {place}"))
    options = {"deadline_s": deadline_s, "device": device, "one_stream": one_stream}
    along = TorchTransport(pipeline, names=own, coalesces=one_stream, **options)
    mesh = mesh_without_groups("data", num_replicas, replica, device.type)
    return Places(along, TorchTransport(data, names=across, has_sums=True, **options), names, mesh)


def layers(norm, dtype=torch.float32):
    found = float_layers(dtype, 4)
    return [nn.Sequential(layer, nn.BatchNorm1d(WIDTH, dtype=dtype)) for layer in found] if norm else found


def train(rank, num_ranks, num_replicas, device, **options):
    """Train with ranks that are threads."""
    one_stream = options.get("one_stream", False)
    mesh = places_of(rank, num_ranks // num_replicas, num_replicas, device, one_stream=one_stream)
    return train_on(mesh, num_replicas, device, is_bad=rank == num_ranks - 1, **options)


def train_on(
    mesh,
    num_replicas,
    device,
    *,
    is_bad,
    schedule="1f1b",
    fails=False,
    norm=False,
    folder=None,
    dtype=torch.float32,
    begins=None,
    **options,
):
    """Train three steps; return the losses, weights and buffers by name, and what failing steps said.

    With `fails`, one step in between fails where `is_bad`. With a `folder`, the weights are those that were saved there
    and loaded again. `begins(step, pipeline)` is called before each step.
    """
    own, options = layers(norm, dtype), options | {"frees_other_stages": False}
    with Pipeline(own, schedule, MICROBATCHES, square_loss, mesh=mesh, device=device, **options) as pipeline:
        optimizer = torch.optim.SGD(pipeline.parameters(), lr=0.1, momentum=0.5)
        rows = slice(ROWS * pipeline.replica, ROWS * (pipeline.replica + 1))
        inputs, target = (values(seed, ROWS * num_replicas, WIDTH)[rows].to(device, dtype) for seed in (1, 2))
        losses, errors = [], []
        for step in range(3):
            if begins is not None:
                begins(step, pipeline)
            if fails and step == 1:
                errors.append(failing_step(pipeline, inputs, target, is_bad=is_bad))
                optimizer.zero_grad()
            losses.append(pipeline.step(inputs, target=target).loss.item())
            optimizer.step()
            optimizer.zero_grad()
        if folder is not None:
            save_checkpoint(folder, pipeline, optimizer, step=3)
            with torch.no_grad():
                for parameter in pipeline.parameters():
                    local_part(parameter).zero_()
            load_checkpoint(folder, pipeline, optimizer)
        return losses, {name: local_part(value).cpu() for name, value in pipeline.state_dict().items()}, errors


def ended_by(mesh, num_replicas, device, harm, *, is_bad, deadline_s, **options):
    """How a training ends where a rank comes to harm amid its second step: the error, and whom it blames."""
    calls = []

    def harmful(module, arguments):
        calls.append(1)
        if len(calls) == HARMFUL_CALL:
            harm()

    def begins(step, pipeline):
        if step == 1 and is_bad:
            next(iter(pipeline.stages[-1].modules)).register_forward_pre_hook(harmful)

    try:
        train_on(mesh, num_replicas, device, is_bad=False, begins=begins, deadline_s=deadline_s, **options)
    except PipelineError as error:
        return str(error), error.rank
    return "", None


def failing_step(pipeline, inputs, target, *, is_bad):
    """Run a step in which the last layer of one rank fails; return what this rank raises."""
    handle = None
    if is_bad:
        handle = next(iter(pipeline.stages[-1].modules)).register_forward_pre_hook(_fail)
    try:
        pipeline.step(inputs, target=target)
    except Exception as error:
        return str(error)
    finally:
        if handle is not None:
            handle.remove()
    return ""


def _fail(module, arguments):
    raise ValueError("planted")
