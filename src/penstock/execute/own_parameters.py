"""`OwnParameters`: what the modules of a rank hold now, since callers may put other parameters in their place."""

from collections.abc import Iterable

from torch import nn

from penstock.errors import ConfigError
from penstock.execute.stages.assemble import Assembly
from penstock.execute.stages.stage import modules_of
from penstock.execute.undocumented import has_accumulation_hooks, has_hooks
from penstock.execute.undocumented_modules import ModuleSnapshot


class OwnParameters:
    """The parameters of one rank as its modules hold them now, since a caller may put others in their place.

    `load_state_dict(assign=True)` and `layer.weight = nn.Parameter(...)` do that. Everything made for the parameters
    before, above all the exchange of tied gradients, would go on with the old ones, and the copies of a tied parameter
    drift apart.
    """

    def __init__(self, assembly: Assembly, *, is_sharded: bool = False) -> None:
        """With `is_sharded`, none may be replaced."""
        self._assembly = assembly
        self._is_sharded = is_sharded
        self._layers = assembly.layers
        self._read_parameters()

    def _read_parameters(self) -> None:
        self.named_parameters = self._assembly.named_parameters()
        """Each once, with its name in the unsplit model."""
        self._by_name = self._assembly.parameters_by_name()
        self._snapshot, self._entries = ModuleSnapshot(self._layers), self._look()

    def refresh(self) -> bool:
        """Look which parameters were replaced since the last look; return whether any was.

        Raises:
            ConfigError: a tied one was, or a copied stage has another parameter, so that copies are tied no more; or
                any was, or one has hooks, with shards.
        """
        if self._is_sharded:
            refuse_hooks(self.named_parameters)
        if self._snapshot.is_current():
            return False
        if self._is_sharded:
            self._refuse_others()
        self._require_ties()
        is_replaced = any(getattr(module, name, None) is not parameter for module, name, parameter in self._entries)
        self._read_parameters()
        return is_replaced

    def _look(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        return [
            (module, name, parameter)
            for module in modules_of(self._layers)
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False)
        ]

    def _refuse_others(self) -> None:
        new_params, old_params = (
            {(id(module), name): param for module, name, param in entries} for entries in (self._look(), self._entries)
        )
        names = {id(parameter): name for name, parameter in self.named_parameters}
        for key in dict.fromkeys([*old_params, *new_params]):
            if new_params.get(key) is old_params.get(key):
                continue
            shown = repr(names[id(old_params[key])]) if key in old_params else f"a parameter {key[1]!r}"
            raise ConfigError(
                f"{shown} was replaced, added or removed after the pipeline was made, whose parameters are sharded "
                "over replicas; change values by pipeline.load_state_dict() or in place, or make a new Pipeline",
                key="layers",
            )

    def _require_ties(self) -> None:
        """Make sure that the modules still hold tied parameters as they did when the pipeline was made.

        Tied is a parameter that two layers of this rank hold as one object, or that other ranks hold copies of. A user
        may replace parameters by `load_state_dict(assign=True)` or by another module, so they are compared by their
        names in the unsplit model: the earlier ones are in `self._by_name`.

        Raises:
            ConfigError: a parameter with copies on other ranks was replaced; two names of one object have different
                parameters now; or a layer that other ranks copy as a whole has a new parameter.
        """
        tied_copies = self._assembly.tied_copies.values()
        tied_ids = {id(parameter) for copy in tied_copies for parameter in copy.parameters.values()}
        first_names = {id(parameter): name for name, parameter in self.named_parameters}
        current_params = self._assembly.parameters_by_name()
        current_ids = set(map(id, current_params.values()))
        # Two names of one object had one parameter before, by whose id this has the parameter that they have now.
        successors: dict[int, object] = {}
        for name, parameter in self._by_name.items():
            successor = current_params.get(name)
            # A module around the one that holds a parameter changes its name, which does no harm. But clipping and
            # checkpoints know the copies of an owner (`owner_names`) by name, so these may not change it.
            is_renamed = successor is None and id(parameter) in current_ids
            if is_renamed and name not in self._assembly.owner_names:
                successor = parameter
            is_replaced = successor is not parameter and id(parameter) in tied_ids
            if is_replaced or successors.setdefault(id(parameter), successor) is not successor:
                change = "got another name" if is_renamed else "was replaced by another parameter"
                raise ConfigError(
                    f"{first_names[id(parameter)]!r} is tied, but {change} after the pipeline was made, so that its "
                    "copies would drift apart; change its values in place, as load_state_dict() does without "
                    "assign=True, or make a new Pipeline",
                    key="layers",
                )
        # With two routes, other ranks hold copies of whole layers, in which every parameter must be tied.
        copied_layers = {id(layer) for copy in tied_copies for layer in copy.layers}
        for name, parameter in self._assembly.parameters_by_name(copied_layers).items():
            if id(parameter) not in tied_ids:
                raise ConfigError(
                    f"{name!r} was added after the pipeline was made, to a layer of which another rank holds a copy, "
                    "so that the copies would drift apart; make a new Pipeline",
                    key="layers",
                )


def refuse_hooks(named_parameters: Iterable[tuple[str, nn.Parameter]]) -> None:
    """Refuse hooks of parameters that are sharded: between forward and backward, others are in their place.

    Raises:
        ConfigError: naming the parameter.
    """
    for name, parameter in named_parameters:
        if has_hooks(parameter) or has_accumulation_hooks(parameter):
            raise ConfigError(
                f"{name!r} has a hook, which cannot see its gradient where it is sharded over replicas; remove it, and "
                "change or read the gradient after the step",
                key="layers",
            )
