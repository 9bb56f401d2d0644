"""Whole documents packed into sequences: each document is in one sequence, and few places are left over.

Best fit, the longest document first: it goes into the sequence in which the fewest places stay free. So documents are
packed once, by their lengths alone, and every rank finds the same sequences; an epoch visits them in another order.

    lengths 5 4 3 3 1, of 8 places      5 3 | 4 3 1
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True, eq=False)
class Packs:
    """The documents of each sequence, in the order of the documents."""

    documents: NDArray[np.signedinteger]
    """Numbers of documents; those of a sequence lie together."""
    ends: NDArray[np.signedinteger]
    """By sequence, the number of documents up to its end."""

    @classmethod
    def of(cls, documents: NDArray[np.signedinteger], sizes: NDArray[np.signedinteger], capacity: int) -> "Packs":
        """Pack documents of these sizes, each from 1 to `capacity`, into sequences of `capacity` places."""
        pack_of_document = best_fit(sizes, capacity)
        order = np.argsort(pack_of_document, kind="stable")
        return cls(documents[order], np.cumsum(np.bincount(pack_of_document)))

    @classmethod
    def of_one(cls, documents: NDArray[np.signedinteger]) -> "Packs":
        """Return a sequence for each document."""
        return cls(documents, np.arange(1, len(documents) + 1))

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> NDArray[np.signedinteger]:
        return self.documents[self.ends[index - 1] if index else 0 : self.ends[index]]


def best_fit(sizes: NDArray[np.signedinteger], capacity: int) -> NDArray[np.int64]:
    """Return the pack of each item, so that no pack holds more than `capacity`.

    Best-fit decreasing, which takes at most 11/9 of the fewest possible packs, and few more (Johnson, 1974). Packs with
    equal room are kept in a list, and a number has a bit for each room that some pack has, so that the least room that
    suffices is found in one step.
    """
    packs = np.empty(len(sizes), dtype=np.int64)
    packs_by_room: dict[int, list[int]] = {}
    rooms = num_packs = 0
    for item in np.argsort(-sizes, kind="stable"):
        size = int(sizes[item])
        if sufficient := rooms >> size:
            room = size + (sufficient & -sufficient).bit_length() - 1
            pack = packs_by_room[room].pop()
            if not packs_by_room[room]:
                rooms ^= 1 << room
        else:
            room, pack = capacity, num_packs
            num_packs += 1
        packs[item] = pack
        packs_by_room.setdefault(room - size, []).append(pack)
        rooms |= 1 << (room - size)
    return packs
