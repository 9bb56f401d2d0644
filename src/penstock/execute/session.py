"""`Session`: all that one rank has of a pipeline, as construction hands it to the `Runner`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

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

MOST_PROGRAMS = 16
"""Number of programs of a pipeline that are kept, those that ran last: each has one number of microbatches."""


class ProgramKey(NamedTuple):
    """The kind of step that a program is for."""

    mode: Mode
    num_microbatches: int
    """Number of microbatches of this replica."""
    most_microbatches: int
    """Number of microbatches of the replica that has most; in an evaluation of few rows others have fewer."""


class ProgramSource(Protocol):
    """The programs of a pipeline, for any number of microbatches."""

    def of(self, key: ProgramKey, *, is_planned: bool = False) -> Program:
        """Return the program of a kind of step; where it `is_planned`, the one of `planned`."""

    def planned(self) -> tuple[int, ...]:
        """Return the numbers for which a better program of training has been planned beside the steps."""


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
    programs: ProgramSource
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
        return self.programs.of(ProgramKey(Mode.TRAIN, number, number))
