"""`CutPart`: one layer of a cut module. It holds submodules, and runs the forward from there to the next point."""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError
from penstock.models.cutting.batch_signature import BatchSignature
from penstock.models.cutting.entry import PartCall
from penstock.models.cutting.forward import CutForward, PartOutput, Segment
from penstock.models.cutting.points import tensor_of
from penstock.models.cutting.tail import NUM_PROBED, TailSteps, example_of, tail_steps
from penstock.models.cutting.trials import Trials


class CutPart(nn.Module):
    """A layer of a cut module; its parameters have the names that the whole module gives them."""

    has_full_names = True
    layer_weight = 1.0
    """Compute relative to the other parts, for the split into stages."""
    rebuilt_names: frozenset[str] = frozenset()
    """Names of frozen tensors that building the layer makes again, so that checkpoints leave them out."""
    module_settings: Callable[[], Mapping[str, Mapping[str, Any]]] = dict
    """Returns, by name of a module, what it computes by and no tensor says, such as the scale of an adapter."""
    takes_slices = False
    """Masks and positions are made for whole sequences, so a part takes no slices of them."""

    def __init__(
        self,
        forward: CutForward,
        name: str,
        segment: Segment,
        modules: Mapping[str, nn.Module],
        tensors: Mapping[str, Tensor],
    ) -> None:
        """`modules` and `tensors` are those that the segment names; `name` is that of the layer."""
        super().__init__()
        self.layer_name = name
        self._forward, self._segment = forward, segment
        self._tails: dict[Any, TailSteps] = {}
        self._tails_version: object = None
        """The version of the owner's modules around the points that the tails were noted from."""
        for name, module in modules.items():
            holder, local_name = _branch(self, name)
            holder.add_module(local_name, module)
        for name, tensor in tensors.items():
            holder, local_name = _branch(self, name)
            if isinstance(tensor, nn.Parameter):
                holder.register_parameter(local_name, tensor)
            else:
                holder.register_buffer(local_name, tensor)

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        """Run this part of the model's forward."""
        segment, leaves = self._segment, {}
        if inputs and isinstance(inputs[0], PartOutput):
            inputs, leaves = (inputs[0].value, *inputs[1:]), inputs[0].leaves
        part_modules = {name: self.get_submodule(name) for name in segment.modules}
        tensors = {name: tensor_of(self, name) for name in segment.tensors}
        call = PartCall(inputs, keywords, segment.start is None, self.training)
        return self._forward.run(segment, part_modules, tensors, call, leaves)

    def begin_step(self) -> None:
        """Let the forwards of a step see what the model's owner has changed before it."""
        trials = self._forward.trials
        trials.begin_step(self._segment.start)
        # Steps of a tail hold numbers of the owner, such as that of a cap. They are given up here and not where they
        # run: a backward may run them again on a thread of its own, which has other trials.
        if trials.owner_version is not self._tails_version:
            self._tails_version = trials.owner_version
            self._tails.clear()

    def end_step(self) -> None:
        """Let forwards that follow see what the model's owner has changed before each of them."""
        self._forward.trials.end_step()

    @property
    def whole_model(self) -> nn.Module:
        """The model that was cut; on the meta device, unless the layers hold its own modules."""
        return self._forward.template.model

    @property
    def tail(self) -> Callable[[Tensor], Tensor] | None:
        """The layer as a function of a hidden state [1, positions, width], for a loss that applies it to some positions
        at a time; None where the layer is not what a decoder makes its outputs by.

        Raises:
            ConfigError: the layer needs more of what is before it than the hidden state, such as a buffer of the model.
        """
        if self._segment.stop is not None or not getattr(self._forward.entry, "ends_by_position", False):
            return None
        for label in self._carried_labels():
            raise ConfigError(
                "the loss applies the end of the model to some positions at a time, but it computes with "
                f"{self._described(label)} beside its hidden state; put that into a submodule behind the last block, "
                "or take a loss of the outputs, such as the model's own",
                key="loss",
            )
        return self._run_tail

    def _carried_labels(self) -> tuple[str, ...]:
        """Return what the layer gets beside its input, as a run of a few tokens without values tells."""
        template, start = self._forward.template, self._segment.start
        if start is None:
            return ()
        parts = {name: self.get_submodule(name) for name in self._segment.modules}
        tokens = torch.zeros((1, NUM_PROBED), dtype=torch.int64)
        part_call = PartCall((tokens,), {}, is_first=True, is_training=self.training)
        device = part_call.device(parts)
        part_call = replace(part_call, inputs=(tokens.to(device),))
        try:
            routes = Trials(template, self._forward.entry).routes(part_call, device)
        except Exception:  # the first forward says what a forward cannot do
            return ()
        return routes.points[template.positions[start]].carried

    def _described(self, label: str) -> str:
        """Return words for a leaf: a tensor beside the points, or what a submodule makes."""
        if label not in self._forward.template.saved_names:
            return f"what {label.partition('#')[0]!r} returns"
        path, _, attribute = label.rpartition(".")
        owner = self.whole_model.get_submodule(path)
        return f"{attribute!r} of {f'{path!r}' if path else 'the model'} ({type(owner).__name__})"

    def _run_tail(self, hidden: Tensor) -> Tensor:
        """Return the outputs of a hidden state. Raises: PenstockError, where they are not made position by position."""
        segment, key = self._segment, (hidden.dtype, hidden.device, self.training)
        modules = {name: self.get_submodule(name) for name in segment.modules}
        if key not in self._tails:
            tensors = {name: tensor_of(self, name) for name in segment.tensors}

            def run(noted_modules: Mapping[str, nn.Module], positions: Tensor, **keywords: Tensor) -> Any:
                part_call = PartCall((positions,), keywords, is_first=False, is_training=self.training)
                return self._forward.run(segment, noted_modules, tensors, part_call, {})

            example = example_of(hidden)
            entry: Any = self._forward.entry
            run_with_batch = partial(run, **entry.example_keywords(example))
            self._tails[key] = tail_steps(run, run_with_batch, modules, example)
        return self._tails[key].run(modules, hidden)

    @property
    def batch_signature(self) -> BatchSignature:
        """How the whole model takes a batch, which a pipeline binds by it."""
        return self._forward.entry.batch_signature

    @property
    def working_modules(self) -> list[nn.Module]:
        """The submodules of the layer, which compilers and checkpoints take in its place.

        Around them runs the forward of the model, which ends by an exception.
        """
        return [self.get_submodule(name) for name in self._segment.modules]

    @property
    def shown_class(self) -> str:
        """The name of a class for messages: that of the submodule which the layer is called after, if there is one."""
        is_submodule = self.layer_name in self._segment.modules
        return type(self.get_submodule(self.layer_name) if is_submodule else self).__name__

    def extra_repr(self) -> str:
        """Return the points between which it runs."""
        return f"{self._segment.start or 'the begin'} .. {self._segment.stop or 'the end'}"


