"""What two sides computed of one case, and in what they differ."""

from dataclasses import dataclass, field

import torch

ACCUMULATED = 2
"""Steps that add up gradients, before the steps that update."""
TOLERANCE = 1e-12
MOST_BY_BATCH_NORM = 316.0
"""1 / sqrt(eps): a batch norm over rows that are alike multiplies gradients, and how they round, by up to this."""
AFTER_UPDATES = 1e-7
"""Where gradients differ by rounding, an optimizer that divides by their size makes more of it."""
OF_OUTPUTS = 1e-5
"""And a norm by small running variances makes more of that."""
DIVERGED = 1e6
"""Gradients that grew by this factor: from there on, a difference by rounding may have grown to any size."""


@dataclass
class Trace:
    """What one side, or one rank of it, computed."""

    losses: list = field(default_factory=list)
    """Per step, the loss of the batch and those of its microbatches."""
    gradients: list = field(default_factory=list)
    """Per step, the gradients at its end by name."""
    parameters: dict = field(default_factory=dict)
    buffers: dict = field(default_factory=dict)
    outputs: object = None
    """Of an evaluation at the end; None on ranks that do not have them."""
    repeated: list = field(default_factory=list)
    """Of a rank: names under which one parameter is listed more than once."""
    stages: list = field(default_factory=list)
    """Of a rank: the layers of every stage."""
    same_as: dict = field(default_factory=dict)
    """Of plain torch: every name of a parameter, with the first name of the same parameter."""


@dataclass(frozen=True)
class Expected:
    """What plain torch computed, and how closely it has to be met."""

    case: object
    trace: Trace
    tied: frozenset
    """Names of parameters that are used in several places: their gradients are summed in another order."""

    @property
    def everything(self):
        return {*self.trace.parameters, *self.trace.buffers, ""}

    @property
    def loose(self):
        """Names that may differ by rounding as long as nothing was updated."""
        return self.tied if self.case.is_bitwise else self.everything

    @property
    def loose_later(self):
        """Names that may differ by rounding once there were updates."""
        return set() if self.case.is_bitwise and not self.tied else self.everything

    @property
    def tolerance(self):
        """By how much of the largest gradient the loose ones may differ before there were updates."""
        has_norm = any(entry.kind == "BatchNorm" for entry in self.case.entries)
        return TOLERANCE * (MOST_BY_BATCH_NORM if has_norm else 1.0)

    @property
    def num_steps(self):
        """How many steps can be compared: all that are bitwise, else those before the training diverged."""
        sizes = [_largest(gradients) for gradients in self.trace.gradients]
        diverged = [step for step, size in enumerate(sizes) if not size <= DIVERGED * max(sizes[0], 1e-3)]
        return diverged[0] if diverged and self.loose_later else len(sizes)


def differences(case, ranks, plain):
    """List what is not as one process computed it; `ranks` and `plain` are traces."""
    expected = Expected(case, plain, summed_in_another_order(case, plain, ranks[0].stages))
    wrong = [f"rank {rank} lists one parameter as {names}" for rank, own in enumerate(ranks) for names in own.repeated]
    listed = {plain.same_as.get(name, name) for own in ranks for name in own.parameters}
    wrong += [f"parameters that no rank lists: {missing}"] if (missing := set(plain.same_as.values()) - listed) else []
    wrong += [f"unknown parameters: {unknown}"] if (unknown := listed - set(plain.same_as)) else []
    for rank, own in enumerate(ranks):
        wrong += [f"rank {rank}, {problem}" for problem in of_rank(own, expected)]
    if all(own.outputs is None for own in ranks):
        wrong.append("no rank has outputs")
    return wrong


