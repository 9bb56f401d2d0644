"""Replicas of pipelines whose ranks are threads, and the one process that runs the microbatches of all of them."""

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from penstock import PreSplit
from penstock.execute.replicas.mesh import MeshRanks
from penstock.execute.transport import LocalTransport
from penstock.execute.transport.places import DATA, Places
from penstock.execute.undocumented_backends import mesh_without_groups
from penstock.execute.values.tensors import is_dtensor, local_part
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import (
    MAX_WAIT_S,
    WIDTH,
    float_layers,
    is_same,
    named,
    on_threads,
    square_loss,
    values,
)
from tests.support.reference import even_sizes, reference_step

FLOAT = torch.float64
MICROBATCHES = 4
"""Of a replica."""
TOLERANCE = 1e-12


def local_mesh(*, pipeline=1, data=1, deadline_s=60.0, connect=LocalTransport.create):
    """Connect ranks that are threads of this process, one replica after another: each passes its own as `mesh`.

    Each rank passes layers of its own.
    """
    ranks = MeshRanks([[replica * pipeline + place for place in range(pipeline)] for replica in range(data)])
    names = ranks.names()

    def transports(indices):
        return connect(len(indices), deadline_s, names=names.select(indices))

    pipelines = [transports(range(replica * pipeline, (replica + 1) * pipeline)) for replica in range(data)]
    along_data = [transports(range(place, data * pipeline, pipeline)) for place in range(pipeline)]
    meshes = [mesh_without_groups(DATA, data, replica) for replica in range(data)]
    return [
        Places(pipelines[replica][place], along_data[place][replica] if data > 1 else None, names, meshes[replica])
        for replica in range(data)
        for place in range(pipeline)
    ]


def on_mesh(pipeline, data, case, *args, deadline_s=MAX_WAIT_S, connect=LocalTransport.create):
    """Return what `case(places, *args)` returned on every rank, one replica after another; or raise its error."""
    mesh = local_mesh(pipeline=pipeline, data=data, deadline_s=deadline_s, connect=connect)
    return on_threads(mesh, case, *args)


@dataclass
class Job:
    """A model, and per replica the rows of its batch."""

    rows: list
    make_layers: Any = lambda: float_layers(FLOAT, 8)
    inputs: Any = lambda rows: values(1, rows, WIDTH, dtype=FLOAT)
    targets: Any = lambda rows: values(2, rows, WIDTH, dtype=FLOAT)
    loss: Any = square_loss
    options: dict = field(default_factory=dict)
    """Of the pipeline."""
    known: dict = field(default_factory=dict)
    """Of the one process."""

    @property
    def all_inputs(self):
        return self.inputs(sum(self.rows))

    @property
    def all_targets(self):
        return self.targets(sum(self.rows))

    def of(self, replica):
        """The inputs and the target of a replica: its rows of the whole batch."""
        begin = sum(self.rows[:replica])
        rows = slice(begin, begin + self.rows[replica])
        return self.all_inputs[rows], self.all_targets[rows]

    def microbatches(self):
        """Those of all replicas, one replica after another."""
        pairs = [self.of(replica) for replica in range(len(self.rows))]
        cut = [
            [part for tensor in column for part in tensor.split(even_sizes(len(tensor), MICROBATCHES))]
            for column in zip(*pairs, strict=True)
        ]
        return PreSplit(cut[0]), PreSplit(cut[1])


@dataclass
class Trained:
    """What one rank came to."""

    losses: list
    totals: list
    norms: list
    weights: dict
    gradients: dict
    result: Any = None


def device_mesh(pipeline, data, names=("data", "pipeline")):
    """The mesh of this process, with its dimensions in this order; one of size 1 may be left out."""
    sizes = {"pipeline": pipeline, "data": data}
    return init_device_mesh("cpu", tuple(sizes[name] for name in names), mesh_dim_names=names)


