"""`ModelPart`: the part of the model that one rank holds, seen as `torch.nn.Module` shows a model.

Names are those of the unsplit model, so that optimizers, checkpoints and clipping need not know of the split.
"""

from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.execute.control.collectives import Control
from penstock.execute.control.handshake import SetupReport, require_equal
from penstock.execute.observing.copies import compare_copies
from penstock.execute.observing.log import norms_by_name
from penstock.execute.options import PipelineOptions
from penstock.execute.replicas.first_replica import share_all
from penstock.execute.replicas.whole_state import WholeState, deal_out, send_rows
from penstock.execute.stages.assemble import Assembly
from penstock.execute.stages.gradient_norm import clip_gradients
from penstock.execute.stages.held_state import held_settings, held_tensors
from penstock.execute.stages.model_state import (
    entries_of_ranks,
    gather_state,
    load_own,
    own_state,
    require_fitting,
    scatter_state,
)
from penstock.execute.stages.names import full_name
from penstock.execute.stages.stage import Stage
from penstock.execute.transport.calls import collective
from penstock.execute.transport.protocol import Transport
from penstock.execute.values.tensors import is_dtensor


class ModelPart:
    """Parameters, state, mode and gradient norm of the layers of one rank, and of all ranks together."""

    stages: list[Stage]
    device: torch.device
    transport: Transport
    """The messages to and from the other ranks."""
    control: Control
    """The collectives of all ranks, which go over their hosts."""
    options: PipelineOptions
    _assembly: Assembly

    def parameters(self) -> Iterator[nn.Parameter]:
        """List this rank's parameters, each once: what its optimizer takes."""
        return (parameter for _, parameter in self.named_parameters())

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """List this rank's parameters, each once, with the unsplit model's names and in its order.

        As in `nn.Module`, a tied parameter has the first of its names on this rank. Other ranks may hold copies of it
        under another name (`copied_names`). With two routes, the ranks of a stage's two copies both list its
        parameters, under the same names.
        """
        yield from self._assembly.named_parameters()

    @property
    def copied_names(self) -> frozenset[str]:
        """Names of this rank's parameters that are copies of another name's."""
        return frozenset(self._assembly.owner_names)

    @property
    def owner_names(self) -> Mapping[str, str]:
        """The name that each of `copied_names` belongs to, by which another rank may hold it."""
        return self._assembly.owner_names

    @property
    def rebuilt_names(self) -> frozenset[str]:
        """Names of this rank's tensors that its layers make again when they are built: frozen, and in no checkpoint.

        A layer says so by its attribute `rebuilt_names`, such as that of a model of transformers under an adapter.
        """
        named_layers = [item for stage in self.stages for item in stage.layers.items()]
        trained_names = {name for name, parameter in self.named_parameters() if parameter.requires_grad}
        return frozenset(
            name
            for layer, module in named_layers
            for local_name in getattr(module, "rebuilt_names", ())
            if (name := full_name(layer, module, local_name)) not in trained_names
        )

    @property
    def module_settings(self) -> dict[str, dict[str, Any]]:
        """What modules of this rank compute by beside their tensors, by name of a module, such as an adapter's scale.

        A layer says so by its method `module_settings`. Checkpoints have it, and are refused by a model with another.
        """
        return held_settings(self.stages)

    def train(self, mode: bool = True) -> Self:
        """Put this rank's layers into training mode, or evaluation mode; `evaluate` needs no call of it."""
        for layer in self._assembly.layers:
            layer.train(mode)
        return self

    def eval(self) -> Self:
        """Put this rank's layers into evaluation mode."""
        return self.train(False)

    @collective
    def state_dict(self, *, on_rank: int | None = None) -> dict[str, Any]:
        """Return this rank's parameters and saved buffers by the unsplit model's names, as `nn.Module.state_dict` does.

        Parameters that are sharded over replicas are DTensors. With `on_rank`, which every rank passes, the rank of
        this number gets the tensors of the whole model, as copies on the CPU, and all other ranks get an empty dict.
        With replicas, `on_rank` is a rank of the first replica, by its place along the pipeline.

        Raises:
            ConfigError: there is no rank `on_rank`.
            PipelineError: copies of a parameter have drifted apart.
            PeerLost, DeadlineExceeded: a rank does not come.
        """
        local_state = own_state(self.stages)
        if on_rank is None:
            return local_state
        self._agree(on_rank=on_rank)
        self.require_equal_copies()
        # Other replicas send the rows of their shards to the first replica, whose ranks put whole tensors together.
        places = self.control.places
        if places.data is not None and places.replica > 0:
            send_rows(local_state, places.data)
            return {}
        rank_entries = entries_of_ranks(self.transport, local_state)
        return gather_state(self.transport, WholeState(local_state, places.data), rank_entries, on_rank, self.device)

    @collective
    def load_state_dict(
        self, state_dict: Mapping[str, Any] | None, strict: bool = True, *, from_rank: int | None = None
    ) -> None:
        """Copy values into this rank's parameters and buffers; every rank calls it.

        `state_dict` is the state of this rank, or that of the whole model, of which the rank takes its part. With
        `from_rank`, the rank of this number has the state of the whole model, and the other ranks pass None. Copies of
        a tied parameter take the values of its owner, the first rank in the unsplit model that holds it. With `strict`,
        names must be those of the model, as in torch. With replicas, `from_rank` is a rank of the first replica, and
        all replicas take the values of the first.

        Raises:
            ConfigError: on every rank, and nothing is changed: the state does not fit on some rank.
            PeerLost, DeadlineExceeded: a rank does not come.
        """
        transport, rank, places = self.transport, self.transport.rank, self.control.places
        self._agree(from_rank=from_rank, strict=strict)
        # With `from_rank`, all ranks but that one of the first replica get their state from it, and have none to check.
        has_state = from_rank is None or (places.replica, rank) == (0, from_rank)
        # An entry is the name, dtype and shape of a tensor of the model; every rank learns the entries of all ranks.
        local_state = own_state(self.stages)
        rank_entries = entries_of_ranks(transport, local_state)
        all_entries = [entry for entries in rank_entries for entry in entries]

        def check() -> None:
            if has_state:
                expected_entries = all_entries if rank == from_rank else rank_entries[rank]
                require_fitting(state_dict, expected_entries, all_entries, is_strict=strict)

        # Check on all ranks before anything is changed on any of them.
        self.control.together(check)
        # Bring each rank its part: along the pipeline of the first replica, and with shards from there to the others.
        part = state_dict or {}
        if from_rank is not None:
            part = scatter_state(transport, part, rank_entries, from_rank, self.device) if places.replica == 0 else {}
        if self.options.is_sharded:
            part = deal_out(self.control, local_state, part)
        self.control.together(lambda: load_own(self.stages, part))
        # Where parameters are not sharded, the first replica sends its values; then owners send those of tied copies.
        if places.data is not None:
            share_all(places.data, [tensor for tensor in held_tensors(self.stages) if not is_dtensor(tensor)])
        for copy in self._assembly.tied_copies.values():
            copy.share_values(transport)

    @collective
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients of all ranks so that their norm is at most `max_norm`; return the norm before, 0-dim.

        Every rank calls it, between `pipeline.step` and the step of its optimizer. The norm is that of
        `torch.nn.utils.clip_grad_norm_` over the unsplit model, with a tied parameter counted once. It is computed in
        float64, and has the same bits on all ranks and for every split of the layers. With `main_gradients`, the
        gradients are those in `.main_grad`. `max_norm=math.inf` measures the norm, and scales nothing. By a norm that
        is not finite, gradients are scaled as torch does: with an infinite one, finite gradients become 0 and infinite
        ones NaN; with NaN, all become NaN.

        Raises:
            ConfigError: `max_norm` or `norm_type` is no number larger than 0.
            PipelineError: the norm is not finite and `error_if_nonfinite`. Nothing is scaled then.
        """
        self._agree(max_norm=max_norm, norm_type=norm_type)
        attribute = self.options.gradient_attribute
        named_gradients = [(name, getattr(parameter, attribute, None)) for name, parameter in self.named_parameters()]
        # The ranks of a replica hold different stages, so their norms are put together. Replicas hold equal gradients,
        # unless these are sharded.
        norm = clip_gradients(
            named_gradients,
            self.control.within.all_gather_object,
            max_norm,
            norm_type=norm_type,
            skip=self.copied_names,
            across=self.control.across if self.options.is_sharded else None,
            error_if_nonfinite=error_if_nonfinite,
        )
        return torch.tensor(norm, dtype=torch.float64)

    @collective
    def norms(self, *, gradients: bool = False, local: bool = False) -> dict[str, float]:
        """Return the norm of each parameter of the model, or of each gradient, by the unsplit model's names.

        Every rank calls it, and gets the same: norms of whole parameters, those of tied ones once, by their owners'
        names. `gradients` asks for those of gradients, of parameters that have one; with `main_gradients`, they are in
        `.main_grad`. With `local`, norms are those of what this rank holds, parts of shards and copies included; no
        message goes to another rank then. Norms are computed in float64. A lazy parameter has none before its first
        input.

        Raises:
            PipelineError: ranks ask for different norms.
            PeerLost, DeadlineExceeded: a rank does not come.
        """
        if not local:
            self._agree(gradients=gradients)
        return norms_by_name(
            self.control,
            self._assembly,
            gradient_attribute=self.options.gradient_attribute if gradients else "",
            local=local,
            is_sharded=self.options.is_sharded,
        )

    @collective
    def require_equal_copies(self) -> None:
        """Make sure that all copies of each parameter are equal bit for bit; every rank calls it.

        Copies are tied parameters on several ranks, both copies of a model with two routes, and the parameters of all
        replicas but for the rows that they share out. Saving compares them, and a run every `debug.copies_every` steps;
        those of tied parameters are compared in the first two training steps and in each 100th after the first, too
        (`check_batches`).

        Raises:
            PipelineError: on every rank, naming the parameter, two ranks whose copies differ, and by how much.
            PeerLost, DeadlineExceeded: a rank does not come.
        """
        compare_copies(self.control, self._assembly)

    def _agree(self, **arguments: Any) -> None:
        """Refuse arguments that are wrong, or not the same, on any rank, on all of them at once."""

        def check() -> SetupReport:
            num_ranks = self.transport.num_ranks
            for key, value in arguments.items():
                is_rank = value is None or (isinstance(value, int) and 0 <= value < num_ranks)
                if key in ("on_rank", "from_rank") and not is_rank:
                    raise ConfigError(f"{value!r}; expected a rank from 0 to {num_ranks - 1}", key=key)
                if key in ("max_norm", "norm_type") and not (isinstance(value, int | float) and value > 0):
                    raise ConfigError(f"{value!r}; expected a number larger than 0, or infinity", key=key)
            return {key: str(value) for key, value in arguments.items()}

        require_equal(self.control.together(check), self.control.names)
