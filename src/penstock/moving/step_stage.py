"""A stage that is run by a forward step of Megatron-LM's form: data in, output and a function for the loss out.

The function for the loss is called where the pipeline calls its own, right after the forward that returned it, and what
it reports goes the way of what any loss function reports (`StepResult.reported`).

forward_step_func(data_iterator, model) -> (output, loss_func)
loss_func(output) -> (loss, reported)                   the mean of the microbatch
loss_func(output) -> (sum, num_tokens, reported)        the sum over its tokens, and their number
loss_func(output, non_loss_data=True) -> anything       where outputs are collected instead of losses
"""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from penstock.errors import ConfigError, PipelineError
from penstock.execute.losses.output import LossOutput

ForwardStep = Callable[..., tuple[Any, Callable[..., Any]]]
CountTokens = Callable[[Any], float | Tensor]


@dataclass(frozen=True, slots=True)
class RoutePlace:
    """The position of a model part in the model; a forward step that has a parameter `place` gets it."""

    stage: int
    """The position of the part on the route that a microbatch travels; with two routes, each begins with 0."""
    num_stages: int
    """The number of stages of the route."""
    part: int
    """The index of the part among the model parts of its rank."""

    @property
    def is_first(self) -> bool:
        return self.stage == 0

    @property
    def is_last(self) -> bool:
        return self.stage == self.num_stages - 1


@dataclass(slots=True, eq=False)
class StepCall:
    """The arguments of one call of the `ForwardBackward`, which all stages of a rank run."""

    forward_step: ForwardStep
    iterators: list[Any]
    """The data of each model part of the rank; None where its forward step takes none."""
    num_microbatches: int
    is_forward_only: bool = False
    collects_non_loss_data: bool = False


class StepLoss:
    """The loss function of a rank's pipeline: that of the forward step that was run last."""

    def __init__(self) -> None:
        self._next: Callable[[Any], LossOutput] | None = None

    def follow(self, loss: Callable[[Any], LossOutput] | None) -> None:
        """Set the loss function for the output of the forward step that has just run; None drops it."""
        self._next = loss

    def __call__(self, output: Any, target: object) -> LossOutput:
        loss, self._next = self._next, None
        assert loss is not None
        return loss(output)


