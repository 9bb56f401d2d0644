"""The layers of a module of one's own, for a pipeline; they hold its submodules."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from penstock.errors import ConfigError
from penstock.models.cutting.batch_signature import BatchSignature
from penstock.models.cutting.entry import PartCall
from penstock.models.cutting.forward import CutForward, Segment
from penstock.models.cutting.frame import Template
from penstock.models.cutting.part import CutPart, part_class
from penstock.models.cutting.points import CutModel, cut_model, tensor_of
from penstock.models.cutting.undocumented import is_compiled
from penstock.models.layer import LayerSpec


def cut(model: nn.Module, points: Sequence[str]) -> list[CutPart]:
    """Return a module as a list of layers for `Pipeline`, cut at submodules; the submodules are used in place.

    `ps.cut` (`checkpoints/cutting.py`) is this function with weights from files.

    Raises:
        ConfigError: `points` are not submodules, or lie in one another; or the module has no values, as on the meta
            device.
    """
    require_cuttable(model)
    _require_values(model)
    parts = cut_model(model, points)
    entry = ByName(model)
    forward = CutForward(Template(model, parts), entry)
    kind = part_class(entry.batch_signature)
    layers = [
        kind(forward, name, segment, *tensors_of_segment(model, segment)) for name, segment in segments(parts).items()
    ]
    for layer in layers:
        layer.layer_weight = multiplications(layer)
    return layers


@dataclass(frozen=True, slots=True)
class CutSpec(LayerSpec):
    """A layer of a cut model that is not there yet."""

    batch_signature: BatchSignature | None = None
    """The arguments of the whole model's forward that a batch may have."""


def multiplications(module: nn.Module, share_of_experts: float = 1.0) -> float:
    """Return the multiplications per position of a forward, as the sizes of weights tell it; 0 for an embedding.

    Weights of three and more dimensions count for their share: those of experts, each of which sees some positions.
    """
    owners = (module for module in module.modules() if not isinstance(module, nn.Embedding))
    weights = (weight for owner in owners for weight in owner.parameters(recurse=False) if weight.dim() > 1)
    return sum(weight.numel() * (share_of_experts if weight.dim() > 2 else 1.0) for weight in weights)


def require_cuttable(model: nn.Module) -> None:
    """Refuse a model whose forward is not its own, or whose parameters have no shape yet. Raises: ConfigError."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"a {type(model).__name__}; expected an nn.Module", key="model")
    if is_compiled(model):
        raise ConfigError(
            "the model is compiled as a whole; cut it first, and pass compile=True to Pipeline", key="model"
        )
    lazy = [name for name, parameter in model.named_parameters() if is_lazy(parameter)]
    if lazy:
        raise ConfigError(f"{lazy[0]!r} has no shape before its first input; give its module its sizes", key="model")


def _require_values(model: nn.Module) -> None:
    """Refuse a model of which no parameter has values. Raises: ConfigError."""
    parameters = dict(model.named_parameters())
    if parameters and all(parameter.is_meta for parameter in parameters.values()):
        raise ConfigError(
            f"is on the meta device, where {next(iter(parameters))!r} and all other parameters have no values; pass "
            "ps.cut weights=, a safetensors file or a folder of them, of which each rank reads its own tensors",
            key="model",
        )


def tensors_of_segment(model: nn.Module, segment: Segment) -> tuple[dict[str, nn.Module], dict[str, Tensor]]:
    """Return the submodules of a segment, and the tensors of the modules around the points, by name."""
    return (
        {name: model.get_submodule(name) for name in segment.modules},
        {name: tensor_of(model, name) for name in segment.tensors},
    )


def segments(parts: CutModel, last: str = "") -> dict[str, Segment]:
    """Return what each layer of a cut model runs, by the name of the layer.

    All points behind the one called `last`, if it is given, are one layer, with the name of the last of them.
    """
    segments_by_name = {}
    if parts.has_begin:
        segments_by_name[_begin_name(parts)] = Segment(None, parts.points[0], parts.begin_modules, parts.tensors)
    # The first point begins with the forward itself, unless a layer of its own runs before it.
    end = parts.points.index(last) + 1 if last else len(parts.points)
    groups = [*([name] for name in parts.points[:end]), *([parts.points[end:]] if parts.points[end:] else [])]
    for index, group in enumerate(groups):
        start = group[0] if index or parts.has_begin else None
        stop = groups[index + 1][0] if index + 1 < len(groups) else None
        segments_by_name[group[-1]] = Segment(start, stop, tuple(group))
    return segments_by_name


def _begin_name(parts: CutModel) -> str:
    """Return the common begin of the names of all that runs before the first point, else the first of these names."""
    names = [*(name.split(".") for name in parts.begin_modules), *(name.split(".")[:-1] for name in parts.tensors)]
    common = []
    for steps in zip(*names, strict=False):
        if len(set(steps)) > 1:
            break
        common.append(steps[0])
    return ".".join(common) or (*parts.begin_modules, *parts.tensors)[0]


class ByName:
    """How a stage calls the forward of a module: by the names of its arguments."""

    def __init__(self, model: nn.Module) -> None:
        self.batch_signature = BatchSignature(model)
        # A cache of keys and values, which models of transformers fill by default, is of no use in training.
        self._defaults = {name: False for name in ("use_cache",) if name in self.batch_signature.parameters}

    def call(self, model: nn.Module, part_call: PartCall) -> Any:
        # Bound again, for a part that no pipeline calls, or one inside a wrapper that hides how a batch is bound.
        inputs = part_call.inputs if part_call.is_first else ()
        return model(**self._defaults | self.batch_signature.bind(inputs, part_call.keywords)[1])
