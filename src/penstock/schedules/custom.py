"""Custom schedules: a user's function is called with what it asks for, and its rows become a `Schedule`.

A function names the numbers that it takes, in the words of `build`; every other parameter is an option of its own. The
options of every family need no parameter. It gives the rows of all ranks or, if it also takes `rank`, the row of one:

    def zigzag(rank, microbatches, depth=2):
        return phases(repeat(microbatches, f(rank), b(rank)))
"""

import inspect
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from penstock.errors import ConfigError, described, shortened
from penstock.ir.schedule import Schedule
from penstock.schedules.family import with_common
from penstock.schedules.options import COMMON, SIZES, Options, require_known
from penstock.schedules.third_party import as_schedule, require_sizes, run_third_party

ScheduleFunction = Callable[..., Any]
Parameters = Mapping[str, inspect.Parameter]

RANK = "rank"
MISSING = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class RequestedSizes:
    """The numbers that `build` was given; None where it was given none."""

    ranks: int
    microbatches: int
    slices: int
    stages_per_rank: int | None
    stages: int | None
    forward_only: bool


def custom_schedule(function: ScheduleFunction, sizes: RequestedSizes, options: Mapping[str, object]) -> Schedule:
    """Return the schedule whose rows a user's function gives, of all ranks or, if it has a parameter `rank`, of one.

    The function gets those of `sizes` (numbers of ranks, microbatches, stages and slices) and of `options` for which it
    has parameters. Options that every family takes (`COMMON`) need no parameter: they are applied to the schedule
    afterwards.

    Raises:
        ConfigError: an option or size has no parameter, the function raises, or it gives no schedule of these sizes.
    """
    if not callable(function):
        raise ConfigError(f"{described(function)}; give the name of a family, or a function", key="name")
    name = getattr(function, "__name__", type(function).__name__)
    parameters = _named_parameters(function, name)
    stages = sizes.stages or (sizes.stages_per_rank and sizes.stages_per_rank * sizes.ranks)
    sizes = replace(sizes, stages=stages)
    common_by_name = {key: value for key, value in options.items() if key in COMMON and key not in parameters}
    common_options = Options.read(name, COMMON, common_by_name)
    function_options = {key: value for key, value in options.items() if key not in common_by_name}
    # Choose the arguments of the function.
    arguments = _size_arguments(name, parameters, sizes) | _option_arguments(name, parameters, function_options)

    def make() -> Schedule:
        if RANK in parameters:
            rows = [function(rank=rank, **arguments) for rank in range(sizes.ranks)]
        else:
            rows = function(**arguments)
        return as_schedule(rows, name, num_ranks=sizes.ranks)

    # Errors of the function become ConfigErrors that name its file and line.
    schedule = run_third_party(name, make, at=_file_and_line(function))
    require_sizes(name, schedule, asdict(sizes))
    return with_common(schedule, common_options)


def _named_parameters(function: ScheduleFunction, name: str) -> Parameters:
    """Return the parameters that can be given by name; one such as `**options` stands among them under its own name."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise ConfigError(f"{name} does not say what it takes; give a function written in Python") from None
    for parameter in parameters.values():
        if parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"{name} takes {parameter.name!r} by position only; leave out the / after it")
    return {key: parameter for key, parameter in parameters.items() if parameter.kind is not parameter.VAR_POSITIONAL}


def _size_arguments(name: str, parameters: Parameters, sizes: RequestedSizes) -> dict[str, object]:
    """Return the numbers that the function names as parameters. Raises: ConfigError, for a size without a parameter."""
    ranks, stages = sizes.ranks, sizes.stages
    takes_stages = "stages" in parameters or "stages_per_rank" in parameters
    if not takes_stages and stages not in (None, ranks):
        raise ConfigError(
            f"{name} does not take it; add a parameter of this name, or leave it out", key="stages_per_rank"
        )
    if "slices" not in parameters and sizes.slices != 1:
        raise ConfigError(f"{name} does not take it; add a parameter of this name, or leave it out", key="slices")
    values: dict[str, object] = asdict(sizes)
    if stages is None:  # the function's own default goes before that of `build`
        values |= {
            key: _default_or(parameters, key, count) for key, count in (("stages_per_rank", 1), ("stages", ranks))
        }
    else:
        values["stages_per_rank"] = stages // ranks
    return {key: values[key] for key in SIZES if key in parameters}


def _default_or(parameters: Parameters, key: str, otherwise: int) -> object:
    parameter = parameters.get(key)
    return otherwise if parameter is None or parameter.default is MISSING else parameter.default


def _option_arguments(name: str, parameters: Parameters, values: Mapping[str, object]) -> dict[str, object]:
    """Return the values of the function's own options, texts read as the type of the parameter's default.

    Raises:
        ConfigError: for an option that the function does not take, and one without a value or a default.
    """
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    default_of_option: dict[str, object] = {
        key: parameter.default
        for key, parameter in parameters.items()
        if key not in (RANK, *SIZES) and parameter.kind is not parameter.VAR_KEYWORD
    }
    for key in values:
        if not takes_any:
            require_known(name, key, default_of_option | COMMON)
    for key, default in default_of_option.items():
        if default is MISSING and key not in values:
            raise ConfigError(f"{name} needs a value for it; give {key}=VALUE, or the parameter a default", key=key)
    return {key: _typed_value(value, default_of_option.get(key), key) for key, value in values.items()}


def _typed_value(value: object, default: object, key: str) -> object:
    """Return a value as it was given in Python, or a text read as the type of the default. Raises: ConfigError."""
    if not isinstance(value, str) or not isinstance(default, (bool, int, float)):
        return value
    try:
        if isinstance(default, bool):
            return {"true": True, "false": False}[value.lower()]
        return type(default)(value)
    except (KeyError, ValueError):
        kind = {bool: "true or false", int: "a whole number"}.get(type(default), "a number")
        raise ConfigError(f"{shortened(value)} is not a value of it; give {kind}", key=key) from None


def _file_and_line(function: ScheduleFunction) -> str:
    code = getattr(function, "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code is not None else ""
