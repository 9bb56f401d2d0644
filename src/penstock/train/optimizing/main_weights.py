"""`MainWeightOptimizer`: steps float32 copies of weights in low precision, from the gradients summed beside them.

    parameter.main_grad  (float32)  ──►  main weight (float32)  ──►  parameter (bfloat16, float16)
                                 optimizer                    rounded

A step of AdamW is often smaller than half a unit in the last place of a weight in bfloat16, so that such a weight would
stand still. Its main weight takes the step, and the weight becomes the main weight rounded to nearest. Megatron-LM gave
them their name.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from penstock.checkpoints.optimizer_state import MAIN_WEIGHT
from penstock.errors import CheckpointError, ConfigError
from penstock.execute.parameters.gradient_store import MAIN_GRAD, drop_gradients, main_type


class MainWeightOptimizer(Optimizer):
    """An optimizer of torch.optim for a pipeline with `main_gradients`: `MainWeightOptimizer(params, AdamW, lr=...)`.

    It looks like any optimizer of the parameters themselves: `param_groups` holds them, and `state` has for each its
    main weight beside what the class keeps. A `GradScaler` takes `inner`, between `take_gradients` and `zero_grad`.
    """

    inner: Optimizer
    """The optimizer of the main weights; each step of it updates the parameters."""

    def __init__(self, params: Iterable[Any], optimizer_class: Callable[..., Optimizer], **options: Any) -> None:
        super().__init__(params, {})
        self._mains = {parameter: _main_of(parameter) for parameter in self._parameters()}
        self.inner = optimizer_class([self._inner_group(group) for group in self.param_groups], **options)
        self.inner.register_step_post_hook(lambda *_: self._give_weights())
        self._show_inner()

    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Step the main weights by `.main_grad`, and round them into the parameters."""
        self.take_gradients()
        self.inner.step()

    def take_gradients(self) -> None:
        """Give the main weights the gradients that were summed up beside the parameters, and the groups' rates.

        Raises:
            ConfigError: nothing sums them up there.
        """
        for parameter, main in self._mains.items():
            if not hasattr(parameter, MAIN_GRAD):
                raise ConfigError("main weights need a pipeline with main_gradients=True", key="main_gradients")
            main.grad = getattr(parameter, MAIN_GRAD)
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner_group.update(_without(group, "params"))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, those beside the parameters included."""
        drop_gradients(self._mains)
        self.inner.zero_grad()

    @torch.no_grad()
    def take_weights(self) -> None:
        """Begin anew from the parameters, whose values were changed from outside, as by loading them."""
        for parameter, main in self._mains.items():
            main.copy_(parameter)

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned, on parameters in the same order; they become their main weights, rounded.

        Raises:
            CheckpointError: a main weight is missing, or has another shape.
        """
        states = state_dict["state"]
        order = [index for group in state_dict["param_groups"] for index in group["params"]]
        for number, main in zip(order, self._mains.values(), strict=True):
            _require_main(number, states.get(number, {}).get(MAIN_WEIGHT), main)
        inner_states = {number: _without(state, MAIN_WEIGHT) for number, state in states.items()}
        # torch casts what it loads to the type of the parameters, which would round it: those of `inner` are float32
        nonempty_states = {number: state for number, state in inner_states.items() if state}
        self.inner.load_state_dict({"state": nonempty_states, "param_groups": state_dict["param_groups"]})
        with torch.no_grad():
            for number, main in zip(order, self._mains.values(), strict=True):
                main.copy_(states[number][MAIN_WEIGHT])
        self._give_weights()

    @torch.no_grad()
    def _give_weights(self) -> None:
        for parameter, main in self._mains.items():
            parameter.copy_(main)
        self._show_inner()

    def _show_inner(self) -> None:
        """Show the state and the options of the main weights as those of the parameters; the tensors are the same."""
        for parameter, main in self._mains.items():
            self.state[parameter] = {MAIN_WEIGHT: main.detach(), **self.inner.state.get(main, {})}
        for group, inner_group in zip(self.param_groups, self.inner.param_groups, strict=True):
            group.update(_without(inner_group, "params"))

    def _inner_group(self, group: dict[str, Any]) -> dict[str, Any]:
        mains: list[Any] = [self._mains[parameter] for parameter in group["params"]]
        main_params = list(zip(group["param_names"], mains, strict=True)) if "param_names" in group else mains
        return {**_without(group, "param_names"), "params": main_params}

    def _parameters(self) -> Iterable[nn.Parameter]:
        return (parameter for group in self.param_groups for parameter in group["params"])


def _without(options: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in options.items() if key != name}


def _main_of(parameter: nn.Parameter) -> nn.Parameter:
    copied = parameter.detach().to(main_type(parameter), copy=True)
    return nn.Parameter(copied, requires_grad=parameter.requires_grad)


def _require_main(number: int, loaded_weight: Any, main: Tensor) -> None:
    if not isinstance(loaded_weight, Tensor) or loaded_weight.shape != main.shape:
        has = "none" if not isinstance(loaded_weight, Tensor) else f"one of shape {tuple(loaded_weight.shape)}"
        raise CheckpointError(
            f"parameter {number} of the optimizer has a main weight of shape {tuple(main.shape)}, but its saved state "
            f"has {has}; load the state of a run in the same precision"
        )
