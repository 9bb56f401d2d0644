"""The knobs of a family: what each may be, and the values that somebody chose."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field

from penstock.errors import ConfigError, nearest, shortened


@dataclass(frozen=True, slots=True)
class Choice:
    """One of a few words, or where it `takes_number` a whole number of 1 or more."""

    default: str
    choices: tuple[str, ...]
    help: str
    takes_number: bool = False

    def read(self, text: str, key: str) -> str | int:
        if self.takes_number and text.isdigit():
            return _whole_number(text, key)
        if text not in self.choices:
            expected = " or ".join(self.choices) + ", or give a whole number of 1 or more" * self.takes_number
            raise ConfigError(f"{shortened(text)} is not a value of it; choose {expected}", key=key)
        return text

    @property
    def values(self) -> str:
        """What it may be, in words."""
        return " or ".join([*self.choices, *(["a number"] if self.takes_number else [])])


@dataclass(frozen=True, slots=True)
class Number:
    """A whole number of 1 or more; `default` says in words what a family takes without one, such as `p`."""

    default: str
    help: str

    def read(self, text: str, key: str) -> int:
        return _whole_number(text, key)

    @property
    def values(self) -> str:
        """What it may be, in words."""
        return "a number"


def _whole_number(text: str, key: str) -> int:
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text) > 0):
        raise ConfigError(f"{shortened(text)} is not a value of it; give a whole number of 1 or more", key=key)
    return int(text)


Option = Choice | Number


def flag(help: str) -> Choice:
    """Return an option that is off unless it is switched on."""
    return Choice("false", ("false", "true"), help)


COMMON = {
    "recompute": Choice(
        "false",
        ("false", "true"),
        "each forward keeps its inputs only and runs again before its backward: less memory, more work; with a number, "
        "only forwards that find no room on a rank with room for so many activations",
        takes_number=True,
    )
}
"""The options of every family and function."""


SIZES = ("ranks", "microbatches", "stages_per_rank", "stages", "slices", "forward_only")
"""The numbers that every schedule takes beside its options; a misspelt one arrives here as an unknown option."""


def require_known(name: str, key: str, options: Collection[str]) -> None:
    """Refuse an option that a family or function does not have. Raises: ConfigError."""
    if key not in options:
        raise ConfigError(
            f"{name} has no option {shortened(key)}; its options: {', '.join(options) or 'none'}."
            f"{nearest(key, [*options, *SIZES])}",
            key=key,
        )


@dataclass(frozen=True, slots=True)
class Options:
    """The values of a family's options: those that the user gave, and the defaults of the others."""

    known: Mapping[str, Option] = field(default_factory=dict)
    given: Mapping[str, str | int] = field(default_factory=dict)

    @classmethod
    def read(cls, family: str, options: Mapping[str, Option], values: Mapping[str, object]) -> "Options":
        """Read values as a user wrote them: words, numbers, True and False.

        Raises:
            ConfigError: for an unknown option, or a value that an option cannot have.
        """
        checked_values = {}
        for name, value in values.items():
            require_known(family, name, options)
            text = str(value).lower() if isinstance(value, bool) else str(value)
            checked_values[name] = options[name].read(text, name)
        return cls(options, checked_values)

    def word(self, name: str) -> str:
        """Return the value of a `Choice`."""
        return str(self.given.get(name, self.known[name].default))

    def is_on(self, name: str) -> bool:
        """Return whether a `flag` is switched on."""
        return self.word(name) == "true"

    def number(self, name: str, default: int) -> int:
        """Return the value of a `Number`, or `default` where none was given."""
        return int(self.given.get(name, default))
