"""Kernels of the device: torch's own CPU kernels, run when their stream comes to them.

Every operation of aten that has no kernel for the device arrives at `launch_operation`. It finds the shapes of the
results with fake tensors of the CPU, allocates them, and queues the CPU's kernel on the same bytes. Views take no
kernel. Numbers are drawn when an operation is launched, so in the order of the program. Where the size of a result
depends on data, the host waits, as on a GPU.
"""

from dataclasses import dataclass
from functools import cache, partial

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tests.emulated.runtime import RUNTIME

DEVICE = "emu"
DRAWS_WITHOUT_READING = {
    "bernoulli_.float",
    "uniform_.default",
    "normal_.default",
    "random_.default",
    "random_.from",
    "random_.to",
    "exponential_.default",
    "randperm.generator_out",
}
"""Operations whose numbers do not depend on what the device has computed."""
TAKES_INDICES_OF_THE_HOST = ("index.", "index_put", "_index_put_impl_", "_unsafe_index")
_shapes: dict = {}


@dataclass(frozen=True)
class Operation:
    """What the schema of an operation says."""

    name: str
    written: tuple
    """(position, name) of the arguments that it writes."""
    outputs: tuple
    """Names of the arguments that are `out=`."""
    is_view: bool
    returns_written: bool
    num_returns: int
    draws: bool


