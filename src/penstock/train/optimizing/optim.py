"""The optimizer of a run: any class of torch.optim, its groups, and whether its options can be used.

The keys that most classes share have names of their own (`KEYS`); a class gets those that its signature has, and what
`optimizer.options` says besides. Whether it takes them is tried on two small parameters before a run begins.
"""

import inspect
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from penstock.errors import ConfigError, nearest
from penstock.execute.stages.stage import distinct
from penstock.execute.values.tensors import is_dtensor
from penstock.train.optimizing.main_weights import MainWeightOptimizer
from penstock.train.settings.sections import OptimizerSection

KEYS: Mapping[str, tuple[str, ...]] = {
    "lr": ("learning_rate",),
    "weight_decay": ("weight_decay",),
    "betas": ("beta1", "beta2"),
    "eps": ("epsilon",),
}
"""By argument of a class of torch.optim, the keys of a run file that set it."""
NOT_FOR_SHARDS = ("Adafactor", "Rprop", "SparseAdam", "LBFGS")
"""Classes of torch.optim that raise errors in their step, or compute something else, where parameters are DTensors."""


def build_optimizer(
    named_parameters: Iterable[tuple[str, nn.Parameter]],
    options: OptimizerSection,
    *,
    has_main_weights: bool = False,
    embeddings: Collection[str] = (),
    device: torch.device | None = None,
) -> Optimizer:
    """Make the optimizer of one rank's parameters; a rank without parameters gets one that steps none.

    Weight decay applies by the shape of a parameter, and by whether its name is among the `embeddings`: so the copies
    of a tied weight on several ranks are decayed alike and stay equal. With `has_main_weights`, it steps float32 copies
    of the parameters. The user's options win over the settings of the run.
    """
    groups = _parameter_groups(named_parameters, options, embeddings)
    torch_class = optimizer_class(options)
    accepted_arguments = _arguments_by_name(torch_class)
    arguments: dict[str, Any] = {"lr": options.learning_rate}
    if "betas" in accepted_arguments:
        arguments["betas"] = (options.beta1, options.beta2)
    if _takes_epsilon(accepted_arguments):
        arguments["eps"] = options.epsilon
    arguments |= options.options
    trained_params = [parameter for group in groups for _, parameter in group["params"]]
    arguments |= _implementation(torch_class, options, device, trained_params)
    if has_main_weights:
        return MainWeightOptimizer(groups, torch_class, **arguments)
    optimizer: Optimizer = torch_class(groups, **arguments)
    return optimizer


def optimizer_class(options: OptimizerSection) -> Any:
    """Return the class that a configuration names. Raises: ConfigError."""
    names = [name for name, value in vars(torch.optim).items() if _is_optimizer(value)]
    if options.name not in names:
        raise ConfigError(
            f"torch.optim has no optimizer {options.name!r}.{nearest(options.name, names)} It has {', '.join(names)}",
            key="optimizer.name",
        )
    return getattr(torch.optim, options.name)


def check_optimizer(options: OptimizerSection, *, is_sharded: bool = False) -> None:
    """Refuse a class of torch.optim, or options of one, that cannot train.

    A step is tried on a matrix and a vector, so that torch refuses what it does not take before the run begins.

    Raises:
        ConfigError: an unknown class or option, an option that has a key of its own, or what torch refuses.
    """
    torch_class = optimizer_class(options)
    if is_sharded and options.name in NOT_FOR_SHARDS:
        raise ConfigError(
            f"{options.name} cannot step shards of parameters; take another, such as AdamW, or parallel.shard = 'none'",
            key="optimizer.name",
        )
    # Options that the class does not have, and keys of the configuration that it would not use.
    _refuse_unknown_options(torch_class, options)
    _refuse_unused_keys(torch_class, options)
    # Values that torch refuses, by a step.
    parameters = [("matrix", nn.Parameter(torch.ones(2, 2))), ("vector", nn.Parameter(torch.ones(2)))]
    torch.autograd.backward([parameter.sum() for _, parameter in parameters])
    try:
        build_optimizer(parameters, options).step()
    except (TypeError, ValueError, RuntimeError) as error:
        reason = str(error).partition("\n")[0]
        raise ConfigError(
            f"{options.name} cannot train with these options: {reason}. See to optimizer.options, or take another "
            "class of torch.optim",
            key="optimizer.name",
        ) from error


