"""Megatron-LM's layout strings, which say what layers each stage has: `Et*3|(tt|)*29,m|L`.

    E embedding   t transformer layer   m multi-token prediction   L loss (with the output layer before it)
    |  ends a stage                     x*3, (tt|)*3  repeat the letter or the group before the star
    ,  means nothing                    ||  is an empty stage

Stages are in the order of the forward, as here.
"""

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby

from penstock.errors import FormatError, PartitionError

LETTERS = "EtmL"
_TOKEN = re.compile(rf"([{LETTERS}|()]|\*\d+)|[^, \t]")
"""A token, or a character that is none and not between tokens."""
_MAX_LAYERS = 1_000_000


@dataclass(frozen=True, slots=True)
class Layout:
    """The layers of each stage, as letters."""

    stages: tuple[str, ...]

    @classmethod
    def parse(cls, text: str) -> "Layout":
        """Read a layout.

        Raises:
            FormatError: naming the column; also for layers in an order that no forward can have.
        """
        layout = cls(tuple(_without_repetitions(text).split("|")))
        layout._check(text)
        return layout

    def __str__(self) -> str:
        """Return the shortest text with one star per run of letters or of equal stages, which reads as this layout."""
        *stages_but_last, last_stage = self.stages
        parts = []
        for stage, repeats in groupby(stages_but_last):
            number = len(list(repeats))
            text = _letters(stage)
            parts.append(f"({text}|)*{number}" if number > 1 else f"{text}|")
        return "".join(parts) + _letters(last_stage)

    @property
    def num_stages(self) -> int:
        """The number of stages, with the empty ones."""
        return len(self.stages)

    def count(self, letter: str) -> int:
        """Return how many layers of a kind there are."""
        return sum(stage.count(letter) for stage in self.stages)

    def split(self) -> list[int]:
        """Return the number of layers per stage, as `Pipeline` takes it; every letter is one entry of its list.

        Raises:
            PartitionError: a stage is empty.
        """
        for index, stage in enumerate(self.stages):
            if not stage:
                raise PartitionError(
                    f"stage {index} of the layout {self} is empty, and every stage here has a layer; move one there, "
                    "or put an nn.Identity into the list of layers and count it"
                )
        return [len(stage) for stage in self.stages]

    def table(self, num_ranks: int) -> str:
        """Draw which rank has what, one column per stage of a rank.

        Raises:
            PartitionError: the stages do not divide over the ranks.
        """
        if self.num_stages % num_ranks:
            raise PartitionError(f"{self.num_stages} stages do not divide over {num_ranks} ranks; use a divisor")
        num_columns = self.num_stages // num_ranks
        rows = [["rank", *[f"part {part}" for part in range(num_columns)]]]
        for rank in range(num_ranks):
            rank_stages = [self.stages[part * num_ranks + rank] for part in range(num_columns)]
            rows.append([str(rank), *[_letters(stage) or "-" for stage in rank_stages]])
        widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
        return "\n".join(lines)

    def _check(self, text: str) -> None:
        """Refuse a layout without its one embedding and one loss, or out of order. Raises: FormatError."""
        letters = "".join(self.stages)
        counts = Counter(letters)
        for letter, name in (("E", "embedding"), ("L", "loss")):
            if counts[letter] != 1:
                raise FormatError(f"{counts[letter]} of {letter} ({name}); a layout has one", file=text)
        positions = [LETTERS.index(letter) for letter in letters]
        for index in range(1, len(positions)):
            if positions[index] < positions[index - 1]:
                problem = f"{letters[index]} comes after {letters[index - 1]}; the order of the forward is E, t, m, L"
                raise FormatError(problem, file=text)


def _tokens(text: str) -> Iterator[tuple[str, int]]:
    """Yield the letters, bars, parentheses and stars of a layout, each with its column."""
    for match in _TOKEN.finditer(text):
        if match[1] is None:
            problem = f"{match.group()!r} is no letter of {LETTERS} and none of | ( ) *3 ,"
            raise FormatError(problem, file=text, column=match.start() + 1)
        yield match.group(), match.start() + 1


def _without_repetitions(text: str) -> str:
    """Return the letters and bars of a pipeline layout with all repetitions written out, as `E|t*3` to `E|ttt`.

    A star and a number repeat the letter or the group in parentheses before them.

    Raises:
        FormatError: with the column of a parenthesis without its other half, or a star with nothing or a wrong number.
    """
    # The stack of open parentheses, the layout itself at the bottom: what each group has so far, by token or finished
    # group, and its column. A star repeats the last entry of the innermost group.
    groups: list[tuple[list[str], int]] = [([], 0)]
    previous_token = ""
    for token, column in list(_tokens(text)):
        innermost = groups[-1][0]
        if token == "(":
            groups.append(([], column))
        elif token == ")":
            if len(groups) == 1:
                raise FormatError("this ) closes nothing", file=text, column=column)
            finished_group, _ = groups.pop()
            groups[-1][0].append("".join(finished_group))
        elif not token.startswith("*"):
            innermost.append(token)
        elif previous_token in ("", "|", "("):
            problem = "nothing stands before this star; put a letter or a group in parentheses there"
            raise FormatError(problem, file=text, column=column)
        elif (times := int(token[1:])) < 1 or times * len(innermost[-1]) > _MAX_LAYERS:
            problem = f"{times} times; give a number from 1 that leaves at most {_MAX_LAYERS:,} layers"
            raise FormatError(problem, file=text, column=column)
        else:
            innermost[-1] *= times
        previous_token = token
    if len(groups) > 1:
        raise FormatError("this ( is never closed", file=text, column=groups[-1][1])
    return "".join(groups[0][0])


def _letters(stage: str) -> str:
    """Return the letters of a stage with one star per run of a letter, such as `Et*3`."""
    runs = [(letter, len(list(repeats))) for letter, repeats in groupby(stage)]
    return "".join(letter if number == 1 else f"{letter}*{number}" for letter, number in runs)
