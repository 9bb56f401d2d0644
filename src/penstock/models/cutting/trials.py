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
from penstock.models.cutting.entry import Entry, PartCall
from penstock.models.cutting.frame import Frame, Template
from penstock.models.cutting.placeholders import copied
from penstock.models.cutting.routes import Routes, are_equal, have_equal_values
from penstock.models.cutting.state import changed_names
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
        """The keywords of the microbatch that ran last."""
        self._known_routes: dict[Any, Routes] = {}
        """The routes of this microbatch, by kind; where it has no keywords, those of all microbatches of a kind."""
        self._parts: set[str | None] = set()
        """The points at which the parts begin that have asked in this forward."""
        self._left_state: dict[str, Any] = {}
        """The attributes around the points that an earlier forward has left changed, by full name."""
        self._source_state: dict[str, Any] = {}
        """The state of the owner's modules of which the frames are copies."""

    def routes(self, part_call: PartCall, device: torch.device, start: str | None = None) -> Routes:
        """Return what parts need of one another in a microbatch; the part that asks begins at the point `start`.

        Raises:
            PenstockError: a part would need what cannot come to it, or the forward changes more than one process may
                repeat.
        """
        keywords = part_call.keywords
        is_known = keywords.keys() == self._keywords.keys()
        if not (is_known and all(value is self._keywords[name] for name, value in keywords.items())):
            self._keywords = dict(keywords)
            self._known_routes.clear()
            self._parts.clear()
        # Each part asks once in a forward; one that asks again begins another forward, before which the owner may have
        # changed something.
        if not self._parts or start in self._parts:
            self._parts.clear()
            self._follow_owner()
        self._parts.add(start)
        # Where a batch has no keywords, its shapes are those of the inputs of a part.
        input_kinds = () if keywords else tuple(map(_kind_of, tensors_in(part_call.inputs)))
        kind = (input_kinds, part_call.is_training, modes_of(device), device)
        if kind not in self._known_routes:
            if len(self._known_routes) >= MOST_KINDS:
                self._known_routes.clear()
            self._known_routes[kind] = self._checked_routes(device, part_call)
        return self._known_routes[kind]

    def frame(self, device: torch.device) -> Frame:
        """Return the frame on a device."""
        if device not in self._frames:
            self._frames[device] = Frame(self.template, device)
        return self._frames[device]

    def end_run(self, frame: Frame) -> None:
        """Give up a frame after a run of a forward that changes the modules around the points."""
        if self._left_state:
            self._frames.pop(frame.device, None)

    def _follow_owner(self) -> None:
        """Copy the modules around the points anew if the owner has changed something there."""
        source_state = self.template.state()
        if source_state != self._source_state:
            self._source_state = source_state
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
            raise PenstockError(
                f"the forward changes {(changed or list(names))[0]!r} for later forwards, but each stage runs it in "
                "its own number and order; let a submodule that is a point of the cut keep it as a saved buffer, hand "
                "on a loss by a ps.AuxiliaryLoss, or make it anew in each forward"
            )
        self._left_state = {name: copied(frame.value(name)) for name in names}
        self._frames.pop(device)
        return routes

    def _try(
        self, frame: Frame, part_call: PartCall, earlier_state: Mapping[str, Any], attempt: int = 1
    ) -> tuple[Routes, dict[str, Any]]:
        """Run the forward without values; return its routes, and the attributes that it leaves changed, by name."""
        frame.put_values({name: copied(value) for name, value in earlier_state.items()})
        trial = self._new_trial(frame, part_call)
        batch_tensors = list(tensors_in((part_call.inputs, dict(part_call.keywords))))
        batch_versions = list(map(version_of, batch_tensors))
        python_state = _drawn_outside()
        buffers: dict[str, Any] = {}
        trial.at_first_point = lambda: buffers.update(frame.buffer_state())
        with (
            restored_generators(frame.device),
            frame.running(trial, trial.labels, {}, is_training=part_call.is_training) as model,
        ):
            trial.add_saved_tensors(frame.saved_tensors())
            generator_state = torch.get_rng_state()
            output = self._call(model, replace(part_call, run=trial))
            changed_buffers = changed_names(buffers, frame.buffer_state() if buffers else {})
            has_drawn = not torch.equal(generator_state, torch.get_rng_state())
        routes = trial.finish(output)
        if changed_buffers:
            raise PenstockError(
                f"the forward changes the buffer {changed_buffers[0]!r} behind its first point, but the first layer "
                "alone holds and saves it; let a submodule hold it, which is a point of the cut"
            )
        if list(map(version_of, batch_tensors)) != batch_versions:
            raise PenstockError(
                f"the forward of {self.template.name} changes an argument of the batch in place, and "
                "each stage would change it again; let it change a clone()"
            )
        if _drawn_outside() != python_state or (has_drawn and not trial.has_draws):
            if attempt < MOST_ATTEMPTS:  # another thread may have drawn, as one of a data loader does
                return self._try(Frame(self.template, frame.device), part_call, earlier_state, attempt + 1)
            raise PenstockError(
                f"the forward of {self.template.name} draws random numbers between its submodules by Python's or "
                "NumPy's random, or by an operator that is not followed, as for a layer drop, so that each stage would "
                "draw others; draw by torch, as torch.rand does"
            )
        return routes, {name: copied(frame.value(name)) for name in frame.changed_names()}

    def _new_trial(self, frame: Frame, part_call: PartCall) -> Trial:
        template = self.template
        return Trial(template.positions, frame.device, part_call.is_training, template.modules, template.name)

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
