"""The base of all sections of a configuration, and the types of their keys."""

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.fields import FieldInfo

NotNegative = Annotated[int, Field(ge=0)]
Scalar = bool | int | float | str


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# A TOML array arrives as a list; the frozen value is a tuple. Only this step is lenient, the items stay strict. A text
# is a list of one, so that data.files=a.txt will do on a command line.
Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False), BeforeValidator(_as_list)]


class Section(BaseModel):
    """Sections, and parts of other files, are frozen, with no unknown keys, no conversions, and finite numbers only."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def meaning_of(field: FieldInfo) -> str:
    """Return the meaning of a key on one line."""
    return " ".join((field.description or "").split())
