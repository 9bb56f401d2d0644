"""`TailSteps`: the end of a cut model, as calls that can be made again for any positions of a hidden state.

    forward of the model    ...  blocks.5   norm(hidden)   head(hidden[:, slice])   logits / 30   tanh   * 30
    steps                                   norm           getitem, head            div           tanh   mul

A loss with a large vocabulary applies the end of a model to some positions at a time. To run the model's own forward
for each of them, past stand-ins for all other blocks, takes milliseconds; so it runs once for a few positions, and what
it does with the hidden state is noted: calls of submodules as a whole, and functions of torch between them. Two runs
of other lengths must do the same, but for numbers that are the length itself; and so must one with the mask and the
positions of a batch, which a loss does not have.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.overrides import TorchFunctionMode

from penstock.errors import PenstockError
from penstock.models.cutting.draws import UnknownDraws
from penstock.models.cutting.trees import items_in, map_items, tensors_in
from penstock.models.cutting.trial import modes_of

NUM_PROBED = 3
"""Positions of the longer one of two runs."""
TOLERANCE = 1e-2
"""Largest difference between results of positions one by one and together, as a share of the largest result."""
VALUE_QUERIES = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__"})
"""Methods of a tensor that return its values to Python, which a step cannot follow."""


class ValueRef:
    """Stands in the arguments of a step for a tensor that the tail has computed, by its index."""

    def __init__(self, index: int) -> None:
        self.index = index

    def __eq__(self, other: object) -> bool:
        """Whether the other one stands for the same tensor."""
        return isinstance(other, ValueRef) and other.index == self.index

    def __hash__(self) -> int:
        return hash(self.index)


class LengthRef:
    """Stands in the arguments of a step for the number of positions, as in a view of them."""


@dataclass(frozen=True, slots=True)
class Step:
    """One call of a submodule or a function."""

    function: Any
    """The function of torch, or the name of a submodule."""
    args: Any
    kwargs: Any
    num_outputs: int
    """Number of tensors in the result."""


@dataclass(frozen=True, slots=True, eq=False)
class TailSteps:
    """The calls that make outputs of a hidden state, whose index is 0."""

    steps: tuple[Step, ...]
    output: int
    """The index of the output."""

    def __deepcopy__(self, memo: dict[int, Any]) -> "TailSteps":
        """It holds no values, so that copies of a layer share it."""
        return self

    def run(self, modules: Mapping[str, nn.Module], hidden: Tensor) -> Tensor:
        """Return the outputs of a hidden state [1, positions, width]; `modules` are the submodules by name."""
        values = [hidden]

        def filled(item: Any) -> Any:
            if isinstance(item, LengthRef):
                return hidden.shape[1]
            return values[item.index] if isinstance(item, ValueRef) else item

        for step in self.steps:
            function = modules[step.function] if isinstance(step.function, str) else step.function
            result = function(*map_items(filled, step.args), **map_items(filled, step.kwargs))
            values += tensors_in(result) if step.num_outputs else []
        return values[self.output]


class _Recorder(TorchFunctionMode):
    """Notes what is done with a hidden state, and with what comes of it."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.steps: list[Step] = []
        self._values = [hidden]  # kept, so that no other tensor gets an id of theirs
        self._index_by_id = {id(hidden): 0}
        self._is_within_module = False
        self._modes = modes_of(hidden.device)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._is_within_module:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        follows = any(id(item) in self._index_by_id for item in items_in((args, kwargs)))
        if follows and name in VALUE_QUERIES:
            raise PenstockError(f"it decides by values ({name})")
        result = func(*args, **kwargs)
        if follows and (tensors_in(result) or result is None):
            self._note(func, args, kwargs, result)
        return result

    @contextmanager
    def within_module(self) -> Iterator[None]:
        """Note nothing of what a submodule does inside."""
        was_within, self._is_within_module = self._is_within_module, True
        try:
            yield
        finally:
            self._is_within_module = was_within

    def note_module(self, name: str, args: Any, kwargs: Any, result: Any) -> None:
        """Note the call of a submodule."""
        if not self._is_within_module:
            self._note(name, args, kwargs, result)

    def index_of(self, output: Any) -> int:
        """Return the index of a tensor. Raises: PenstockError, if it does not come of the hidden state."""
        if id(output) not in self._index_by_id:
            raise PenstockError("its output is more than one tensor that is made of the hidden state")
        return self._index_by_id[id(output)]

    def _note(self, function: Any, args: Any, kwargs: Any, result: Any) -> None:
        outputs = tensors_in(result)
        if modes_of(self._values[0].device) != self._modes:
            raise PenstockError("it computes within torch.no_grad() or torch.autocast(), which its calls do not say")
        plain_args = tuple(tuple(item) if isinstance(item, torch.Size) else item for item in args)
        step = Step(function, map_items(self._reference, plain_args), map_items(self._reference, kwargs), len(outputs))
        self.steps.append(step)
        for output in outputs:
            self._index_by_id[id(output)] = len(self._values)
            self._values.append(output)

    def _reference(self, item: Any) -> Any:
        if id(item) in self._index_by_id:
            return ValueRef(self._index_by_id[id(item)])
        if isinstance(item, Tensor) and (item.dim() or item.requires_grad):
            raise PenstockError(f"it computes with a tensor of shape {tuple(item.shape)} outside of its submodules")
        return item


