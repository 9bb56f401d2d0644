"""Models as DeepSpeed describes them: a list of specs, modules and functions, and a word on how to divide it."""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.models.layer import LayerSpec as Spec

PARTITION_METHODS = ("uniform", "parameters", "type:regex")
DEFAULT_SEED = 1234


class LayerSpec:
    """A layer that is built on its own ranks alone: `typename(*module_args, **module_kwargs)`."""

    def __init__(self, typename: Callable[..., nn.Module], *module_args: Any, **module_kwargs: Any) -> None:
        self.typename = typename
        self.module_args = module_args
        self.module_kwargs = module_kwargs

    def build(self) -> nn.Module:
        """Make the module."""
        return self.typename(*self.module_args, **self.module_kwargs)


class TiedLayerSpec(LayerSpec):
    """A layer that shares weights with all others of the same `key`, on whatever ranks they are.

    `tied_weight_attr` names what is shared, one (dotted) name or several; other parameters stay each layer's own.
    `forward_fn(module, inputs)` runs it, instead of the module's forward.
    """

    def __init__(
        self,
        key: str,
        typename: Callable[..., nn.Module],
        *module_args: Any,
        forward_fn: Callable[[nn.Module, Any], Any] | None = None,
        tied_weight_attr: str | Sequence[str] = "weight",
        **module_kwargs: Any,
    ) -> None:
        super().__init__(typename, *module_args, **module_kwargs)
        self.key = key
        self.forward_fn = forward_fn
        self.tied_weight_attr = [tied_weight_attr] if isinstance(tied_weight_attr, str) else list(tied_weight_attr)

    def build(self) -> nn.Module:
        """Make the module, inside one that runs `forward_fn` where there is one."""
        module = super().build()
        return module if self.forward_fn is None else FunctionLayer(self.forward_fn, module)

    def tied_names(self) -> list[str]:
        """Return the names of the shared parameters in what `build` makes."""
        return [name if self.forward_fn is None else f"module.{name}" for name in self.tied_weight_attr]


class FunctionLayer(nn.Module):
    """A layer that calls `function(module, inputs)`, or `function(inputs)` where there is no module."""

    def __init__(self, function: Callable[..., Any], module: nn.Module | None = None) -> None:
        super().__init__()
        self.function = function
        self.module = module

    def forward(self, inputs: Any) -> Any:
        return self.function(inputs) if self.module is None else self.function(self.module, inputs)


Entry = LayerSpec | nn.Module | Callable[[Any], Any]


_RECOMPUTES = "call torch.utils.checkpoint.checkpoint in the layers that want it, or give initialize(recompute=True)"
_UNUSED_ARGUMENTS = {
    "topology": "for replicas give initialize(mesh=...)",
    "seed_layers": "leave it out: each layer's first values are drawn by base_seed and its place",
    "seed_fn": "leave it out: each layer's first values are drawn by base_seed and its place",
    "activation_checkpoint_interval": _RECOMPUTES,
    "activation_checkpoint_func": _RECOMPUTES,
    "checkpointable_layers": _RECOMPUTES,
    "dynamic_shape": "give initialize(variable_shapes=True)",
}
"""Arguments of DeepSpeed's class of this name, and what to do instead."""
_METHODS_OF_ENGINE = {
    name: f"it has no parameters before initialize(...) builds the layers of this rank; ask engine.{instead}"
    for name, instead in (
        ("parameters", "parameters()"),
        ("named_parameters", "pipeline.named_parameters()"),
        ("state_dict", "pipeline.state_dict()"),
        ("load_state_dict", "pipeline.load_state_dict(...)"),
    )
}
"""Methods of DeepSpeed's class of this name, and what to call instead."""
PAGE = "docs/moving/deepspeed.md"


