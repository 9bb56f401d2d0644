"""The schedule that somebody names on the command line."""

from argparse import Namespace

from penstock.errors import ConfigError
from penstock.ir.schedule import Schedule
from penstock.schedules import build


def wanted_schedule(name: str, arguments: Namespace) -> Schedule:
    """Build the schedule of a family with the shape that the arguments give."""
    return build(
        name,
        ranks=arguments.ranks,
        microbatches=arguments.microbatches,
        stages_per_rank=arguments.stages_per_rank,
        stages=arguments.stages,
        slices=arguments.slices,
        forward_only=arguments.forward_only,
        **parse_options(arguments.option),
    )


def parse_options(texts: list[str]) -> dict[str, str]:
    """Read `key=value` texts. Raises: ConfigError for a text of another form, and for a key given twice."""
    options: dict[str, str] = {}
    for text in texts:
        key, equals, value = (part.strip() for part in text.partition("="))
        name = key.replace("-", "_")
        if not equals or not name.isidentifier():
            raise ConfigError(f"--option {text!r} is not of the form key=value, such as --option warmup=eager")
        if name in options:
            raise ConfigError(f"--option {name} is given twice; keep one")
        options[name] = value
    return options