def part_class(signature: BatchSignature) -> type[CutPart]:
    """Return a class of parts whose forward names the keywords of a batch, by which a pipeline passes them."""

    def forward(self: CutPart, *inputs: Any, **keywords: Any) -> Any:
        return CutPart.forward(self, *inputs, **keywords)

    keyword_parameters = [item.replace(kind=item.KEYWORD_ONLY) for item in signature.keywords]
    inputs_name = "inputs"
    while inputs_name in signature.parameters:  # also models name an argument so
        inputs_name = f"_{inputs_name}"
    positional_parameters = [
        inspect.Parameter(name, kind) for name, kind in (("self", _POSITIONAL), (inputs_name, _VARIABLE))
    ]
    variable_parameters = [] if signature.var_keyword is None else [signature.var_keyword]
    forward.__signature__ = inspect.Signature([*positional_parameters, *keyword_parameters, *variable_parameters])  # type: ignore[attr-defined]
    return type("CutPart", (CutPart,), {"forward": forward})


_POSITIONAL, _VARIABLE = inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL


def _branch(root: nn.Module, name: str) -> tuple[nn.Module, str]:
    """Return the module in which the full `name` lies, and the name there; missing modules on the way are made."""
    *path, local_name = name.split(".")
    for step in path:
        if not isinstance(getattr(root, step, None), nn.Module):
            root.add_module(step, nn.Module())
        root = root.get_submodule(step)
    return root, local_name
