"""`Trials`: finds what the parts of a stage need of one another, microbatch by microbatch, on one thread.

A forward of the model that keeps something for later forwards, such as a number of calls, is refused here: each stage
runs it in another number and order than one process.
"""

import random
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.errors import PenstockError
from penstock.models.auxiliary import AuxiliaryLoss
from penstock.models.cutting.entry import Entry, PartCall
from penstock.models.cutting.frame import Frame, Template
from penstock.models.cutting.outside_state import OutsideState, refuse_exact_types
from penstock.models.cutting.placeholders import copied
from penstock.models.cutting.reached_code import ReachedCode
from penstock.models.cutting.routes import Routes, are_equal, have_equal_values
from penstock.models.cutting.state import changed_names, fingerprint
from penstock.models.cutting.trees import tensors_in
from penstock.models.cutting.trial import Trial, modes_of
from penstock.models.cutting.undocumented import version_of

MOST_ATTEMPTS = 4
"""Number of runs in a row that must find a draw of Python's generator, which all threads share."""
MOST_KINDS = 16
"""Number of kinds of batches without keywords whose routes are remembered."""


class Trials:
    """The frames of one thread, and the routes of the microbatch that it ran last."""

    def __init__(self, template: Template, entry: Entry) -> None:
        self.template, self._entry = template, entry
        self._frames: dict[torch.device, Frame] = {}
        self._keywords: Mapping[str, Any] = {}
        """The keywords of the microbatch that ran last; kept, so that no other object gets an id of theirs."""
        self._keyword_prints: dict[str, Any] = {}
        self._known_routes: dict[Any, Routes] = {}
        """The routes of this microbatch, by kind; where it has no keywords, those of all microbatches of a kind."""
        self._parts: set[str | None] = set()
        """The points at which the parts begin that have asked in this step, or in this forward outside of one."""
        self._left_state: dict[str, Any] = {}
        """The attributes around the points that an earlier forward has left changed, by full name."""
        self._source_state: dict[str, Any] = {}
        """The state of the owner's modules of which the frames are copies."""
        self._source_tensors: dict[str, Tensor] = {}
        """Copies of the tensors around the points that the frames copy, by name: `.data` changes them uncounted."""
        self._outside = OutsideState(ReachedCode(()))
        """What the forward uses outside of modules."""
        self._outside_state: dict[str, Any] = {}
        self._is_in_step = False
        """Whether a step has begun, before which the owner's modules were looked at."""
        self.owner_version = object()
        """Another object as soon as something around the points is found changed by the owner."""

    def begin_step(self, start: str | None) -> None:
        """Follow what the owner has changed, once for all forwards of a step; the part that asks begins at `start`.

        Raises:
            PenstockError: the owner has replaced something that parts hold.
        """
        self._follow_before(start)
        self._is_in_step = True

    def end_step(self) -> None:
        """End a step; a forward outside of one follows the owner itself."""
        self._is_in_step = False
        self._parts.clear()

    def routes(self, part_call: PartCall, device: torch.device, start: str | None = None) -> Routes:
        """Return what parts need of one another in a microbatch; the part that asks begins at the point `start`.

        Raises:
            PenstockError: a part would need what cannot come to it, or the forward changes more than one process may
                repeat.
        """
        keywords = part_call.keywords
        prints = {name: fingerprint(value) for name, value in keywords.items()}
        if prints != self._keyword_prints:
            self._keywords, self._keyword_prints = dict(keywords), prints
            self._known_routes.clear()
            self._parts.clear()
        if not self._is_in_step:
            self._follow_before(start)
        # Where a batch has no keywords, its shapes are those of the inputs of a part.
        input_kinds = () if keywords else tuple(map(_kind_of, tensors_in(part_call.inputs)))
        kind = (input_kinds, part_call.is_training, modes_of(device), device)
        if kind not in self._known_routes:
            if len(self._known_routes) >= MOST_KINDS:
                self._known_routes.clear()
            try:
                self._known_routes[kind] = self._checked_routes(device, part_call)
            except BaseException:
                self.give_up(device)
                raise
        return self._known_routes[kind]

    def frame(self, device: torch.device) -> Frame:
        """Return the frame on a device."""
        if device not in self._frames:
            self._frames[device] = Frame(self.template, device)
        return self._frames[device]

    def end_run(self, frame: Frame) -> None:
        """Give up a frame after a run of a forward that changes the modules around the points."""
        if self._left_state:
            self.give_up(frame.device)

    def give_up(self, device: torch.device) -> None:
        """Use a frame no more: a forward has changed it, or was ended by an error on the way."""
        self._frames.pop(device, None)

    def _follow_before(self, start: str | None) -> None:
        """Follow the owner before a step, or before a forward outside of one.

        Each part asks once in either; one that asks again begins the next, before which the owner may have changed
        something.
        """
        if not self._parts or start in self._parts:
            self._parts.clear()
            self._follow_owner()
        self._parts.add(start)

    def _follow_owner(self) -> None:
        """Copy the modules around the points anew if the owner has changed something there. Raises: PenstockError."""
        template = self.template
        template.require_held_items()
        source_state, outside_state = template.state(), self._outside.state()
        if source_state != self._source_state:
            code = ReachedCode(*template.code_around())
            refuse_exact_types(code)
            self._outside = OutsideState(code)
            outside_state = self._outside.state()
        elif outside_state == self._outside_state and have_equal_values(
            template.tensors_around(), self._source_tensors
        ):
            return
        self._source_state, self._outside_state = source_state, outside_state
        self._source_tensors = {name: tensor.detach().clone() for name, tensor in template.tensors_around().items()}
        self.owner_version = object()
        self._frames.clear()
        self._known_routes.clear()
        self._left_state.clear()

    def _checked_routes(self, device: torch.device, part_call: PartCall) -> Routes:
        """Find the routes, and make sure that the forward keeps nothing for later forwards. Raises: PenstockError."""
        frame = self.frame(device)
        routes, left_state = self._try(frame, part_call, {})
        if not (left_state or self._left_state):
            return routes
        # What the forward leaves must not matter to later ones, which other stages run in another number and order:
        # with it, the forward must do and leave the same as without. So does one that makes a table anew for each
        # length, and one that counts does not.
        frame = Frame(self.template, device)
        names = {**self._left_state, **left_state}
        earlier_state = self._left_state or left_state
        try:
            other_routes, _ = self._try(frame, part_call, earlier_state)
            is_equal = are_equal(routes, other_routes)
        except PenstockError:
            is_equal = False
        fresh_state = {name: left_state.get(name, frame.source_value(name)) for name in names}
        changed = [name for name in names if not have_equal_values(frame.value(name), fresh_state[name])]
        if changed or not is_equal:
            raise PenstockError(_keeps_state((changed or list(names))[0], frame))
        self._left_state = {name: copied(frame.value(name)) for name in names}
        self._frames.pop(device)
        return routes

    def _try(
        self, frame: Frame, part_call: PartCall, earlier_state: Mapping[str, Any], attempt: int = 1
    ) -> tuple[Routes, dict[str, Any]]:
        """Run the forward without values; return its routes, and the attributes that it leaves changed, by name."""
        frame.put_values({name: copied(value) for name, value in earlier_state.items()})
        trial = self._new_trial(frame, part_call)
        batch_tensors = tensors_in((part_call.inputs, dict(part_call.keywords)))
        batch_versions = list(map(version_of, batch_tensors))
        python_state, outside_state = _drawn_outside(), self._outside.state()
        buffers: dict[str, Any] = {}
        trial.at_first_point = lambda: buffers.update(frame.buffer_state())
        is_graded = torch.is_grad_enabled()
        with (
            restored_generators(frame.device),
            torch.inference_mode(False),  # in which changes in place are not counted
            torch.set_grad_enabled(is_graded),
            frame.running(trial, trial.labels, {}, is_training=part_call.is_training) as model,
        ):
            trial.add_saved_tensors(frame.saved_tensors())
            with trial.unknown_draws:
                output = self._call(model, replace(part_call, run=trial))
            changed_buffers = changed_names(buffers, frame.buffer_state() if buffers else {})
        routes = trial.finish(output)
        if changed_buffers:
            raise PenstockError(
                f"the forward changes the buffer {changed_buffers[0]!r} behind its first point, but the first layer "
                "alone holds and saves it; let a submodule hold it, which is a point of the cut"
            )
        changed_outside = changed_names(outside_state, self._outside.state())
        if changed_outside:
            raise PenstockError(
                f"the forward of {self.template.name} changes {changed_outside[0]} around its points, but each stage "
                "runs it in its own number and order; let a submodule that is a point of the cut keep it as a saved "
                "buffer, or make it anew in each forward"
            )
        if list(map(version_of, batch_tensors)) != batch_versions:
            raise PenstockError(
                f"the forward of {self.template.name} changes an argument of the batch in place, and "
                "each stage would change it again; let it change a clone()"
            )
        is_drawn_outside = _drawn_outside() != python_state
        if is_drawn_outside and attempt < MOST_ATTEMPTS:  # another thread may have drawn, as one of a data loader does
            return self._try(Frame(self.template, frame.device), part_call, earlier_state, attempt + 1)
        drawn_by = trial.unknown_draws.name or ("Python's or NumPy's random" if is_drawn_outside else "")
        if drawn_by:
            raise PenstockError(
                f"the forward of {self.template.name} draws random numbers between its submodules by {drawn_by}, which "
                "is not followed, so that each stage would draw others; draw by a function of torch, as torch.rand is"
            )
        left_names = frame.changed_names()
        for name in left_names:
            # Its values are unknown here: what it has got in place comes from submodules.
            if any(not tensor.is_meta and trial.labels.labels_of(tensor) for tensor in tensors_in(frame.value(name))):
                raise PenstockError(_keeps_state(name, frame))
        return routes, {name: copied(frame.value(name)) for name in left_names}

    def _new_trial(self, frame: Frame, part_call: PartCall) -> Trial:
        template = self.template
        trial = Trial(template.positions, frame.device, part_call.is_training, template.modules, template.name)
        trial.labels.owner_parameters = template.parameters
        return trial

    def _call(self, model: nn.Module, part_call: PartCall) -> Any:
        try:
            return self._entry.call(model, part_call)
        except PenstockError:
            raise
        except Exception as error:
            raise PenstockError(
                f"the forward fails where it runs without what its submodules compute: {type(error).__name__}: "
                f"{error}. What it computes around its submodules must not depend on values; put it into one of them"
            ) from error


