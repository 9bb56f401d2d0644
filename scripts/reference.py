"""Write the generated pages of docs/reference/: the Python names, the commands, the keys of run files, the errors.

python scripts/reference.py          write them; a house test compares them with what the code says
"""

import inspect
import re
from argparse import ArgumentParser, _SubParsersAction
from collections.abc import Callable, Iterator
from enum import Enum
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic.fields import FieldInfo

import penstock as ps
from penstock import errors
from penstock.cli.entry import build_parser
from penstock.train.settings.config import RunConfig
from penstock.train.settings.section import Section

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "reference"
WIDTH = 100
"""Of a signature, beyond which it has one line for each parameter."""

# Every public name, in the group of the task that it is for.
GROUPS = {
    "Make a schedule": ("Make a schedule, and a program of it.", ["build", "plan", "lower", "with_recompute", "chain"]),
    "Prove a schedule": ("Find every place where a schedule or program cannot run.", ["check"]),
    "Costs and simulation": (
        "Predict time and memory.",
        [
            "simulate",
            "draw",
            "search",
            "search_joint",
            "Costs",
            "LayerCosts",
            "estimate",
            "measure_layers",
        ],
    ),
    "Pipeline and layers": (
        "Run a schedule on a model.",
        [
            "Pipeline",
            "cut",
            "from_transformers",
            "verify",
            "LayerSpec",
            "Skip",
            "Carry",
            "AuxiliaryLoss",
            "LossOutput",
            "losses",
            "MicrobatchPlace",
        ],
    ),
    "Checkpoints": ("Save and load a training.", ["save_checkpoint", "latest_checkpoint", "load_checkpoint"]),
    "Custom backwards": (
        "Ask in the backward of a custom function which half of a split backward runs.",
        ["wants_input_gradient", "wants_weight_gradient"],
    ),
    "Batches": (
        "Say how a batch is cut, and its outputs are merged.",
        ["BatchSpec", "Split", "Replicate", "PreSplit", "Stream", "StreamContext", "Part", "Concat", "Stack", "Sum"],
    ),
    "Observers": ("See what a step did.", ["Observer"]),
    "Schedules and programs": (
        "The values that the functions above take and return.",
        ["Schedule", "Program", "Timeline", "Action", "Kind", "Placement"],
    ),
}
# Methods that steps call on the objects that a user makes, and that no user calls.
CALLED_BY_STEPS = {
    "Skip": {"begin_skips", "end_skips", "extra_repr"},
    "Carry": {"begin_slice", "end_slice"},
    "AuxiliaryLoss": {"begin", "take", "end"},
    "Stream": {"begin_step", "undo_begin", "take"},
    "Part": {"layout"},
}
ERRORS = [name for name in ps.__all__ if isinstance(vars(errors).get(name), type)]
GENERATED = "<!-- written by scripts/reference.py -->"


def pages() -> dict[str, str]:
    """Return the text of every generated page by its path in the folder."""
    groups = {f"api/{file_of(group)}": group_page(group) for group in GROUPS}
    return groups | {
        "api/README.md": api_page(),
        "command_line.md": command_line_page(),
        "configuration.md": configuration_page(),
        "errors.md": errors_page(),
    }


# ---- Python


def file_of(group: str) -> str:
    return f"{group.lower().replace(' ', '_')}.md"


def api_page() -> str:
    rows = [
        f"| [{group}]({file_of(group)}) | {purpose} | {', '.join(_linked(group, name) for name in names)} |"
        for group, (purpose, names) in GROUPS.items()
    ]
    raised = ", ".join(f"[{name}](../errors.md#{name.lower()})" for name in ERRORS)
    lines = [
        "# Python",
        "",
        GENERATED,
        "",
        "Every public name of `import penstock as ps`, by task. Each loads on first use: importing `penstock` imports",
        "nothing else, and planning never imports torch.",
        "",
        "| task | what for | names |",
        "|---|---|---|",
        *rows,
        f"| [Errors](../errors.md) | Catch what goes wrong. | {raised} |",
    ]
    return "\n".join(lines) + "\n"


def _linked(group: str, name: str) -> str:
    return f"[{name}]({file_of(group)}#ps{name.lower()})"


def group_page(group: str) -> str:
    purpose, names = GROUPS[group]
    head = [f"# {group}", GENERATED, f"{purpose} All groups: [Python](README.md)."]
    return "\n\n".join([*head, *(documented(f"ps.{name}", getattr(ps, name)) for name in names)]) + "\n"


