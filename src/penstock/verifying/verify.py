"""`ps.verify`: runs the unsplit model and its parts on the same batches, and names the first tensor that differs.

    unsplit   a copy of the model, plain autograd, one microbatch after another      ──┐
    parts     a pipeline on ranks that are threads, each with layers of its own      ──┴─► compared by name

Where something differs, both run once more with every module's results noted, which shows where it begins.
"""

import itertools
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from penstock.errors import ConfigError, PenstockError, PenstockWarning, count_of, described
from penstock.execute.batch.stream import Part
from penstock.execute.losses.loss import Loss
from penstock.execute.losses.model_loss import LayersWithLoss
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule
from penstock.planning import ScheduleLike
from penstock.verifying.batches import NO_TARGET, default_loss, read_batches
from penstock.verifying.calls import CallLog
from penstock.verifying.comparing import compare, tolerance_of
from penstock.verifying.draws import (
    functions_with_same_dropout,
    has_drawn,
    own_generators,
    seed_generators,
    without_dropout,
)
from penstock.verifying.observation import EVALUATION, GRADIENT, LOSS, OUTPUT, TRAINING, Observation
from penstock.verifying.parts import PartsRun, copied, is_points, layers_of_rank
from penstock.verifying.report import Difference, VerifyReport
from penstock.verifying.whole_model import Objective, WholeModel

DEFAULT_MICROBATCHES = 2
MIN_BATCHES = 2
"""A second batch, with other parameters, shows what the first one left behind."""
DEFAULT_RANKS = 2
MODES = (EVALUATION, TRAINING)
SAME_DROPOUT = "dropout drops the same places in each call: the model draws, and a pipeline draws in another order"
DROPOUT_OFF = "dropout is off: the model draws besides, and a pipeline draws in another order"
FAILED = "the parts fail, and the model does not"
NO_TRAINING = "training is not compared: the model draws random numbers, and not in dropout alone"


def verify(
    model: nn.Module,
    points_or_layers: Sequence[Any],
    *batches: Any,
    loss: Loss | None = None,
    schedule: ScheduleLike = "1f1b",
    ranks: int | None = None,
    microbatches: int | None = None,
    tolerance: float | None = None,
) -> VerifyReport:
    """Compare a model with its parts: outputs, losses, every gradient and every buffer, in both modes.

        report = ps.verify(model, ["blocks.*"], {"tokens": tokens, "target": labels}, loss=loss)
        print(report)

    `points_or_layers` are the points of `ps.cut`, or layers such as those of `from_transformers`. A batch is a tensor,
    a tuple of positional arguments, a dict of keywords, or a `ps.Part`; a dict and a `Part` may have a `target`.
    Without a `loss`, a mean of squares of the outputs is trained; with one, every batch needs a target. A batch that
    comes alone is run twice, and parameters shrink by a hundredth between batches, to notice what is stale.

    Everything runs in this process: the unsplit model as a copy, microbatch by microbatch, and the parts as a pipeline
    on `ranks` threads, 2 by default where there are two layers. `model` stays as it is, and so do the generators of
    random numbers. Both sides draw in other orders, so dropout drops the same places in each call; where a forward
    draws besides, dropout is set to 0.

    `tolerance` is the largest difference that counts as rounding, as a share of the largest value of its kind. By
    default it is 1e-12 in float64, 1e-5 in float32, and more in less precise types, so that `model.double()` shows
    most.

    The report's text is a table, notes, and a last line: right, wrong with the first tensor that differs, or refused.
    `report.is_right` says whether all is right, `report.differences` lists what differs, the first one first, and
    `report.raise_if_wrong()` raises a `PenstockError` with the last line.

    Raises:
        ConfigError: there is no batch, or one does not fit; the model is on the meta device, or on several, or cannot
            be copied; points are wrong. What the pipeline refuses is in the report instead.
    """
    device = _device_of(model)
    _require_layers(points_or_layers)
    is_transformers = isinstance(points_or_layers, LayersWithLoss)
    parts = read_batches(batches, device, labels=is_transformers)
    objective = _objective(points_or_layers, parts, loss, schedule, microbatches)
    parts = [Part(*part.args, target=_target(part), **part.kwargs) for part in parts]
    notes = []
    if len(parts) < MIN_BATCHES:
        notes.append("the one batch is run twice")
        parts *= MIN_BATCHES
    comparison = _Comparison(model, points_or_layers, parts, schedule, objective, device)
    with own_generators(device), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", PenstockWarning)  # of how a batch is cut, which a pipeline tells its user
        return comparison.report(ranks, tolerance, notes)