@cache
def operation_of(function):
    schema = function._schema
    written, outputs = [], []
    for position, argument in enumerate(schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written.append((position, argument.name))
            if argument.is_out:
                outputs.append(argument.name)
    aliases = [returned.alias_info for returned in schema.returns]
    return Operation(
        str(function).removeprefix("aten."),
        tuple(written),
        tuple(outputs),
        any(alias is not None and not alias.is_write for alias in aliases),
        bool(written) and bool(aliases) and all(alias is not None for alias in aliases),
        len(aliases),
        any(argument.name == "generator" for argument in schema.arguments),
    )


def is_of_device(value):
    return isinstance(value, torch.Tensor) and value.device.type == DEVICE


def leaves(values):
    """List the values, and those within lists one level down, which is as deep as schemas go."""
    found = []
    for value in values:
        found.extend(value) if isinstance(value, (list, tuple)) else found.append(value)
    return found


def mapped(convert, value):
    if isinstance(value, (list, tuple)):
        return type(value)(convert(part) for part in value)
    return convert(value)


class Call:
    """One call of an operation."""

    def __init__(self, function, arguments, options):
        self.function, self.arguments, self.options = function, arguments, options
        self.operation = operation_of(function)
        self.leaves = leaves([*arguments, *options.values()])
        self.tensors = [leaf for leaf in self.leaves if is_of_device(leaf)]
        self.device = self._device()
        self.queue = RUNTIME.current_queue(self.device.index)
        self.written = self._written()
        written = {id(tensor) for tensor in self.written}
        is_out = bool(self.operation.outputs)
        self.read = [tensor for tensor in self.tensors if not (is_out and id(tensor) in written)]

    def _device(self):
        devices = {tensor.device for tensor in self.tensors}
        on_host = [leaf for leaf in self.leaves if isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu"]
        if any(tensor.dim() for tensor in on_host) and not self.operation.name.startswith(TAKES_INDICES_OF_THE_HOST):
            devices.add(torch.device("cpu"))
        if len(devices) > 1:
            found = ", ".join(sorted(map(str, devices)))
            raise RuntimeError(f"{self.operation.name}: expected all tensors to be on the same device, found {found}")
        named = [leaf for leaf in self.leaves if isinstance(leaf, torch.device) and leaf.index is not None]
        found = [*devices, *named, torch.device(DEVICE, RUNTIME.extension.current_device())]
        return found[0]

    def _written(self):
        found = []
        for position, name in self.operation.written:
            value = self.arguments[position] if position < len(self.arguments) else self.options.get(name)
            found += [tensor for tensor in leaves([value]) if is_of_device(tensor)]
        return found

    def converted(self, convert):
        arguments = [mapped(convert, value) for value in self.arguments]
        return arguments, {name: mapped(convert, value) for name, value in self.options.items()}

    def on_cpu(self):
        """Return the arguments for the CPU's kernel: the same bytes, and the host's scalars as they are now."""
        return self.converted(_as_cpu)

    def results(self):
        """Return meta tensors like the results of the CPU's kernel, which on the device may have other types."""
        with FakeTensorMode(allow_non_fake_inputs=True):
            arguments, options = self.converted(_as_fake)
            found = self.function(*arguments, **options)
        return mapped(_as_meta, found)

    def launch(self, run, writes):
        RUNTIME.launch(self.queue, self.operation.name, run, self.read, writes)


def launch_operation(function, *arguments, **options):
    """Do what torch asks of the device by one operation of aten."""
    call = Call(function, arguments, options)
    operation = call.operation
    if operation.name == "record_stream.default":
        tensor, stream = arguments
        RUNTIME.record_stream(RUNTIME.extension.span(tensor)[0], stream.device_index, stream.stream_id)
        return None
    if operation.is_view:
        return _view(call)
    if operation.draws and operation.name not in DRAWS_WITHOUT_READING:
        return _run_while_host_waits(call)
    if operation.returns_written:
        _launch_into_arguments(call)
        returned = call.written[: operation.num_returns]
        return returned[0] if operation.num_returns == 1 else tuple(returned)
    if operation.written and not operation.num_returns:
        _launch_into_arguments(call)
        return None
    return _launch_into_new_tensors(call)


def _view(call):
    arguments, options = call.on_cpu()
    seen, base = call.function(*arguments, **options), call.arguments[0]
    offset = base.storage_offset() + seen.storage_offset()
    return torch.as_strided(base, seen.shape, seen.stride(), offset)


def _launch_into_arguments(call):
    if call.operation.draws:
        _draw(call)
    elif call.operation.outputs:
        _launch_into_outputs(call)
    else:
        arguments, options = call.on_cpu()
        call.launch(partial(call.function, *arguments, **options), call.written)


def _draw(call):
    """Draw now, from a copy of the generator that only the host knows, and queue the copy of the numbers."""
    own = call.options.get("generator") or RUNTIME.extension.default_generator(call.device.index)
    drawing = torch.Generator()
    drawing.set_state(own.get_state())
    target = call.written[0]
    drawn = torch.empty_like(_as_cpu(target))
    arguments, options = call.on_cpu()
    if call.operation.outputs:
        call.function(*arguments, **{**options, "out": drawn, "generator": drawing})
    else:
        call.function(drawn, *arguments[1:], **{**options, "generator": drawing})
    own.set_state(drawing.get_state())
    call.launch(partial(_as_cpu(target).copy_, drawn), [target])


def _launch_into_outputs(call):
    """Queue an `out=` kernel. It computes into memory of the host, since such kernels may resize what they get."""
    names = call.operation.outputs
    if any(tensor.numel() == 0 for tensor in call.written):
        shapes = leaves([call.results()])
        for tensor, shape in zip(call.written, shapes, strict=True):
            if tensor.shape != shape.shape:
                tensor.resize_(shape.shape)
    arguments, options = call.on_cpu()
    targets = leaves([options[name] for name in names])
    function = call.function  # what is queued must not hold `call`, whose tensors may die before it runs

    def run():
        own = {name: mapped(torch.empty_like, options[name]) for name in names}
        function(*arguments, **{**options, **own})
        for target, found in zip(targets, leaves(own.values()), strict=True):
            target.copy_(found)

    call.launch(run, call.written)


def _launch_into_new_tensors(call):
    shapes = _shapes_of(call)
    if shapes is None:
        return _run_while_host_waits(call)
    results = mapped(partial(_allocated, call.device), shapes)
    new = [result for result in leaves([results]) if isinstance(result, torch.Tensor)]
    targets = [_as_cpu(tensor) for tensor in new]
    arguments, options = call.on_cpu()
    function = call.function  # what is queued must not hold `call`, whose tensors may die before it runs

    def run():
        found = leaves([function(*arguments, **options)])
        for target, tensor in zip(targets, [f for f in found if isinstance(f, torch.Tensor)], strict=True):
            target.copy_(tensor)

    call.launch(run, [*new, *call.written])
    return results


def _run_while_host_waits(call):
    """Run a kernel whose result the host must see: its size, or the numbers that it has drawn."""
    RUNTIME.launch(call.queue, call.operation.name, None, call.read, call.written)
    RUNTIME.wait_here(call.queue, call.operation.name)
    arguments, options = call.on_cpu()
    with RUNTIME.lock, torch.no_grad():
        found = call.function(*arguments, **options)
    if call.operation.returns_written:
        return call.written[0]
    return mapped(partial(_placed, call), found)


def _placed(call, value):
    """Return a result that the host has computed as a tensor of the device."""
    if not isinstance(value, torch.Tensor):
        return value
    target = _allocated(call.device, value)
    call.launch(partial(_as_cpu(target).copy_, value), [target])
    return target


def _shapes_of(call):
    """Return meta tensors of the results, or None where their shapes depend on data."""
    key = _key(call)
    if key is None or key not in _shapes:
        try:
            found = call.results()
        except (NotImplementedError, RuntimeError):  # a mistake of the caller too; the CPU's kernel says which
            found = None
        if key is None:
            return found
        _shapes[key] = found
    return _shapes[key]


def _key(call):
    """Say all that the shapes of the results depend on, or None where that has no hash."""
    options = sorted(call.options.items())
    parts = [call.function, *map(_part, call.arguments), *((name, _part(value)) for name, value in options)]
    try:
        hash(key := tuple(parts))
    except TypeError:
        return None
    return key


def _part(value):
    if isinstance(value, torch.Tensor):
        return value.device.type, value.dtype, value.shape, value.stride()
    if isinstance(value, (list, tuple)):
        return tuple(map(_part, value))
    return type(value), value  # 1, 1.0 and True are equal


def _allocated(device, shape):
    if not isinstance(shape, torch.Tensor):
        return shape
    return torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=device)


def _as_fake(value):
    if is_of_device(value):
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cpu")
    if isinstance(value, torch.device) and value.type == DEVICE:
        return torch.device("cpu")
    return value


def _as_meta(value):
    if not isinstance(value, torch.Tensor):
        return value
    return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="meta")


