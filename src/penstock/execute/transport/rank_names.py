"""How messages name the ranks of a transport: by their numbers, and on a mesh by their places along its dimensions too.

    of a pipeline alone       rank 3
    of a mesh                 rank 5 (pipeline 1, data 2)

A transport counts its ranks from 0, and so do programs. The number of a rank on a mesh is that of torch's default
group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class RankNames:
    """The names of some ranks, in order."""

    numbers: Sequence[int]
    """Number of each rank, by index: an error's `rank` and `peer`, and the place on the position board."""
    texts: Sequence[str]
    """Name of each rank, by index, such as `rank 5 (pipeline 1, data 2)`."""

    @classmethod
    def plain(cls, num_ranks: int) -> Self:
        """Return the names of ranks whose numbers are their indices."""
        return cls(range(num_ranks), [f"rank {rank}" for rank in range(num_ranks)])

    @classmethod
    def on_mesh(cls, numbers: Sequence[int], places: Sequence[Mapping[str, int]]) -> Self:
        """Return the names of ranks, given the index of each along every dimension of the mesh by its name."""
        texts = [
            f"rank {number} ({', '.join(f'{name} {index}' for name, index in place.items())})"
            for number, place in zip(numbers, places, strict=True)
        ]
        return cls(numbers, texts)

    def __getitem__(self, index: int) -> str:
        return self.texts[index]

    def select(self, indices: Sequence[int]) -> "RankNames":
        """Return the names of some of the ranks."""
        return RankNames([self.numbers[index] for index in indices], [self.texts[index] for index in indices])

    def of_number(self, number: int) -> str:
        """Return the name of the rank with a number."""
        return self.texts[self.numbers.index(number)] if number in self.numbers else f"rank {number}"


def rank_names(transport: object) -> RankNames:
    """Return the names of a transport's ranks; where it has no names, the ranks are named by their indices."""
    names = getattr(transport, "names", None)
    return names if isinstance(names, RankNames) else RankNames.plain(getattr(transport, "num_ranks", 0))
