"""Actions: what the author of a schedule says, as small values with torch's text.

A `Kind` of one stage on one microbatch: `2F0`, `0B3`, `1I3`, `0W3`, `2R3`; a slice of the sequence is a suffix,
`2F0.1`. Two actions that may run together are an `OverlappedPair`: `(0F7;7B3)OVERLAP_F_B`.
"""

from dataclasses import dataclass

from penstock.ir.operations import Kind

KIND_OF_LETTER = {kind.letter: kind for kind in Kind}


@dataclass(frozen=True, slots=True)
class Action:
    """One kind of computation of one stage on one microbatch (or one slice of it)."""

    kind: Kind
    stage: int
    microbatch: int
    slice: int = 0

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.letter}{self.microbatch}"
        return f"{text}.{self.slice}" if self.slice else text


@dataclass(frozen=True, slots=True)
class OverlappedPair:
    """Two actions of one rank that may run together (DualPipe's forward and backward)."""

    first: Action
    second: Action

    def __str__(self) -> str:
        return f"({self.first};{self.second})OVERLAP_F_B"


__all__ = ["KIND_OF_LETTER", "Action", "Kind", "OverlappedPair"]
