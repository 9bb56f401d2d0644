"""A cut model against the model itself, which accumulates the microbatches in one process: right, refused or wrong.

Used by tests/random_cut_models and by the tests of `ps.cut` that name what a forward does around its blocks.
"""

import copy
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, is_dataclass, replace
from typing import Any

import torch

import penstock as ps
from penstock.errors import DeadlineExceeded, PeerLost, PenstockError
from tests.support.draws import RecordedDraws
from tests.support.local_pipelines import on_ranks, square_loss

TOLERANCE = 1e-12
"""Relative to the largest element of all tensors that are compared together."""
RATE = 0.05
DEADLINE_S = 20.0


@dataclass(frozen=True)
class Call:
    """One call of a pipeline: a batch by name, its target, and a change that the model's owner makes before it."""

    keywords: dict
    target: Any
    is_training: bool = True
    change: Callable | None = None

    def microbatches(self, number):
        """Cut the tensors of the batch into equal rows; every other value goes to each microbatch whole."""
        parts = [{name: value for name, value in self.keywords.items() if not is_tensor(value)} for _ in range(number)]
        for name, value in self.keywords.items():
            for part, rows in zip(parts, value.chunk(number) if is_tensor(value) else (), strict=False):
                part[name] = rows
        return list(zip(parts, self.target.chunk(number), strict=True))


def cut_pipeline(model, course, transport):
    """A pipeline of the parts of a model; without a transport, of processes."""
    parts = ps.cut(model, list(course.points))
    options = course.options if transport is None else {**course.options, "transport": transport}
    return ps.Pipeline(parts, course.schedule, course.num_microbatches, course.loss, **options)


@dataclass(frozen=True)
class Course:
    """A model, where it is cut, and the calls that a pipeline makes with it; every rank gets a copy of the model."""

    model: torch.nn.Module
    calls: list
    points: tuple = ("blocks.*",)
    loss: Callable = square_loss
    num_ranks: int = 1
    num_microbatches: int = 2
    schedule: str = "1f1b"
    draws: RecordedDraws = field(default_factory=RecordedDraws)
    """Draws that the model makes through `drawn`: the unsplit model repeats those of the pipeline."""
    options: dict = field(default_factory=dict)
    """Further keywords of the pipeline."""
    make_pipeline: Callable = cut_pipeline


@dataclass
class Trace:
    """The values of one call on one rank, or in one process."""

    losses: list = field(default_factory=list)
    outputs: Any = None
    gradients: dict = field(default_factory=dict)
    buffers: dict = field(default_factory=dict)


@dataclass(frozen=True)
class Outcome:
    """RIGHT, REFUSED by Penstock with a name of the model, or WRONG."""

    kind: str
    text: str = ""
    """The message of a refusal, or the first difference."""
    call: int = -1
    """The index of the call that was refused or wrong; -1 while the pipeline was made."""
    has_zeros_for_none: bool = False
    """Whether a gradient was zeros where one process has none (docs/numerics.md)."""


def is_tensor(value):
    return isinstance(value, torch.Tensor)


def leaves(value, path=""):
    """Yield the path and the value of every leaf of nested outputs."""
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        for key in value:
            yield from leaves(value[key], f"{path}.{key}")
    elif isinstance(value, (tuple, list)):
        for index, element in enumerate(value):
            yield from leaves(element, f"{path}.{index}")
    else:
        yield path, value


# ---- the two sides


def plain_call(model, course, call, losses=()):
    """Accumulate the microbatches of a call in one process; draws are those that lead to `losses`, a pipeline's."""
    model.train(call.is_training)
    if call.change:
        call.change(model)
    trace, outputs = Trace(), []
    with torch.set_grad_enabled(call.is_training):
        for number, (keywords, target) in enumerate(call.microbatches(course.num_microbatches)):
            choice = choice_of_draws(model, course, (keywords, target), losses[number]) if len(losses) else ()
            with course.draws.repeating(choice):
                output = model(**keywords)
            loss = course.loss(output, target)
            if call.is_training:
                (loss / course.num_microbatches).backward()
            trace.losses.append(loss.detach())
            outputs.append(dict(leaves(output)))
    trace.outputs = {
        path: torch.cat([torch.atleast_1d(output[path].detach()) for output in outputs])
        for path in outputs[0]
        if is_tensor(outputs[0][path]) and outputs[0][path].dim() > 0
    }
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trace.gradients = {name: p.grad for name, p in parameters.items()}
    trace.buffers = {name: t.clone() for name, t in model.state_dict().items() if name not in parameters}
    update(model.parameters())
    return trace


