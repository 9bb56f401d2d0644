"""`Session`: all that one rank has of a pipeline, as construction hands it to the `Runner`."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from penstock.execute.batch.needs import InputNeeds
from penstock.execute.control.agreement import Mode
from penstock.execute.control.handshake import AgreedFacts
from penstock.execute.control.positions import PositionBoard
from penstock.execute.losses.step_losses import LossMaker
from penstock.execute.options import PipelineOptions
from penstock.execute.rank_parameters import RankParameters
from penstock.execute.stages.assemble import Assembly
from penstock.execute.transport.places import Places
from penstock.ir.program import Program
from penstock.ir.schedule import Schedule


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Session:
    """The programs, parameters and connections of one rank; nothing here changes from step to step."""

    places: Places
    device: torch.device
    options: PipelineOptions
    schedule: Schedule
    layers_of_stage: Sequence[range]
    """Indices of the layers of each stage; with two routes, those of both copies."""
    layer_names: Sequence[str]
    layer_weights: Sequence[float]
    """The relative cost of each layer, by which the layers were split."""
    program_of: Callable[[Mode, int, int], Program]
    """The program of a mode on so many microbatches, where a replica has at most so many; asked once for each."""
    assembly: Assembly
    parameters: RankParameters
    losses: LossMaker
    needs: InputNeeds
    agreed: AgreedFacts
    """Facts that the ranks of this replica know of each other."""
    board: PositionBoard

    @property
    def program(self) -> Program:
        """The program of a training step."""
        number = self.schedule.num_microbatches
        return self.program_of(Mode.TRAIN, number, number)