def _keeps_state(name: str, frame: Frame) -> str:
    """Return the words for a forward that changes an attribute around the points for later forwards."""
    module = frame.model.get_submodule(name.rpartition(".")[0])
    if isinstance(module, AuxiliaryLoss):
        return (
            f"the forward adds to the ps.AuxiliaryLoss {module.name!r} around its points, where each stage would add "
            "to it; let a submodule that is a point of the cut hold it, and add to it there"
        )
    return (
        f"the forward changes {name!r} for later forwards, but each stage runs it in its own number and order; let a "
        "submodule that is a point of the cut keep it as a saved buffer, hand on a loss by a ps.AuxiliaryLoss in such "
        "a submodule, or make it anew in each forward"
    )


def _drawn_outside() -> Any:
    """Return the states of the generators of Python and NumPy."""
    state = np.random.get_state(legacy=False)["state"]
    return random.getstate(), state["pos"], state["key"].tobytes()


def _kind_of(tensor: Tensor) -> Any:
    return tuple(tensor.shape), tensor.dtype, tensor.requires_grad


def restored_generators(device: torch.device) -> AbstractContextManager[None]:
    """Leave torch's generators as they are, whatever is drawn inside."""
    if device.type in ("cpu", "meta"):
        return torch.random.fork_rng(devices=[])
    return torch.random.fork_rng(devices=[device], device_type=device.type)