def choice_of_draws(model, course, microbatch, loss):
    """Return which of the draws that ranks recorded for a microbatch lead to the pipeline's loss."""
    for choice in course.draws.choices():
        keywords, target = microbatch
        with course.draws.repeating(choice):
            is_right = torch.allclose(course.loss(copy_of(model)(**keywords), target), loss, rtol=1e-11, atol=1e-12)
        if is_right:
            return choice
    return ()


def copy_of(model):
    """Return a copy of a model, which may keep values of its last forward."""
    values = [value for module in model.modules() for value in vars(module).values() if is_tensor(value)]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in values})


def pipeline_call(pipeline, model, course, call):
    """Run the same call on one rank; `model` is what its owner holds."""
    if call.change:
        call.change(model)
    run = pipeline.step if call.is_training else pipeline.evaluate
    result = run(target=call.target, return_outputs=True, **call.keywords)
    trace = Trace(list(result.losses))
    if result.outputs is not None:
        trace.outputs = {path: t.detach() for path, t in leaves(result.outputs) if is_tensor(t) and t.dim() > 0}
    trace.gradients = {name: p.grad for name, p in pipeline.named_parameters()}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    trace.buffers = {name: t.clone() for name, t in pipeline.state_dict().items() if name not in parameters}
    update(dict.fromkeys(pipeline.parameters()))
    return trace


@torch.no_grad()
def update(parameters):
    """Move parameters along their gradients, so that a copy which is not trained is seen in the next call."""
    for parameter in parameters:
        if parameter.grad is not None:
            parameter -= RATE * parameter.grad
            parameter.grad = None


def run_rank(transport, course):
    """Return the traces of the calls of one rank, and the error that ended them."""
    model, traces = copy.deepcopy(course.model), []
    try:
        pipeline = course.make_pipeline(model, course, transport)
        for call in course.calls:
            traces.append(pipeline_call(pipeline, model, course, call))
        pipeline.close()
    except Exception as error:
        if transport is not None:
            transport.abort()  # the other ranks must not wait for this one
        return traces, error
    return traces, None


# ---- the outcome


def outcome_of(course):
    """Run a course on threads and in one process, and say how it ended."""
    with course.draws.recording():
        ranks = on_ranks(course.num_ranks, run_rank, course, deadline_s=DEADLINE_S)
    outcome = difference(course, [traces for traces, _ in ranks])
    errors = [error for _, error in ranks if error is not None]
    if outcome.kind == "WRONG" or not errors:
        return outcome
    return replace(refusal(course.model, errors), call=min(len(traces) for traces, _ in ranks))


def difference(course, ranks):
    """Compare the calls that all ranks ended with those of one process, whose draws are the pipeline's."""
    num_calls, model, has_zeros = min(map(len, ranks)), copy.deepcopy(course.model), False
    for index, call in enumerate(course.calls[:num_calls]):
        wanted = plain_call(model, course, call, ranks[0][index].losses)
        traces = [own[index] for own in ranks]
        problems = problems_of(traces, wanted) + missing_parameters(traces, model)
        if problems:
            return Outcome("WRONG", "; ".join(problems[:3]), index)
        without = [name for name, gradient in wanted.gradients.items() if gradient is None]
        has_zeros |= any(trace.gradients.get(name) is not None for trace in traces for name in without)
    return Outcome("RIGHT", has_zeros_for_none=has_zeros)