def _device_of(model: Any) -> torch.device:
    """Return the one device of a model. Raises: ConfigError."""
    if not isinstance(model, nn.Module):
        raise ConfigError(f"{described(model)}; expected an nn.Module, the unsplit model", key="model")
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    devices = {tensor.device: name for name, tensor in tensors.items()}
    for name, tensor in tensors.items():
        if tensor.is_meta:
            raise ConfigError(
                f"{name!r} is on the meta device, so there is nothing to compare with; make a small instance of the "
                "model with values",
                key="model",
            )
    if len(devices) > 1:
        places = " and ".join(f"{name!r} is on {device}" for device, name in itertools.islice(devices.items(), 2))
        raise ConfigError(f"{places}; move the model to one device", key="model")
    return next(iter(devices), torch.device("cpu"))


def _require_layers(points_or_layers: Any) -> None:
    if not isinstance(points_or_layers, Sequence) or not len(points_or_layers):
        raise ConfigError(
            f"{described(points_or_layers)}; expected the points of ps.cut, such as ['blocks.*'], or a list of layers",
            key="points_or_layers",
        )


def _objective(
    layers: Sequence[Any], parts: Sequence[Part], loss: Loss | None, schedule: ScheduleLike, microbatches: int | None
) -> Objective:
    """Return the loss: the caller's, that of a model of transformers where batches have targets, or a plain one."""
    number = microbatches or DEFAULT_MICROBATCHES
    if isinstance(schedule, Schedule | Program):
        number = schedule.num_microbatches
    has_targets = [part.target is not None for part in parts]
    if loss is not None:
        if not all(has_targets):
            raise ConfigError(
                f"batch {has_targets.index(False)} has no target, which the loss needs; pass a dict with 'target', or "
                "ps.Part(*args, target=...)",
                key="batches",
            )
        return Objective(loss, None, number, isinstance(layers, LayersWithLoss))
    if isinstance(layers, LayersWithLoss):
        if all(has_targets):
            return Objective(layers.loss, layers.count, number, is_transformers=True)
        return Objective(default_loss, None, number, is_transformers=True)
    return Objective(default_loss, None, number)


def _target(part: Part) -> Any:
    return NO_TARGET if part.target is None else part.target