class _NotedModule(nn.Module):
    """A submodule of the tail, whose calls are noted."""

    def __init__(self, name: str, module: nn.Module, recorder: _Recorder) -> None:
        super().__init__()
        self.module = module
        self._name, self._recorder = name, recorder

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._recorder.within_module():
            result = self.module(*args, **kwargs)
        self._recorder.note_module(self._name, args, kwargs, result)
        return result

    def get_submodule(self, target: str) -> nn.Module:
        return self.module.get_submodule(target)


RunForward = Callable[[Mapping[str, nn.Module], Tensor], Any]
"""Runs the model's forward from a hidden state [1, positions, width], with these submodules."""


def example_of(hidden: Tensor) -> Tensor:
    """Return `NUM_PROBED` positions of a hidden state [1, positions, width], some of them twice if it has fewer."""
    hidden = hidden.detach()
    return hidden.repeat(1, NUM_PROBED, 1)[:, :NUM_PROBED] if hidden.shape[1] < NUM_PROBED else hidden[:, :NUM_PROBED]


def tail_steps(
    run: RunForward, run_with_batch: RunForward, modules: Mapping[str, nn.Module], hidden: Tensor
) -> TailSteps:
    """Return what `run` does from a hidden state [1, positions, width] to its output.

    `hidden` is an example with `NUM_PROBED` positions. `run_with_batch` is `run` with the keywords of a batch, which
    the end of a model must not use: a loss does not have them.

    Raises:
        PenstockError: the model does not make its outputs position by position, of the hidden state alone.
    """
    try:
        return _tail_steps(run, run_with_batch, modules, hidden)
    except PenstockError as error:
        raise PenstockError(
            f"the end of the model cannot be applied to some positions at a time: {error}. Take a loss of the outputs, "
            "such as the model's own"
        ) from error


def _tail_steps(
    run: RunForward, run_with_batch: RunForward, modules: Mapping[str, nn.Module], hidden: Tensor
) -> TailSteps:
    # Gradients are on, so that a part of the forward which switches them off shows. The checkpoint around the chunk, if
    # any, must not count what is saved here: its second run has the steps.
    with torch.enable_grad(), saved_tensors_hooks(_unchanged, _unchanged):
        longer, expected = _record(run, modules, hidden)
        shorter, _ = _record(run, modules, hidden[:, :-1])
        steps = _for_any_length(longer, shorter)
        if not _is_same(longer, _record(run_with_batch, modules, hidden)[0]):
            raise PenstockError("it computes with the mask or the positions of the batch")
    with torch.no_grad(), UnknownDraws() as draws:
        together = steps.run(modules, hidden.clone())
        parts = torch.split(hidden.clone(), [1, NUM_PROBED - 1], dim=1)
        apart = torch.cat([steps.run(modules, part) for part in parts], dim=1)
    with torch.no_grad():
        # Draws are not watched here: a batch of another shape has a trial first, in which the blocks draw, too.
        as_rows = run(modules, hidden.clone().transpose(0, 1)).transpose(0, 1)
    scale = expected.abs().max()
    for result in (together, apart, as_rows):
        if result.shape != expected.shape or bool((result - expected).abs().max() > TOLERANCE * scale):
            raise PenstockError(
                "what it makes of a position depends on other ones, on other rows, or on random numbers"
            )
    if draws.name:
        raise PenstockError(f"it draws random numbers by {draws.name}")
    return steps


def _unchanged(tensor: Tensor) -> Tensor:
    return tensor


def _record(run: RunForward, modules: Mapping[str, nn.Module], hidden: Tensor) -> tuple[TailSteps, Tensor]:
    """Run the forward once; return its steps, and its output."""
    hidden = hidden.clone()  # the forward may change it in place
    recorder = _Recorder(hidden)
    noted = {name: _NotedModule(name, module, recorder) for name, module in modules.items()}
    for name, module in modules.items():
        noted[name].training = module.training
    with recorder:
        output = run(noted, hidden)
    return TailSteps(tuple(recorder.steps), recorder.index_of(output)), output.detach()


def _for_any_length(longer: TailSteps, shorter: TailSteps) -> TailSteps:
    """Return the steps of two runs, with references in the place of the length. Raises: PenstockError, if they differ.

    `longer` are those of a run with `NUM_PROBED` positions, `shorter` those of one with a position less.
    """
    items = iter(items_in(shorter.steps))

    def merged(item: Any) -> Any:
        other = next(items, None)
        if (item, other) == (NUM_PROBED, NUM_PROBED - 1):
            return LengthRef()
        if not _is_equal(item, other):
            raise PenstockError("it does something else for another number of positions")
        return item

    steps = map_items(merged, longer.steps)
    if longer.output != shorter.output or next(items, None) is not None:
        raise PenstockError("it does something else for another number of positions")
    return TailSteps(steps, longer.output)


def _is_same(steps: TailSteps, others: TailSteps) -> bool:
    items, other_items = list(items_in(steps.steps)), list(items_in(others.steps))
    has_equal_items = len(items) == len(other_items) and all(map(_is_equal, items, other_items))
    return has_equal_items and steps.output == others.output


def _is_equal(item: Any, other: Any) -> bool:
    if isinstance(item, Tensor) and isinstance(other, Tensor):
        return torch.equal(item, other)
    return type(item) is type(other) and bool(item == other)