def documented(title: str, value: Any) -> str:
    """Return the section of one public function or class, with the methods and fields that it documents."""
    parts = [f"## {title}"]
    if inspect.ismodule(value):
        functions = (_member(name, getattr(value, name)) for name in value.__all__)
        return "\n\n".join([*parts, docstring(value), *functions])
    if not (isinstance(value, type) and issubclass(value, (Enum, Exception))):
        parts.append(_code(signature(title, value)))
    parts.append(docstring(value))
    if isinstance(value, type) and issubclass(value, Enum):
        parts.append(", ".join(f"`{member.name}`" for member in value))
    elif isinstance(value, type):
        parts += [_member(name, member) for name, member in members(value)]
    return "\n\n".join(filter(None, parts))


def members(owner: type) -> Iterator[tuple[str, Any]]:
    """Yield the public methods and properties that have a docstring, those of the class before those of its bases.

    Without those that steps alone call.
    """
    seen = set(CALLED_BY_STEPS.get(owner.__name__, ()))
    for base in owner.__mro__:
        if not base.__module__.startswith("penstock"):
            continue
        for name, member in vars(base).items():
            is_ours = isinstance(member, (property, classmethod, staticmethod)) or inspect.isfunction(member)
            if is_ours and not name.startswith("_") and name not in seen:
                seen.add(name)
                if inspect.getdoc(member):
                    yield name, member


def _member(name: str, member: Any) -> str:
    function = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
    shown = name if isinstance(member, property) else signature(name, function)
    return "\n\n".join([f"### {name}", _code(shown), docstring(member)])


def signature(name: str, value: Callable[..., Any]) -> str:
    """Return a name with its parameters, on one line where they fit."""
    found = inspect.signature(value)
    parameters = [each for each in found.parameters.values() if each.name not in ("self", "cls")]
    texts = [_plain(str(each)) for each in parameters]
    keyword_only = [number for number, each in enumerate(parameters) if each.kind is each.KEYWORD_ONLY]
    if keyword_only and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        texts.insert(keyword_only[0], "*")
    returned = found.return_annotation
    end = "" if returned in (inspect.Signature.empty, None) else f" -> {_plain(inspect.formatannotation(returned))}"
    line = f"{name}({', '.join(texts)}){end}"
    if len(line) <= WIDTH:
        return line
    return "\n".join([f"{name}(", *(f"    {text}," for text in texts), f"){end}"])


def _plain(text: str) -> str:
    """A type without the modules of its parts, and a default without its address."""
    text = re.sub(r"<function (\w+) at 0x[0-9a-f]+>", r"\1", text)
    text = re.sub(r"<class '([^']*)'>", r"\1", text)
    return re.sub(r"\b(?:[a-z_]\w*\.)+(?=[A-Za-z_])", "", text).replace("'", '"')


def docstring(value: Any) -> str:
    """Return a docstring in Markdown: errors as a list, everything else as it is."""
    text = inspect.getdoc(value) or ""
    before, heading, after = text.partition("Raises:\n")
    if not heading:
        return text
    raised, _, rest = after.partition("\n\n")
    entries = re.split(r"^    (?=\S)", raised, flags=re.MULTILINE)[1:]
    listed = "\n".join(re.sub(r"^([\w., ]+): ", r"* `\1`: ", " ".join(entry.split())) for entry in entries)
    return "\n\n".join(filter(None, [before.strip(), f"Raises:\n\n{listed}", rest]))


def _code(text: str) -> str:
    return f"```py\n{text}\n```"


# ---- the command line


def command_line_page() -> str:
    parser = build_parser()
    (commands,) = (action for action in parser._actions if isinstance(action, _SubParsersAction))
    head = [
        "# Command line",
        "",
        GENERATED,
        "",
        f"`penstock COMMAND --help` prints what is below. {parser.epilog or ''}".rstrip(),
        "",
        "| command | what it does |",
        "|---|---|",
        *(f"| [{name}](#penstock-{name}) | {child.description} |" for name, child in commands.choices.items()),
    ]
    sections = [_command(name, child) for name, child in commands.choices.items()]
    return "\n\n".join(["\n".join(head), *sections]) + "\n"