def of_rank(own, expected):
    """List what is wrong on one rank."""
    plain, wrong, num_steps = expected.trace, [], expected.num_steps
    for step, (found, wanted) in list(enumerate(zip(own.gradients, plain.gradients, strict=True)))[:num_steps]:
        is_early = step <= ACCUMULATED  # the first update comes at the end of the next step
        loose, tolerance = (expected.loose, expected.tolerance) if is_early else (expected.loose_later, AFTER_UPDATES)
        wrong += compare(found, wanted, loose, tolerance, f"step {step}, gradient of")
    for step, (found, wanted) in list(enumerate(zip(own.losses, plain.losses, strict=True)))[:num_steps]:
        is_early = step <= ACCUMULATED
        loose = expected.loose - expected.tied if is_early else expected.loose_later
        wrong += of_losses(found, wanted, loose, TOLERANCE if is_early else AFTER_UPDATES, f"step {step}")
    if num_steps < len(plain.losses):
        return wrong
    later = expected.loose_later
    wrong += compare(own.parameters, plain.parameters, later, AFTER_UPDATES, "trained")
    wrong += compare(own.buffers, plain.buffers, later, AFTER_UPDATES, "buffer")
    if own.outputs is not None:
        wrong += compare({"": own.outputs}, {"": plain.outputs}, later, OF_OUTPUTS, "outputs at the end")
    return wrong


def of_losses(found, wanted, loose, tolerance, where):
    """Compare the loss of a batch, which is a sum and so may round, and those of its microbatches."""
    tolerance = max(tolerance, 1e-6) if wanted[0].dtype == torch.float32 else tolerance
    wrong = compare({"": found[0]}, {"": wanted[0]}, {""}, tolerance, f"{where}, loss")
    if len(found[1]) != len(wanted[1]):
        return [*wrong, f"{where}, {len(found[1])} losses of microbatches for {len(wanted[1])}"]
    pairs = enumerate(zip(found[1], wanted[1], strict=True))
    return wrong + [
        problem
        for microbatch, (own, other) in pairs
        for problem in compare({"": own}, {"": other}, {""} & set(loose), tolerance, f"{where}, loss {microbatch}")
    ]


def summed_in_another_order(case, plain, stages):
    """Names of parameters that layers of several stages use, or several layers where backwards are split."""
    stage_of = {layer: stage for stage, layers in enumerate(stages) for layer in layers}
    users = {}
    for name, first in plain.same_as.items():
        users.setdefault(first, set()).add(int(name.partition(".")[0].removeprefix("layer")))
    loose = {first for first, places in users.items() if len({stage_of[place] for place in places}) > 1}
    if case.splits_backwards:
        loose |= {first for first, places in users.items() if len(places) > 1}
    return frozenset(name for name, first in plain.same_as.items() if first in loose)


def compare(found, wanted, loose, tolerance, what):
    """List the names whose tensors are not equal: bit for bit, or for loose ones nearly."""
    scale = max(1e-3, _largest(wanted))
    return [
        f"{what} {name}: {problem}"
        for name in found.keys() & wanted.keys()
        if (problem := difference(found[name], wanted[name], tolerance * scale if name in loose else None))
    ]


def difference(found, wanted, tolerance):
    """Say how two tensors differ; an empty text where they do not."""
    if found is None or wanted is None:
        return "" if found is wanted else f"{_said(found)}, expected {_said(wanted)}"
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return f"{found.dtype} {tuple(found.shape)}, expected {wanted.dtype} {tuple(wanted.shape)}"
    if torch.equal(found, wanted) or torch.allclose(found, wanted, rtol=0, atol=tolerance or 0, equal_nan=True):
        return ""
    distance, size = float((found - wanted).abs().max()), float(wanted.abs().max())
    kind = "not equal bit for bit" if distance <= 1e-5 * size else "different"
    allowed = f", {tolerance:.2g} allowed" if tolerance else ""
    return f"{kind}, by {distance:.2g} of {size:.2g}{allowed}"


def _largest(tensors):
    """The largest size of a number, other than NaN, in tensors by name."""
    sizes = [float(tensor.abs().max()) for tensor in tensors.values() if tensor is not None and tensor.numel()]
    return max((size for size in sizes if size == size), default=0.0)


def _said(tensor):
    return "None" if tensor is None else "zeros" if not tensor.any() else "a tensor"