class StepStage(nn.Module):
    """A model part that takes its input by `set_input_tensor`; on the last stage it hands its loss to `step_loss`.

    Raises:
        ConfigError: a part behind the first has no `set_input_tensor`, neither itself nor inside its wrappers.
    """

    def __init__(
        self, model: nn.Module, place: RoutePlace, count_tokens: CountTokens | None = None, *, step_loss: StepLoss
    ) -> None:
        super().__init__()
        self.model = model
        self.place = place
        self._step_loss = step_loss
        self._count_tokens = count_tokens
        self._set_input = _input_setter(model, place)
        self._call: StepCall | None = None
        self._data: Any = None
        self._counts: list[float] = []
        self._failure: Exception | None = None

    def begin(self, call: StepCall) -> None:
        """Begin a call, to which the forwards until `end` belong; on the last stage, count its tokens if it must."""
        self._call = call
        self._data = call.iterators[self.place.part]
        self._counts = []
        self._failure = None
        count_tokens = self._count_tokens
        if not self.place.is_last or count_tokens is None or call.collects_non_loss_data:
            return
        try:
            if self._data is None:
                raise ConfigError("is None on the last stage, but count_tokens needs its data", key="data_iterator")
            items = list(islice(self._data, call.num_microbatches))
            self._counts = [float(count_tokens(item)) for item in items]
            self._data = iter(items)
        except Exception as error:  # the first forward raises it, where it ends the step on all ranks
            self._failure = error

    def loss_targets(self) -> list[Tensor]:
        """Return, per microbatch, the number of tokens that its loss is the mean of, or 1 where none are counted."""
        assert self._call is not None
        # A batch that ends too early has a count for the missing ones too: the forward then says what is missing.
        counts = [*self._counts, *[1.0] * self._call.num_microbatches][: self._call.num_microbatches]
        return [torch.tensor(count, dtype=torch.float64) for count in counts]

    def end(self) -> None:
        """Forget the call."""
        self._call, self._data = None, None
        self._step_loss.follow(None)

    def forward(self, *received: Any, microbatch: int) -> Any:
        """Run the user's forward step on one microbatch; return its output, which the next stage receives.

        `received` is the output of the stage before, empty on the first stage. The forward step is Megatron-LM's: it
        takes a data iterator and the model, and returns the output and a loss function. It may raise what it likes; a
        StopIteration becomes a PipelineError.
        """
        call = self._call
        if call is None:
            raise PipelineError(
                f"stage {self.place.stage}: no forward step is given outside of a call of forward_backward_func; call "
                "that function, not a step of its pipeline"
            )
        if self._failure is not None:
            raise self._failure
        self._set_input(_as_list(received))
        try:
            takes_place = "place" in inspect.signature(call.forward_step).parameters
            returned = call.forward_step(self._data, self.model, **({"place": self.place} if takes_place else {}))
        except StopIteration as error:
            raise PipelineError(
                f"stage {self.place.stage}: the data ended at microbatch {microbatch} of {call.num_microbatches}; give "
                "an iterator with one item per microbatch on every rank that takes data"
            ) from error
        except TypeError as error:
            if self._data is not None:
                raise
            raise PipelineError(
                f"stage {self.place.stage}: the forward step failed ({error}), and data_iterator is None on this rank; "
                "if it takes data here, give this rank an iterator, too"
            ) from error
        finally:
            self._set_input([None])  # the model must not keep a microbatch's input alive
        output, loss_func = _output_and_loss_func(returned)
        if self.place.is_last:  # the pipeline calls the loss with this output next
            self._step_loss.follow(partial(self._loss, call, loss_func, microbatch))
        return output

    def _loss(self, call: StepCall, loss_func: Callable[..., Any], microbatch: int, output: Any) -> LossOutput:
        """Return the mean loss of a microbatch and what its loss function reported. Raises: PipelineError."""
        if call.collects_non_loss_data:
            return LossOutput(torch.zeros(()), reported=loss_func(output, non_loss_data=True))
        match loss_func(output):
            case (loss, reported):
                return LossOutput(self._mean(loss, None, microbatch), reported=reported)
            case (total, num_tokens, reported):
                return LossOutput(self._mean(total, num_tokens, microbatch), reported=reported)
            case returned:
                raise PipelineError(
                    f"microbatch {microbatch}: the loss function returned a {type(returned).__name__}; expected "
                    "(loss, reported) or (sum, num_tokens, reported)"
                )

    def _mean(self, loss: Tensor, num_tokens: Any, microbatch: int) -> Tensor:
        """Return the mean loss of a microbatch: the loss itself, or the sum of it over the number of its tokens."""
        if self._count_tokens is None:
            return loss if num_tokens is None else loss / torch.as_tensor(num_tokens).clamp(min=1)
        expected = self._counts[microbatch]
        if num_tokens is None or float(num_tokens) != expected:
            description = "no number of tokens" if num_tokens is None else f"{float(num_tokens):g} tokens"
            raise PipelineError(
                f"microbatch {microbatch}: the loss function returned {description}, but count_tokens counted "
                f"{expected:g}; return (sum, num_tokens, reported) with the number that count_tokens gives"
            )
        return loss / max(expected, 1.0)


def _input_setter(model: nn.Module, place: RoutePlace) -> Callable[[list[Any]], object]:
    """Return the `set_input_tensor` of the model, or of the module inside its wrappers. Raises: ConfigError."""
    inner: Any = model
    while inner is not None:
        setter: Callable[[list[Any]], object] | None = getattr(inner, "set_input_tensor", None)
        if setter is not None:
            return setter
        inner = getattr(inner, "module", None)
    if place.is_first:
        return lambda tensors: None  # it takes data alone
    raise ConfigError(
        f"part {place.part} of the model is stage {place.stage} and has no set_input_tensor, so what stage "
        f"{place.stage - 1} sends cannot reach it; add the method, which is given a list of tensors",
        key="model",
    )


def _output_and_loss_func(returned: object) -> tuple[Any, Callable[..., Any]]:
    """Return the output and the loss function that a forward step returned. Raises: PipelineError for anything else."""
    if isinstance(returned, tuple) and len(returned) == 2 and callable(returned[1]):
        return returned
    description = f"{len(returned)} values" if isinstance(returned, tuple) else f"a {type(returned).__name__}"
    raise PipelineError(
        f"forward_step_func returned {description}; expected the pair (output, loss_func), on every stage alike"
    )


def _as_list(received: tuple[Any, ...]) -> list[Any]:
    """Return the inputs of a stage as `set_input_tensor` takes them: [None] for the first stage."""
    if not received:
        return [None]
    (value,) = received
    return list(value) if isinstance(value, (tuple, list)) else [value]
