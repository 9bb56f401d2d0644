"""The parameters of one rank as its modules hold them now, since a caller may put others in their place.

`load_state_dict(assign=True)` and `layer.weight = nn.Parameter(...)` do that. What was made for the parameters before,
above all the exchange of tied gradients, would go on with the old ones, and the copies of a tied parameter drift apart.
"""

from torch import nn

from penstock.errors import ConfigError
from penstock.execute.stages.assemble import Assembly


class OwnParameters:
    """Which parameters the layers of one rank have, and where."""

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self.named = assembly.named_parameters()
        """Each once, with its name in the unsplit model."""
        self._held = self._look()

    def refresh(self) -> bool:
        """Look which parameters were replaced since the last look; return whether any was.

        Raises:
            ConfigError: a tied one was, so that its copies are tied no more.
        """
        if all(getattr(module, name, None) is parameter for module, name, parameter in self._held):
            return False
        self._require_ties()
        self.named = self._assembly.named_parameters()
        self._held = self._look()
        return True

    def _look(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        layers = [layer for stage in self._assembly.stages for layer in stage.layers.values()]
        modules = {id(module): module for layer in layers for module in layer.modules()}.values()
        return [
            (module, name, parameter)
            for module in modules
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        ]

    def _require_ties(self) -> None:
        """Make sure that what was one object is one still, and that no copy of another rank's was replaced."""
        copies = self._assembly.tied_copies.values()
        tied = {id(parameter) for copy in copies for parameter in copy.parameters.values()}
        names = {id(parameter): name for name, parameter in self.named}
        now: dict[int, object] = {}
        for module, name, parameter in self._held:
            new = getattr(module, name, None)
            is_replaced = new is not parameter and id(parameter) in tied
            if is_replaced or now.setdefault(id(parameter), new) is not new:
                raise ConfigError(
                    f"{names[id(parameter)]!r} is tied, but was replaced by another parameter after the pipeline was "
                    "made, so that its copies would drift apart; change its values in place, as load_state_dict() "
                    "does without assign=True, or make a new Pipeline",
                    key="layers",
                )
