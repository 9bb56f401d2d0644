"""`CompiledPrograms`: what the modes of a pipeline run on one rank, each compiled when it first runs."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from penstock.execute.compile.features import compose_stages
from penstock.execute.compile.program import CompiledProgram, compile_program
from penstock.execute.control.agreement import Mode
from penstock.execute.observing.observer import Observer
from penstock.execute.ops.context import CompileContext
from penstock.execute.ops.rows import RankRows
from penstock.execute.overlap import overlapping
from penstock.execute.session import MOST_PROGRAMS, ProgramKey, Session
from penstock.execute.stages.copy_stream import CopyStream, copy_stream_of
from penstock.execute.stages.passes import StagePasses
from penstock.execute.stages.randomness import Randomness, default_generators
from penstock.execute.step import Change
from penstock.execute.transport.messages import Messenger
from penstock.ir.operations import Op
from penstock.ir.program import Program


@dataclass(eq=False)
class CompiledPrograms:
    """The programs of one rank, looked at by observers in every step; the last ones that ran are kept compiled."""

    _session: Session
    _messenger: Messenger
    _observers: Sequence[Observer]
    _longest_wait_s: float
    """Seconds that a step of another rank of this process may keep the generators."""
    _compiled: dict[tuple[ProgramKey, bool], CompiledProgram] = field(default_factory=dict)
    _active: Program | None = None

    @cached_property
    def _offloads(self) -> CopyStream | None:
        return copy_stream_of(self._session.device, one_stream=self._session.options.one_stream)

    @property
    def active(self) -> Program | None:
        """The program that was asked for last."""
        return self._active

    def of(self, key: ProgramKey, *, is_planned: bool = False) -> CompiledProgram:
        """Return the compiled program of a kind of step; errors describe rows by this program from now on.

        `is_planned` says that all ranks run what has been planned beside the steps (`ProgramSource.planned`).
        """
        compiled = self._compiled.pop((key, is_planned), None)
        if compiled is None:
            compiled = self._compile(self._session.programs.of(key, is_planned=is_planned))
        self._compiled[key, is_planned] = compiled  # the last one used comes last
        if len(self._compiled) > MOST_PROGRAMS:
            del self._compiled[next(iter(self._compiled))]
        self._active = compiled.program
        return compiled

    def require(self, mode: Mode, num_microbatches: int) -> None:
        """Make sure that there is a program for a number of microbatches. Raises: ScheduleError, ConfigError."""
        self._session.programs.of(ProgramKey(mode, num_microbatches, num_microbatches))

    def describe(self, number: int, row: int) -> str:
        """Return the text of the instruction in a row of the rank with this number; empty behind the last one."""
        if self._active is None:
            return ""
        places = self._session.places
        rank = places.names.numbers.index(number) % places.pipeline.num_ranks
        first, end = self._active.offsets[rank : rank + 2]
        return str(self._active.instruction(int(first) + row)) if row < end - first else ""

    def _compile(self, program: Program) -> CompiledProgram:
        session, rank = self._session, self._session.places.pipeline.rank
        context = CompileContext(
            program,
            rank,
            RankRows.of(program, rank),
            self._stage_passes(program),
            self._messenger,
            session.parameters,
            session.places.within_replica(session.board.row_of),
            launches_copies=self._offloads is not None and Op.OFFLOAD in program.ops,
        )
        return compile_program(context, self._observers, self._changes(program, int(program.offsets[rank])))

    def _stage_passes(self, program: Program) -> dict[int, StagePasses]:
        """Return how this rank's stages run in a program."""
        session, units = self._session, self._session.parameters.unit_of.items()
        randomness = Randomness(
            session.options.seed,
            default_generators(session.device),
            session.places.replica * program.num_microbatches,  # in training, all replicas have as many
            self._longest_wait_s,
        )
        stores = {stage: unit.gradients for stage, unit in units}
        copiers = {stage: copier for stage, unit in units if (copier := unit.layout.copier()) is not None}
        assembly = session.assembly
        return compose_stages(
            program, assembly.stages, assembly.skips, randomness, stores, copiers, offloads=self._offloads
        )

    def _changes(self, program: Program, first_row: int) -> list[Change]:
        """Return the change of calls that the user's hook for overlapped pairs asks for, if any."""
        hook, note = self._session.options.overlap, self._session.board.note
        if hook is None:
            return []
        return [overlapping(program, hook, self._session.device, lambda row: note(row - first_row))]
