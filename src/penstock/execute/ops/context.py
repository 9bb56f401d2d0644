"""`CompileContext`: what handlers look at, and what they return."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

from penstock.execute.batch.microbatch import MicrobatchKey
from penstock.execute.ops.keys import Keys
from penstock.execute.ops.rows import RankRows
from penstock.execute.rank_parameters import RankParameters
from penstock.execute.stages.passes import StagePasses
from penstock.execute.stages.recompute import Recomputation
from penstock.execute.step import Bound
from penstock.execute.transport.agreed_layouts import PassKey
from penstock.execute.transport.messages import Messenger
from penstock.ir.program import Program

RowOf = Callable[[int], int]
"""Returns the row that another rank is at in a step, counted from its first row."""


@dataclass(frozen=True, slots=True, eq=False)
class CompileContext:
    """One rank's part of a program, and what its calls use."""

    program: Program
    rank: int
    rows: RankRows
    passes: Mapping[int, StagePasses]
    """The stages of this rank, as this program runs them, by index."""
    messenger: Messenger
    parameters: RankParameters
    row_of: RowOf | None = None
    """Says how far a rank is; None where nobody notes it."""
    launches_copies: bool = False
    """Whether OFFLOAD and RELOAD return while their copies run; else a copy is over when its row is."""
    keys: Keys = field(init=False)
    recomputations: dict[int, Recomputation] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "keys", Keys(self.program, self.rank))

    def passes_of(self, row: int) -> StagePasses:
        """Return how the stage of a row runs."""
        return self.passes[int(self.program.stage[row])]

    def recomputation_of(self, row: int) -> Recomputation:
        """Return how forwards of a row's stage run that run again; one object for all of them."""
        stage = int(self.program.stage[row])
        if stage not in self.recomputations:
            self.recomputations[stage] = Recomputation(self.passes[stage])
        return self.recomputations[stage]

    def place(self, row: int) -> MicrobatchKey:
        """Return a row's microbatch and slice."""
        return int(self.program.microbatch[row]), int(self.program.slice[row])

    def key(self, row: int) -> PassKey:
        """Name a row's messages: stage, microbatch, slice."""
        return int(self.program.stage[row]), *self.place(row)

    def peer(self, row: int) -> int:
        """Return the rank at the other end of a send or receive."""
        return self.program.placement.rank_of_stage[int(self.program.peer[row])]

    def text(self, row: int) -> str:
        """Return a row's text, for messages."""
        return str(self.program.instruction(row))


Handler = Callable[[CompileContext, int], Iterator[Bound]]
"""Makes the calls of one row: first its waits, each a call of its own, then the work."""
