"""The handshake of ranks that make a pipeline: what must be equal on all of them, and what each one contributes.

Setup, Found  what a rank says, once its layers are built
Agreed        what all ranks know then
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from penstock.errors import PipelineError
from penstock.execute.transport.rank_names import RankNames

Told = Mapping[str, Any]
"""What a rank says of itself, by name; plain values."""


@dataclass(frozen=True, slots=True)
class Setup:
    """How a rank was set up; each field must be equal on all ranks, and its name is what a mismatch is named by.

    A field that may be None must be equal on the ranks where it is not: the others do not use what it describes.
    """

    version: str
    schedule: str
    layers: str
    split: str
    loss: str
    reduction: str
    count: str | None
    """None where no loss is computed."""
    scale_loss: str
    allow_ragged: str
    specs: str
    slice_dim: str
    slice_specs: str
    tied: str
    optimizer_step: str
    seed: str
    check_batches: str
    variable_shapes: str
    main_gradients: str
    debug: str
    deadline_s: str
    device: str
    """Its kind, such as cpu."""
    mesh: str
    """How many replicas there are, and of how many ranks."""
    shard: str
    """What they share out, and how much of it is whole at once."""


@dataclass(frozen=True, slots=True)
class Found:
    """What one rank contributes to what all ranks know."""

    keywords: Sequence[str] = ()
    """That its layers take."""
    skips: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Per index of a layer, the names of the skips that it sends or takes."""
    shared: Sequence[Sequence[str]] = ()
    """Pairs of names of one parameter, of a layer of this rank and one of another's."""
    host: str = ""
    """Ranks of one host understand each other's process ids."""
    clock_host: str = ""
    """Ranks with one clock read the same time."""
    positions: str = ""
    """The path of the memory that it offers for the positions of its host's ranks."""


@dataclass(frozen=True, slots=True)
class Agreed:
    """What all ranks know, once they have found their setups equal; fields are those of `Found`."""

    of_rank: Sequence[Found]

    @classmethod
    def of(cls, everyone: Sequence[Told], names: RankNames | None = None) -> "Agreed":
        """Compare the setups of all ranks and return what they found.

        Raises:
            PipelineError: naming the field and the ranks that differ; the same on every rank.
        """
        require_equal([theirs["setup"] for theirs in everyone], names)
        return cls([Found(**theirs["found"]) for theirs in everyone])

    @property
    def keywords(self) -> frozenset[str]:
        return frozenset(name for found in self.of_rank for name in found.keywords)

    @property
    def skips(self) -> dict[int, Sequence[str]]:
        return {int(index): names for found in self.of_rank for index, names in found.skips.items()}

    @property
    def shared(self) -> list[tuple[str, str]]:
        return [(one, other) for found in self.of_rank for one, other in found.shared]

    def select(self, indices: Sequence[int]) -> "Agreed":
        """Return what some of the ranks found."""
        return Agreed([self.of_rank[index] for index in indices])

    def each(self, name: str) -> list[Any]:
        """Return one field of every rank, in rank order."""
        return [getattr(found, name) for found in self.of_rank]


def told_of(setup: Setup, found: Found) -> Told:
    """Return what a rank says of itself, as plain values."""
    return {"setup": asdict(setup), "found": asdict(found)}


def require_equal(everyone: Sequence[Told], names: RankNames | None = None) -> None:
    """Compare what the ranks say, name by name; None need not be equal to what others say.

    `names` are those of the ranks, where they are not their indices.

    Raises:
        PipelineError: naming what differs and the ranks; the same on every rank.
    """
    ranks = names or RankNames.plain(len(everyone))
    for name in everyone[0]:
        values = [theirs.get(name, "nothing") for theirs in everyone]
        saying = [rank for rank, value in enumerate(values) if value is not None]
        odd = [rank for rank in saying if values[rank] != values[saying[0]]]
        if odd:
            first = saying[0]
            numbers = ", ".join(str(ranks.numbers[rank]) for rank in odd[1:])
            others = f" (and so do ranks {numbers})" if len(odd) > 1 else ""
            raise PipelineError(
                f"the ranks disagree on {name}: {ranks[first]} has {values[first]}, {ranks[odd[0]]} has "
                f"{values[odd[0]]}{others}. "
                "Start every rank with the same arguments and the same version",
                rank=ranks.numbers[odd[0]],
            )