class PipelineModule:
    """A model to be divided over ranks: layers, loss and how they are divided.

    `layers`: specs, modules, or functions of the values between layers. The result of one is the one argument of the
    next, a tuple too. `partition_method`: "uniform" counts layers, "parameters" trained scalars, "type:regex" layers
    whose class's name the expression finds, in any case; or a weight per layer, such as measured seconds. First values
    of a layer depend on `base_seed` and its place, not on the division.

    Raises:
        ConfigError: no layers, a method that is none of these or finds nothing, or a keyword that DeepSpeed alone has.
    """

    weights: list[float]
    """The weight of each layer, of which all stages get about equal sums."""

    def __init__(
        self,
        layers: Sequence[Entry],
        num_stages: int | None = None,
        loss_fn: Callable[[Any, Any], Tensor] | None = None,
        partition_method: str | Sequence[float] = "parameters",
        base_seed: int = DEFAULT_SEED,
        **options: Any,
    ) -> None:
        for name in options:
            raise ConfigError(f"is not taken; {_UNUSED_ARGUMENTS.get(name, f'see {PAGE}')}", key=name)
        self.layers = list(layers)
        self.num_stages = num_stages
        self.loss_fn = loss_fn
        self.partition_method = partition_method
        self.base_seed = base_seed
        if not self.layers:
            raise ConfigError("is empty; a model has at least one layer", key="layers")
        self.weights = self._weights()

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"PipelineModule has no {name!r}: {_METHODS_OF_ENGINE.get(name, f'see {PAGE}')}", name=name, obj=self
        )

    def specs(self) -> list[nn.Module | Spec]:
        """Return the layers as `penstock.Pipeline` takes them, named by their index."""
        first_by_key: dict[str, tuple[int, TiedLayerSpec]] = {}
        specs: list[nn.Module | Spec] = []
        for index, entry in enumerate(self.layers):
            if isinstance(entry, nn.Module):
                specs.append(entry)
                continue
            ties: tuple[tuple[str, str], ...] = ()
            if isinstance(entry, TiedLayerSpec):
                ties = _ties(entry, *first_by_key.setdefault(entry.key, (index, entry)))
            specs.append(Spec(str(index), _builder(entry), seed=self.base_seed, tied=ties))
        return specs

    def _weights(self) -> list[float]:
        method = self.partition_method
        if not isinstance(method, str):
            return [float(weight) for weight in method]
        if method.lower() == "uniform":
            return [1.0] * len(self.layers)
        if method.lower() == "parameters":
            return [float(_num_trained(entry)) for entry in self.layers]
        if method.lower().startswith("type:"):
            expression, names = method[len("type:") :], [_type_name(entry) for entry in self.layers]
            weights = [float(bool(re.search(expression, name, re.IGNORECASE))) for name in names]
            if any(weights):
                return weights
            problem = f"no layer's class is named like {expression!r}; they are {', '.join(sorted(set(names)))}"
            raise ConfigError(problem, key="partition_method")
        raise ConfigError(
            f"{method!r}; expected {', '.join(PARTITION_METHODS)} or a weight per layer", key="partition_method"
        )


def _ties(entry: TiedLayerSpec, first_index: int, first: TiedLayerSpec) -> tuple[tuple[str, str], ...]:
    """Return pairs of names: a parameter of a layer, and the one of the first layer of its key that it shares."""
    if entry is first:
        return ()
    if len(entry.tied_weight_attr) != len(first.tied_weight_attr):
        raise ConfigError(
            f"{entry.key!r} shares {first.tied_weight_attr} in one layer and {entry.tied_weight_attr} in another; name "
            "as many in each",
            key="tied_weight_attr",
        )
    owners = [f"{first_index}.{name}" for name in first.tied_names()]
    return tuple(zip(entry.tied_names(), owners, strict=True))


def _builder(entry: Entry) -> Callable[[], nn.Module]:
    return entry.build if isinstance(entry, LayerSpec) else lambda: FunctionLayer(entry)


def _num_trained(entry: Entry) -> int:
    """Return the number of scalars in a layer that training changes; a spec is built on the meta device for it."""
    if isinstance(entry, nn.Module):
        module = entry
    elif isinstance(entry, LayerSpec):
        with torch.device("meta"):
            module = entry.build()
    else:
        return 0
    return sum(parameter.numel() for parameter in module.parameters() if parameter.requires_grad)


def _type_name(entry: Entry) -> str:
    if isinstance(entry, LayerSpec):
        return str(getattr(entry.typename, "__name__", entry.typename))
    return type(entry).__name__ if isinstance(entry, nn.Module) else str(getattr(entry, "__name__", entry))