def pipeline_of(places, job, schedule, **options):
    return Pipeline(job.make_layers(), schedule, MICROBATCHES, job.loss, mesh=places, **(job.options | options))


def on_pipelines(job, schedule, body, *, pipeline=2, max_wait_s=MAX_WAIT_S, **options):
    """Return what `body(own, inputs, target)` returned on every rank, each with its replica's rows of the job."""

    def case(places):
        with pipeline_of(places, job, schedule, **options) as own:
            return body(own, *job.of(own.replica))

    return on_mesh(pipeline, len(job.rows), case, deadline_s=max_wait_s)


def gradients_after(job, schedule, body, **options):
    """The whole gradients, by name, of a job's pipelines on which `body` has run."""
    return whole(on_pipelines(job, schedule, rows_after(body), **options), len(job.rows))


def rows_after(body):
    """A body that returns what a rank has of the gradients when `body` has run."""
    return lambda own, *batch: (body(own, *batch), Rows(own))[1]


def one_step(own, inputs, target):
    own.step(inputs, target=target)


def two_steps(own, inputs, target):
    own.step(inputs, target=target)
    own.step(inputs, target=target)


def index_of(own):
    """The rank of the mesh on which a pipeline runs."""
    return own.replica * own.schedule.placement.num_ranks + own.rank


def layers_of(own):
    """The layers of this rank, in order."""
    return [layer for stage in own.stages for layer in stage.layers.values()]


def train(places, job, schedule, steps=1, optimizer=None, **options):
    """Run some steps of a job on this rank; with an optimizer, gradients are clipped and zeroed in each."""
    with pipeline_of(places, job, schedule, **options) as pipeline:
        inputs, target = job.of(pipeline.replica)
        own = list(pipeline.parameters())
        stepped = optimizer(own) if optimizer is not None and own else None
        found = Trained([], [], [], {}, {})
        for _ in range(steps):
            result = pipeline.step(inputs, target=target)
            found.losses.append(result.loss)
            found.totals.append(result.total)
            if optimizer is not None:
                found.norms.append(pipeline.clip_grad_norm_(1.0).item())
            if stepped is not None:
                stepped.step()
                stepped.zero_grad()
        found.result = result
        attribute = "main_grad" if pipeline.options.main_gradients else "grad"
        found.weights = {name: rows_of(each) for name, each in pipeline.named_parameters()}
        found.gradients = {name: rows_of(getattr(each, attribute)) for name, each in pipeline.named_parameters()}
    return found


def rows_of(tensor):
    """A copy of what this rank has of a tensor; `ShardRows` of a DTensor."""
    if not is_dtensor(tensor):
        return None if tensor is None else tensor.detach().clone()
    return ShardRows(local_part(tensor).clone(), is_whole=tensor.placements[0].is_replicate())


@dataclass
class ShardRows:
    """What one replica has of a tensor."""

    rows: Any
    is_whole: bool


class Rows:
    """What a rank has of its gradients, for `put_together`."""

    def __init__(self, own, attribute="grad"):
        self.gradients = {name: rows_of(getattr(each, attribute)) for name, each in own.named_parameters()}
        self.weights = {name: rows_of(each) for name, each in own.named_parameters()}


def put_together(ranks, num_replicas):
    """Replace rows by the whole tensors, on all ranks."""
    num_places = len(ranks) // num_replicas
    for place in range(num_places):
        replicas = ranks[place::num_places]
        for kind in ("weights", "gradients"):
            for name in getattr(replicas[0], kind):
                parts = [getattr(each, kind)[name] for each in replicas]
                if isinstance(parts[0], ShardRows):
                    rows = [part.rows for part in parts]
                    wholes = rows if parts[0].is_whole else [torch.cat(rows)] * num_replicas
                    for each, whole in zip(replicas, wholes, strict=True):
                        getattr(each, kind)[name] = whole
    return ranks