def problems_of(traces, wanted):
    """List the values of any rank that are not those of one process."""
    found = []
    for rank, trace in enumerate(traces):
        losses, wanted_losses = ({str(i): t for i, t in enumerate(side.losses)} for side in (trace, wanted))
        found += of_kind("loss", losses, wanted_losses, rank)
        if trace.outputs is not None:
            found += of_kind("output", trace.outputs, wanted.outputs, rank)
        found += of_kind("gradient of", trace.gradients, wanted.gradients, rank)
        found += of_kind("buffer", trace.buffers, wanted.buffers, rank)
    if all(trace.outputs is None for trace in traces):
        found.append("no rank has outputs")
    return found


def missing_parameters(traces, model):
    """Name the parameters that no rank lists under any of their names."""
    listed = {name for trace in traces for name in trace.gradients}
    names = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), set()).add(name)
    return [f"no rank has the parameter {sorted(group)}" for group in names.values() if not group & listed]


def of_kind(kind, tensors, wanted, rank):
    scale = max([float(t.abs().max()) for t in wanted.values() if t is not None and t.numel()], default=0.0) or 1.0
    if kind in ("loss", "output") and tensors.keys() != wanted.keys():
        return [f"{kind}: {sorted(tensors)} on rank {rank}, expected {sorted(wanted)}"]
    unknown = [
        f"{kind} {name} on rank {rank}, which one process has not" for name in sorted(tensors.keys() - wanted.keys())
    ]
    return unknown + [
        f"{kind} {name} on rank {rank}: {problem}"
        for name in sorted(tensors.keys() & wanted.keys())
        if (problem := unequal(tensors[name], wanted[name], scale))
    ]


def unequal(tensor, wanted, scale):
    """Say how two tensors differ; zeros may stand for no gradient."""
    if tensor is None or wanted is None:
        given = wanted if tensor is None else tensor
        is_same = given is None or not given.any()
        return "" if is_same else ("none" if tensor is None else "there") + f", of {float(given.abs().max()):.2g}"
    if tensor.shape != wanted.shape:
        return f"{tuple(tensor.shape)}, expected {tuple(wanted.shape)}"
    if not tensor.is_floating_point():
        return "" if torch.equal(tensor, wanted) else f"{tensor.tolist()}, expected {wanted.tolist()}"
    distance = float((tensor.double() - wanted.double()).abs().max()) if tensor.numel() else 0.0
    return "" if distance <= TOLERANCE * scale else f"off by {distance:.2g} of {scale:.2g}"


def names_of(model):
    """Names of modules, attributes and arguments of a model, one of which a refusal must hold."""
    names = {name for name, _ in model.named_modules()} | {type(m).__name__ for m in model.modules()}
    names |= {name for module in model.modules() for name in vars(module)}
    names |= {name.rpartition(".")[2] for name in model.state_dict()} | {n for n, _ in model.named_buffers()}
    names |= set(model.forward.__code__.co_varnames)
    return {name for name in names if len(name) > 1 and name not in ("training", "self")}


def refusal(model, errors):
    """Say whether errors of ranks are a refusal by name."""
    for error in errors:
        if not isinstance(error, PenstockError):
            return Outcome("WRONG", f"raw {type(error).__name__}: {error}")
    blamed = sorted(errors, key=lambda error: isinstance(error, (PeerLost, DeadlineExceeded)))[0]
    text = f"{type(blamed).__name__}: {blamed}"
    if isinstance(blamed, DeadlineExceeded):
        return Outcome("WRONG", f"hang: {text}")
    cause = blamed
    while cause.__cause__ is not None:
        cause = cause.__cause__
    if not isinstance(cause, PenstockError):
        return Outcome("WRONG", f"raw error behind it: {text}")
    said = re.sub(r"^.*?in layer '[^']*' \([^)]*\): ", "", str(blamed))  # which layer ran says nothing of the reason
    if not any(re.search(rf"(?<!\w){re.escape(name)}(?!\w)", said) for name in names_of(model)):
        return Outcome("WRONG", f"refused without a name of the model: {text}")
    return Outcome("REFUSED", text)
