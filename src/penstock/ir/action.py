"""Actions: what the author of a schedule says, as small values with torch's text.

A `Kind` of one stage on one microbatch: `2F0`, `0B3`, `1I3`, `0W3`, `2R3`; a slice of the sequence is a suffix,
`2F0.1`. Two actions that may run together are an `OverlappedPair`: `(0F7;7B3)OVERLAP_F_B`.
"""

import re
from dataclasses import dataclass

from penstock.errors import FormatError
from penstock.ir.operations import KIND_LETTERS, Kind

KIND_OF_LETTER = {kind.letter: kind for kind in Kind}

_ACTION = re.compile(rf"([0-9]{{1,10}})([{''.join(KIND_OF_LETTER)}])([0-9]{{1,10}})(?:\.([0-9]{{1,10}}))?")
_PAIR = re.compile(r"\(\s*([^;()]*?)\s*;\s*([^;()]*?)\s*\)OVERLAP_F_B")


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


def parse_action(text: str) -> Action | OverlappedPair:
    """Read one action or pair; the whole text must fit.

    Raises:
        FormatError: with the column, counted from 1, of the first character that does not fit.
    """
    pair = _PAIR.fullmatch(text)
    if pair:
        return OverlappedPair(_parse_single(text, pair.span(1)), _parse_single(text, pair.span(2)))
    if text.startswith("("):
        raise FormatError(f"{text!r} is not a pair; expected (A;B)OVERLAP_F_B with two actions and no nesting")
    return _parse_single(text, (0, len(text)))


def _parse_single(text: str, span: tuple[int, int]) -> Action:
    begin, end = span
    match = _ACTION.match(text, begin, end)
    if match is None or match.end() != end:
        column = begin + 1 if match is None else match.end() + 1
        raise FormatError(
            f"{text[begin:end]!r} is not an action; expected stage, {KIND_LETTERS}, microbatch, and .slice "
            "if the sequence is cut, such as 2F0 or 2F0.1",
            column=column,
        )
    stage, letter, microbatch, slice_text = match.groups()
    return Action(KIND_OF_LETTER[letter], int(stage), int(microbatch), int(slice_text or 0))


__all__ = ["KIND_OF_LETTER", "Action", "Kind", "OverlappedPair", "parse_action"]