def _as_cpu(value):
    if is_of_device(value):
        return RUNTIME.extension.as_cpu(value)
    if isinstance(value, torch.Tensor) and value.dim() == 0:
        return value.detach().clone()  # a scalar goes with the launch; the host may change its own afterwards
    if isinstance(value, torch.device) and value.type == DEVICE:
        return torch.device("cpu")
    if isinstance(value, torch.Generator):
        return None
    return value


def slow(tensor, seconds):
    """Keep the tensor's stream busy for so long on the simulated clock; nothing sleeps."""
    RUNTIME.launch(RUNTIME.current_queue(tensor.device.index), "slow", None, [tensor], [tensor], cost_s=seconds)


def register(library, catch_all):
    """Give torch the kernels: one for all, and that same one where torch would take an operation apart.

    For a device that it does not know, torch replaces `native_layer_norm`, say, by a formula in smaller operations,
    whose last bits are others than those of the CPU's kernel.
    """
    catch_all.fallback(launch_operation, "PrivateUse1")
    for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU"):
        function = _function(name)
        if function is not None and _is_taken_apart(name) and not operation_of(function).is_view:
            library.impl(name.removeprefix("aten::"), partial(launch_operation, function), "PrivateUse1")


def _function(name):
    if not name.startswith("aten::"):
        return None
    base, _, overload = name.removeprefix("aten::").partition(".")
    return getattr(getattr(torch.ops.aten, base, None), overload or "default", None)


def _is_taken_apart(name):
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    composites = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional", "CompositeImplicitAutograd")
    return not has(name, "PrivateUse1") and any(has(name, composite) for composite in composites)