def _parameter_groups(
    named_parameters: Iterable[tuple[str, nn.Parameter]], options: OptimizerSection, embeddings: Collection[str]
) -> list[dict[str, Any]]:
    """Put parameters that decay into one group and the rest into another; an empty group is left out if it can be."""
    trained_params = distinct((name, parameter) for name, parameter in named_parameters if parameter.requires_grad)

    def decays(name: str, parameter: nn.Parameter) -> bool:
        is_matrix = parameter.dim() >= 2 or options.decay_vectors
        return is_matrix and (options.decay_embeddings or name not in embeddings)

    has_decay = "weight_decay" in _arguments_by_name(optimizer_class(options))
    groups: list[dict[str, Any]] = []
    for is_decayed, decay in ((True, options.weight_decay), (False, 0.0)):
        group_params = [named_param for named_param in trained_params if decays(*named_param) is is_decayed]
        groups.append({"params": group_params, "weight_decay": decay} if has_decay else {"params": group_params})
    return [group for group in groups if group["params"]] or [{"params": []}]


def _refuse_unknown_options(torch_class: Any, options: OptimizerSection) -> None:
    accepted_names = [name for name in _arguments_by_name(torch_class) if name not in KEYS]
    for name in options.options:
        key = f"optimizer.options.{name}"
        if name in KEYS:
            keys = " and ".join(f"optimizer.{option_key}" for option_key in KEYS[name])
            raise ConfigError(f"not an option of its own; set {keys}", key=key)
        if name not in accepted_names:
            hint = nearest(name, accepted_names)
            raise ConfigError(
                f"{options.name} has no argument {name!r}.{hint} It takes {', '.join(accepted_names)}", key=key
            )


def _refuse_unused_keys(torch_class: Any, options: OptimizerSection) -> None:
    """Refuse a key that was changed although the class does not take it."""
    accepted_arguments = _arguments_by_name(torch_class)
    is_taken = {name: name in accepted_arguments for name in KEYS} | {"eps": _takes_epsilon(accepted_arguments)}
    for name, keys in KEYS.items():
        for key in keys:
            is_changed = getattr(options, key) != OptimizerSection.model_fields[key].default
            if is_changed and not is_taken[name]:
                raise ConfigError(f"{options.name} does not take it; drop the key", key=f"optimizer.{key}")


def _implementation(
    torch_class: Any, options: OptimizerSection, device: torch.device | None, parameters: Sequence[nn.Parameter]
) -> dict[str, bool]:
    """Return the argument that selects an implementation of the step; none where options do, or the default is best."""
    implementations = ["fused"] if device is not None and device.type != "cpu" else []
    if parameters and all(map(is_dtensor, parameters)):
        # By default torch loops over these, and calls for each of them take a millisecond.
        implementations += ["foreach", "fused"]
    accepted_arguments = _arguments_by_name(torch_class)
    if {"fused", "foreach", "differentiable"} & set(options.options):
        return {}
    return next(({name: True} for name in implementations if name in accepted_arguments), {})


def _arguments_by_name(torch_class: Any) -> Mapping[str, inspect.Parameter]:
    """Return the arguments of a class, but for the parameters to train."""
    return {name: argument for name, argument in inspect.signature(torch_class).parameters.items() if name != "params"}


def _takes_epsilon(accepted_arguments: Mapping[str, inspect.Parameter]) -> bool:
    # Adafactor has two of them under this name; they are given as its defaults have them.
    return "eps" in accepted_arguments and isinstance(accepted_arguments["eps"].default, float)


def _is_optimizer(value: object) -> bool:
    return isinstance(value, type) and issubclass(value, Optimizer) and value is not Optimizer
