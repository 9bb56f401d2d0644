"""Compares the digests of copies of tied parameters, which ranks send each other in an agreement on a step."""

from collections.abc import Sequence
from dataclasses import dataclass

from penstock.errors import PipelineError
from penstock.execute.transport.rank_names import RankNames

CopyDigest = tuple[int, int, str, int]
"""Tied group, index of the parameter in it, its name on the rank, and the digest of its values."""


TREAT_COPIES_ALIKE = (
    "Change a parameter in the same way on every rank that holds it: the same optimizer, learning rate, weight decay "
    "and clipping. Where these are chosen by names, choose by pipeline.owner_names.get(name, name)"
)


@dataclass(frozen=True, slots=True)
class DifferingCopies:
    """Two ranks of a transport whose copies of a parameter have different digests."""

    owner: int
    """The first rank that holds the parameter."""
    owner_name: str
    holder: int
    name: str
    """Name of the parameter on the rank `holder`."""
    group: int
    """Tied group of the parameter, and `index` its place in it."""
    index: int

    def describe(self, names: RankNames) -> str:
        """Return the clause that names both ranks and what each of them holds; the caller says how much it differs."""
        return (
            f"{names[self.owner]} holds {self.owner_name!r}, and {names[self.holder]} its copy {self.name!r}, "
            "whose values differ"
        )


def differing_copies(digests_of_ranks: Sequence[Sequence[CopyDigest]]) -> DifferingCopies | None:
    """Return the first parameter whose holders have different digests; None where all are equal."""
    first_holder: dict[tuple[int, int], tuple[int, str, int]] = {}
    for rank, copies in enumerate(digests_of_ranks):
        for group, place, name, bits in copies:
            owner, owner_name, expected = first_holder.setdefault((group, place), (rank, name, bits))
            if bits != expected:
                return DifferingCopies(owner, owner_name, rank, name, group, place)
    return None


def require_equal_digests(
    digests_of_ranks: Sequence[Sequence[CopyDigest]], names: RankNames, fails_as: type[PipelineError] = PipelineError
) -> None:
    """Make sure that all holders of a tied parameter hold the same values.

    Raises:
        PipelineError: `fails_as`, on every rank alike, naming the parameter and the ranks.
    """
    difference = differing_copies(digests_of_ranks)
    if difference is not None:
        raise fails_as(
            f"{difference.describe(names)}; copies of a tied parameter must stay equal bit for bit. "
            f"{TREAT_COPIES_ALIKE}",
            rank=names.numbers[difference.holder],
        )