@dataclass(slots=True, eq=False)
class _Comparison:
    """One call of `verify`."""

    model: nn.Module
    points_or_layers: Sequence[Any]
    batches: Sequence[Part]
    schedule: ScheduleLike
    objective: Objective
    device: torch.device

    def report(self, ranks: int | None, tolerance: float | None, notes: list[str]) -> VerifyReport:
        """Run both sides, and compare them."""
        own_layers = layers_of_rank(self.model, self.points_or_layers)
        num_layers = len(own_layers.layers)
        num_ranks = self._num_ranks(ranks, num_layers)
        roots = [self.model, *self._modules_given()]
        with ExitStack() as stack:
            observations, modes, draws_note = self._run_whole(stack, roots)
            notes = [*notes, *([draws_note] if draws_note else [])]
            parameters = dict(self.model.named_parameters())
            allowed = tolerance or tolerance_of(parameters, is_transformers=self.objective.is_transformers)
            title = (
                f"{type(self.model).__name__} in {count_of(num_layers, 'layer')} on {count_of(num_ranks, 'rank')}, "
                f"{_name_of(self.schedule)}, {count_of(len(self.batches), 'batch')} of "
                f"{count_of(self.objective.num_microbatches, 'microbatch')}; differences up to {allowed:g} are rounding"
            )
            report = VerifyReport(title, allowed, notes=tuple(notes))
            run = PartsRun(
                lambda: layers_of_rank(self.model, self.points_or_layers),
                self.schedule,
                self.objective,
                self.device,
                WholeModel(self.model, self.objective).first_names,
                has_same_dropout=bool(draws_note),
                is_silent=draws_note in (DROPOUT_OFF, NO_TRAINING),
                sets_training=not self.model.training or not _are_modules(own_layers.layers),
            )
            try:
                rank_observations = run.run(num_ranks, self.batches, modes)
                comparisons, differences = compare(observations, rank_observations, allowed)
                if differences:
                    differences = self._located(differences, run, num_ranks, modes, allowed)
            except Exception as error:
                return replace(report, refusal=_words_of(error))
            return replace(report, comparisons=tuple(comparisons), differences=tuple(differences))

    def _num_ranks(self, ranks: int | None, num_layers: int) -> int:
        if isinstance(self.schedule, Schedule | Program):
            return self.schedule.num_ranks if ranks is None else ranks
        return min(DEFAULT_RANKS, num_layers) if ranks is None else ranks

    def _modules_given(self) -> list[nn.Module]:
        """Return the modules among the layers, and the model that layers of transformers are built from."""
        items = [] if is_points(self.points_or_layers) else list(self.points_or_layers)
        items.append(getattr(self.points_or_layers, "whole", None))
        return [item for item in items if isinstance(item, nn.Module)]

    def _run_whole(self, stack: ExitStack, roots: Sequence[nn.Module]) -> tuple[list[Observation], Sequence[str], str]:
        """Run the unsplit model with as little changed as its draws allow; return what was run, and a note of it.

        Raises:
            ConfigError: evaluation draws random numbers, too.
        """
        observations, draws = self._observe_whole(MODES)
        if not draws:
            return observations, MODES, ""
        stack.enter_context(functions_with_same_dropout(is_on=True))
        observations, draws = self._observe_whole(MODES)
        if not draws:
            return observations, MODES, SAME_DROPOUT
        stack.enter_context(without_dropout(roots))
        for modes, note in ((MODES, DROPOUT_OFF), ((EVALUATION,), NO_TRAINING)):
            observations, draws = self._observe_whole(modes)
            if not draws:
                return observations, modes, note
        raise ConfigError(
            "its evaluation draws random numbers, so that no two of its outputs can be compared; pass "
            "training=self.training to its dropout, or draw outside of it",
            key="model",
        )

    def _observe_whole(self, modes: Sequence[str]) -> tuple[list[Observation], bool]:
        """Return what the unsplit model gives, and whether it gives something else with other random numbers."""
        seed = 0
        seed_generators(seed, self.device)
        observations = self._whole().run(self.batches, modes)
        if not has_drawn(seed, self.device):
            return observations, False
        seed_generators(seed + 1, self.device)
        _, differences = compare(observations, [self._whole().run(self.batches, modes)], 0.0)
        return observations, bool(differences)

    def _whole(self) -> WholeModel:
        own_model = copied(self.model)
        if not own_model.training:
            own_model.train()
        return WholeModel(own_model, self.objective)

    def _located(
        self,
        differences: Sequence[Difference],
        run: PartsRun,
        num_ranks: int,
        modes: Sequence[str],
        tolerance: float,
    ) -> list[Difference]:
        """Return the differences with the modules at which they begin, in the order of forwards and of backwards."""
        whole_log, logs = CallLog(), [CallLog() for _ in range(num_ranks)]
        whole = self._whole()
        whole_log.watch(whole.model.named_modules())
        whole.run(self.batches, modes)
        run.run(num_ranks, self.batches, modes, logs)
        module = whole_log.first_other(logs, tolerance)
        located = [
            replace(difference, module=module) if difference.kind in (OUTPUT, LOSS) else difference
            for difference in differences
        ]

        def place(difference: Difference) -> tuple[int, int]:
            # A wrong gradient spoils those of all modules that are called before, so the last one is where it begins.
            order = -whole_log.place(difference.module) if difference.kind == GRADIENT else 0
            return (difference.batch, order)

        groups = itertools.groupby(located, key=lambda difference: (difference.mode, difference.batch, difference.kind))
        return [difference for _, group in groups for difference in sorted(group, key=place)]


def _words_of(error: Exception) -> str:
    """Return the words of a refusal; of another failure, that the unsplit model does not have it."""
    words = str(error).partition("\n\n")[0] if isinstance(error, PenstockError) else f"{type(error).__name__}: {error}"
    cause = error.__cause__ or error
    return words if isinstance(cause, PenstockError) else f"{FAILED}: {words}"


def _are_modules(layers: Sequence[Any]) -> bool:
    return all(isinstance(layer, nn.Module) for layer in layers)


def _name_of(schedule: ScheduleLike) -> str:
    return schedule.name if isinstance(schedule, Schedule | Program) else str(schedule)
