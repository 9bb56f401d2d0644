"""`Stage`: the layers of one consecutive part of the model on one rank. How they run is for `passes`."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import TypeVar

from torch import nn

from penstock.execute.losses.tails import Tail
from penstock.execute.split.own_weight_gradients import OwnWeightGradients
from penstock.execute.split.planner import SplitPlanner
from penstock.execute.stages.names import named_parameters
from penstock.execute.stages.signatures import taken_keywords
from penstock.execute.undocumented_modules import ModuleSnapshot

T = TypeVar("T")


class Stage:
    """The layers of one stage.

    `layers` maps names, as in the unsplit model, to modules; they are used in place. `first_layer` is the place of the
    first one in the unsplit model.
    """

    def __init__(self, index: int, layers: Mapping[str, nn.Module], first_layer: int = 0) -> None:
        self.index = index
        self.layers = dict(layers)
        self.first_layer = first_layer
        self.modules = list(self.layers.values())
        self.names = list(self.layers)
        self.taken_keywords = list(map(taken_keywords, self.modules))
        # The planner belongs to the stage, not to a program: split backwards of all programs share what it has learned.
        self.split_planner = SplitPlanner()
        self.own_weight_gradients = OwnWeightGradients(self.modules)
        self.tail: Tail | None = None
        """The last layer as a function of hidden states, where the loss applies it; None where the stage does."""
        self._snapshot: ModuleSnapshot | None = None  # not yet: tied parameters are put in place after this

    def defer_tail(self, tail: Tail) -> None:
        """Leave the last layer to the loss, which gets it as a function of hidden states."""
        self.tail = tail

    def parameters(self) -> Sequence[nn.Parameter]:
        """Return the parameters that the layers hold now; walks their modules only where they have changed."""
        if self._snapshot is None or not self._snapshot.is_current():
            self._snapshot = ModuleSnapshot(self.modules)
        return self._snapshot.parameters

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Return the parameters with the unsplit model's names; a parameter used twice is listed once."""
        return distinct(chain.from_iterable(named_parameters(*layer) for layer in self.layers.items()))

    def keyword_names(self) -> set[str]:
        """Return the keyword arguments that the layers can take; `ANY_KEYWORD` among them if one may take any."""
        return {name for accepted in self.taken_keywords for name in accepted.names()}

    @property
    def takes_microbatch_place(self) -> bool:
        """Whether a layer is told which microbatch it works on."""
        return any(accepted.takes_microbatch_place for accepted in self.taken_keywords)


def distinct(named_items: Iterable[tuple[str, T]]) -> list[tuple[str, T]]:
    """Drop what was already listed under another name, as a weight that two layers of this rank share."""
    items_by_id: dict[int, tuple[str, T]] = {}
    for name, item in named_items:
        items_by_id.setdefault(id(item), (name, item))
    return list(items_by_id.values())


def modules_of(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return all modules of some layers, each once, the layers themselves included."""
    return list(dict.fromkeys(module for layer in layers for module in layer.modules()))
