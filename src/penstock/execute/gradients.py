"""`Gradients`: where the gradients of one rank's parameters add up in a step, and how they are reduced over ranks."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext

import torch
from torch import nn

from penstock.errors import ConfigError, PenstockError
from penstock.execute.control.agreement import ALL_FROZEN, digest
from penstock.execute.control.collectives import Control
from penstock.execute.losses.grad_scaler import SharedScaler, grad_scaler_of
from penstock.execute.ops.context import Hooks
from penstock.execute.options import PipelineOptions
from penstock.execute.stages.assemble import Assembly
from penstock.execute.stages.data_parallel import DdpReduction
from penstock.execute.stages.main_gradients import ATTRIBUTE, MainGradients
from penstock.execute.stages.stage import modules_of
from penstock.execute.stages.tied import agree_on_copies
from penstock.execute.transport.messages import Messenger
from penstock.execute.transport.protocol import Messages
from penstock.execute.undocumented_modules import ModuleSnapshot
from penstock.ir.operations import Op
from penstock.ir.program import Program


class OwnParameters:
    """The parameters of one rank as its modules hold them now, since a caller may put others in their place.

    `load_state_dict(assign=True)` and `layer.weight = nn.Parameter(...)` do that. What was made for the parameters
    before, above all the exchange of tied gradients, would go on with the old ones, and the copies of a tied parameter
    drift apart.
    """

    def __init__(self, assembly: Assembly) -> None:
        self._assembly = assembly
        self._layers = [layer for stage in assembly.stages for layer in stage.modules]
        self.named = assembly.named_parameters()
        """Each once, with its name in the unsplit model."""
        self._snapshot, self._held = ModuleSnapshot(self._layers), self._look()

    def refresh(self) -> bool:
        """Look which parameters were replaced since the last look; return whether any was.

        Raises:
            ConfigError: a tied one was, so that its copies are tied no more.
        """
        if self._snapshot.is_current():
            return False
        if all(getattr(module, name, None) is parameter for module, name, parameter in self._held):
            self._snapshot = ModuleSnapshot(self._layers)  # of other modules, with which nothing was made
            return False
        self._require_ties()
        self.named = self._assembly.named_parameters()
        self._snapshot, self._held = ModuleSnapshot(self._layers), self._look()
        return True

    def _look(self) -> list[tuple[nn.Module, str, nn.Parameter]]:
        return [
            (module, name, parameter)
            for module in modules_of(self._layers)
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


class Gradients:
    """The parameters that one rank trains."""

    def __init__(self, control: Control, device: torch.device, assembly: Assembly, options: PipelineOptions) -> None:
        self._control = control
        self._assembly = assembly
        self._options = options
        self._copies = assembly.tied_copies
        attribute = ATTRIBUTE if options.main_gradients else "grad"
        self._own = OwnParameters(assembly)
        self._trained = 0
        self.is_synced = True
        """Whether steps average gradients over replicas; not within `Pipeline.no_sync()`."""
        self.sums_tied = True
        """Whether steps sum those of tied parameters over ranks; not within `Pipeline.no_sync(tied=False)`."""
        self._main_gradients = self._accumulate_beside() if options.main_gradients else None
        scaler = grad_scaler_of(options.scale_loss)
        self._scaler = None if scaler is None else SharedScaler(scaler, control, device, attribute)
        copies = assembly.tied_copies.values()
        self._ddp = DdpReduction(
            assembly.stages, copies, attribute=attribute, limit_s=lambda: control.transport.deadline_s
        )

    @property
    def scale(self) -> float:
        """That of the rank's GradScaler, 0 where it has none."""
        return 0.0 if self._scaler is None else self._scaler.scale

    def refresh(self) -> PenstockError | None:
        """Take in parameters that were replaced; return why they cannot be trained, if they cannot."""
        try:
            if self._own.refresh() and self._main_gradients is not None:
                self._main_gradients = self._accumulate_beside()
            for copy in self._copies.values():
                copy.refuse_hooks()
            self._require_whole_sums()
        except PenstockError as error:
            return error
        return None

    def trained(self) -> int:
        """Return a digest of which parameters need gradients, which callers may change between steps.

        `ALL_FROZEN` if none does, 0 without parameters.
        """
        needed = "".join(["01"[parameter.requires_grad] for _, parameter in self._own.named])
        return digest(needed) if "1" in needed else ALL_FROZEN * bool(needed)

    def agree_on_tied(self, trained: int) -> None:
        """Compare the copies of tied parameters once more if any rank trains others than in the step before."""
        if trained != self._trained:
            agree_on_copies(self._control, self._copies)
            self._trained = trained

    @contextmanager
    def accumulating(self, *, is_training: bool) -> Iterator[None]:
        """Run a step in here."""
        beside = self._main_gradients if is_training else None
        with self._ddp.step(is_synced=self.is_synced), nullcontext() if beside is None else beside.accumulating():
            for copy in self._copies.values() if is_training and self.sums_tied else ():
                copy.begin_step()
            yield

    def end_failed_step(self) -> None:
        """Leave nothing of a step behind."""
        for copy in self._copies.values():
            copy.end_step()

    def hooks(self, program: Program, messenger: Messenger, transport: Messages) -> Hooks:
        """Return what the collectives of a program call; `transport` carries the exchanges of tied parameters."""

        def reduce_tied(group: int) -> None:
            copy = self._copies[group]
            for peer in copy.ranks:
                messenger.receiver.post_waiting(peer)  # the exchange goes behind them, on the same channels
            copy.reduce(transport, sums=self.sums_tied)

        return Hooks(self._reduce_stage(program), reduce_tied, self._optimizer_step)

    def _reduce_stage(self, program: Program) -> Callable[[int], None]:
        """DDP's average, then the caller's hook; for copies of a stage on this rank, one module, after the last."""
        hook = self._options.reduce_stage or _do_nothing_with
        rank = self._control.rank
        rows = slice(*program.offsets[rank : rank + 2])
        stages = program.stage[rows][program.op[rows] == Op.REDUCE_GRADIENT].tolist()
        layers = {stage.index: tuple(map(id, stage.layers.values())) for stage in self._assembly.stages}
        # With two routes on one rank, two stages are the same modules; their gradients are whole after the later one.
        last_of_copies = {layers[stage]: stage for stage in stages}.values()

        def reduce(stage: int) -> None:
            if stage in last_of_copies and self.sums_tied:
                self._ddp.reduce(stage)
                if self.is_synced:
                    hook(stage)

        return reduce

    def _optimizer_step(self) -> None:
        """The end of a training step's program: the scalers of all ranks agree before any optimizer is stepped."""
        if self._scaler is not None:
            self._scaler.share(
                parameter for stage in self._assembly.stages for _, parameter in stage.named_parameters()
            )
        if self._options.optimizer_step is not None:
            self._options.optimizer_step()

    def _require_whole_sums(self) -> None:
        if not self.is_synced and self.sums_tied and self._copies and self._options.reduce_stage is not None:
            raise ConfigError(
                "no_sync() does not go with reduce_stage and parameters that are tied over ranks: while a step runs, "
                "their gradients of the steps before are set aside, so reduce_stage would not see them. Average in "
                "every step, or average after the last step instead of in reduce_stage",
                key="reduce_stage",
            )

    def _accumulate_beside(self) -> MainGradients:
        for copy in self._copies.values():
            copy.attribute = ATTRIBUTE
        return MainGradients(self._own.named)


def _do_nothing_with(stage: int) -> None:
    """No reduction was asked for."""
