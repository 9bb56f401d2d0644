"""What a family of schedules is: a name, its options and restrictions, and the function that orders the actions."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.errors import ConfigError, nearest
from penstock.ir.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Shape:
    """The sizes that every family gets."""

    num_ranks: int
    num_stages: int
    num_microbatches: int
    num_slices: int
    is_forward_only: bool


@dataclass(frozen=True, slots=True)
class Option:
    """One knob of a family; `choices` lists what it may be, the default among them."""

    default: str
    choices: tuple[str, ...]
    help: str


Generate = Callable[[Shape, Mapping[str, str]], Schedule]


@dataclass(frozen=True, slots=True)
class Family:
    """One row of the registry."""

    name: str
    summary: str
    source: str
    """The paper or system that the order comes from."""
    placement: str
    restrictions: str
    bubble: str
    """Idle time as a formula in p ranks, m microbatches and the stage times F, B, W."""
    memory: str
    """Peak activations of rank s as a formula."""
    advice: str
    """One line: when to use it."""
    generate: Generate
    stages_per_rank: tuple[int, ...] = (1,)
    """The numbers of stages per rank that it takes; the first is the default."""
    takes_slices: bool = False
    options: Mapping[str, Option] = field(default_factory=dict)

    def resolve_options(self, given: Mapping[str, object]) -> dict[str, str]:
        """Return every option's value, defaults filled in.

        Raises:
            ConfigError: for an unknown option or a value that is not among its choices.
        """
        values = {name: option.default for name, option in self.options.items()}
        for name, value in given.items():
            option = self.options.get(name)
            if option is None:
                known = ", ".join(self.options) or "none"
                raise ConfigError(
                    f"{self.name} has no option {name!r}; its options: {known}.{nearest(name, self.options)}", key=name
                )
            text = str(value)
            if text not in option.choices:
                raise ConfigError(f"{text!r} is not a value of it; choose {' or '.join(option.choices)}", key=name)
            values[name] = text
        return values