def whole(ranks, data, kind="gradients"):
    """The whole tensors of all ranks, by name; they must be equal wherever they are twice."""
    found = {}
    for own in put_together(ranks, data):
        for name, value in getattr(own, kind).items():
            if name in found:
                assert (value is None) == (found[name] is None)
                assert value is None or torch.equal(value, found[name])
            found[name] = value
    return found


def assert_near(found, expected, tolerance=TOLERANCE):
    """Compare tensors by name; a name that is not expected is tied to that of layer 0."""
    for name, value in found.items():
        known = expected[name if name in expected else "0." + name.partition(".")[2]]
        if known is None or value is None:
            assert value is known, name
        else:
            torch.testing.assert_close(value, known, rtol=tolerance, atol=tolerance, msg=name)


def gradients_of_steps(job, factors):
    """The gradients of steps of one process, whose inputs are the job's times a factor each."""
    layers = job.make_layers()
    for factor in factors:
        job.loss(nn.Sequential(*layers)(job.all_inputs * factor), job.all_targets).backward()
    return {name: each.grad for name, each in named(layers)}


def train_alone(job, steps=1, optimizer=None, seed=None):
    """Do the same in one process."""
    layers = job.make_layers()
    own = [each for layer in layers for each in layer.parameters()]
    own = list(dict.fromkeys(own))
    stepped = None if optimizer is None else optimizer(own)
    found = Trained([], [], [], {}, {})
    inputs, target = job.microbatches()
    for number in range(steps):
        result = reference_step(
            layers,
            (inputs,),
            {},
            target,
            loss=job.loss,
            num_microbatches=len(inputs.parts),
            seed=seed,
            step_number=number,
            **job.known,
        )
        found.losses.append(result.loss)
        found.totals.append(result.total)
        if stepped is not None:
            found.norms.append(torch.nn.utils.clip_grad_norm_(own, 1.0).item())
            stepped.step()
            stepped.zero_grad()
    found.result = result
    found.weights = {name: each.detach().clone() for name, each in named(layers)}
    found.gradients = {name: None if each.grad is None else each.grad.clone() for name, each in named(layers)}
    return found


def difference(ranks, alone, *, num_replicas, tolerance=TOLERANCE):
    """Say how the ranks differ from the one process, and replicas from each other; empty where they do not."""
    found = []
    places = len(ranks) // num_replicas
    put_together(ranks, num_replicas)
    for rank, own in enumerate(ranks):
        first = ranks[rank % places]
        if [_bits(each) for each in own.losses] != [_bits(each) for each in ranks[0].losses]:
            found.append(f"losses of rank {rank} have other bits than those of rank 0")
        for name in ("losses", "totals", "norms"):
            pairs = zip(getattr(own, name), getattr(alone, name), strict=True)
            if not all(_near(*pair, tolerance) for pair in pairs):
                found.append(f"{name} of rank {rank}: {getattr(own, name)} and alone {getattr(alone, name)}")
        for kind in ("weights", "gradients"):
            theirs, others, expected = getattr(own, kind), getattr(first, kind), getattr(alone, kind)
            found += [
                f"{kind} {name} of rank {rank} has other bits"
                for name in theirs
                if not is_same(theirs[name], others[name])
            ]
            found += [
                f"{kind} {name} of rank {rank}" for name in theirs if not _near(theirs[name], expected[name], tolerance)
            ]
    names = {name for own in ranks for name in own.weights}
    if names != set(alone.weights):
        found.append(f"names {sorted(names ^ set(alone.weights))}")
    return found


def _bits(value):
    return value.double().item().hex()


def _near(one, other, tolerance):
    if one is None or other is None:
        return one is other
    one, other = torch.as_tensor(one, dtype=FLOAT), torch.as_tensor(other, dtype=FLOAT)
    return one.shape == other.shape and torch.allclose(one, other, rtol=tolerance, atol=tolerance, equal_nan=True)