def _command(name: str, parser: ArgumentParser) -> str:
    rows = [
        f"| {_cell(_argument(action))} | {_cell(parser._get_formatter()._expand_help(action) if action.help else '')} |"
        for action in parser._actions
        if action.dest != "help" and action.help != "==SUPPRESS=="
    ]
    table = ["| argument | meaning |", "|---|---|", *rows] if rows else []
    return "\n".join(filter(None, [f"## penstock {name}\n", f"{parser.description}\n", *table, _epilog(parser)]))


def _epilog(parser: ArgumentParser) -> str:
    return f"\n{parser.epilog}" if parser.epilog else ""


def _argument(action: Any) -> str:
    value = action.metavar or ("" if action.nargs == 0 else action.dest.upper())
    if action.choices and not action.metavar:
        value = "{" + ",".join(map(str, action.choices)) + "}"
    if isinstance(value, tuple):
        value = " ".join(value)
    if not action.option_strings:
        return f"`{value}`"
    return ", ".join(
        f"`{option} {value}`" if value and action.nargs != 0 else f"`{option}`" for option in action.option_strings
    )


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


# ---- the keys of a run file


def configuration_page() -> str:
    sections = [
        _section(name, field.annotation)
        for name, field in RunConfig.model_fields.items()
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
    ]
    head = [
        "# Keys of a run file",
        "",
        GENERATED,
        "",
        "`penstock train RUN.toml` reads these keys; `--set batch.size=32` overrides one. An unknown key is an error.",
        "[training.md](../training.md) explains a run.",
    ]
    return "\n\n".join(["\n".join(head), *sections]) + "\n"


def _section(name: str, section: type[Section]) -> str:
    rows = [
        f"| `{name}.{key}` | {_type(field)} | {_default(field)} | {_cell(field.description or '')} |"
        for key, field in section.model_fields.items()
    ]
    return "\n".join(
        [
            f"## {name}",
            "",
            f"{inspect.getdoc(section)}",
            "",
            "| key | type | default | meaning |",
            "|---|---|---|---|",
            *rows,
        ]
    )


def _type(field: FieldInfo) -> str:
    bounds = [f"{sign} {value}" for name, sign in BOUNDS.items() for value in _bounds(field, name)]
    return _cell(", ".join([_type_name(field.annotation), *bounds]))


BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def _bounds(field: FieldInfo, name: str) -> list[Any]:
    return [getattr(each, name) for each in field.metadata if getattr(each, name, None) is not None]


def _type_name(annotation: Any) -> str:
    origin, arguments = get_origin(annotation), get_args(annotation)
    if origin is Literal:
        return " or ".join(f'`"{value}"`' for value in arguments)
    if hasattr(annotation, "__metadata__"):
        return _type_name(annotation.__origin__)
    if origin is tuple:
        return f"list of {_type_name(arguments[0])}"
    if origin is dict:
        return "table"
    if arguments:
        return " or ".join(map(_type_name, arguments))
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return "table"
    return {"str": "text", "bool": "boolean", "int": "integer", "float": "number"}.get(
        annotation.__name__, annotation.__name__
    )


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, bool):
        return f"`{str(value).lower()}`"
    if isinstance(value, str):
        return f'`"{value}"`'
    return f"`{list(value)}`".replace("'", '"') if isinstance(value, tuple) else f"`{value}`"


# ---- errors


def errors_page() -> str:
    tree = (errors.__doc__ or "").partition("\n\n")[2]
    drawing, _, rest = tree.partition("\n\n")
    head = [
        "# Errors",
        "",
        GENERATED,
        "",
        "Every error that Penstock raises on purpose is a `ps.PenstockError`.",
        "",
        "```text",
        inspect.cleandoc(drawing),
        "```",
        "",
        rest.strip(),
    ]
    sections = [_error(name) for name in ERRORS]
    return "\n\n".join(["\n".join(head), *sections]) + "\n"


def _error(name: str) -> str:
    kind = getattr(errors, name)
    base = kind.__mro__[1].__name__
    made = _code(signature(f"ps.{name}", kind)) if "__init__" in vars(kind) else ""
    return "\n\n".join(filter(None, [f"## {name}", f"Is a `{base}`.", docstring(kind), made]))


if __name__ == "__main__":
    (FOLDER / "api").mkdir(exist_ok=True)
    for page, text in pages().items():
        (FOLDER / page).write_text(text, encoding="utf-8")
