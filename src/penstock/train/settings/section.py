"""What every section of a run file is, and the types of its keys."""

from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Discriminator, Field, Tag
from pydantic.fields import FieldInfo

from penstock.models.decoder_config import Positive

NotNegative = Annotated[int, Field(ge=0)]
Scalar = bool | int | float | str


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


# A TOML array arrives as a list; the frozen value is a tuple. Only this step is lenient, the items stay strict. A text
# is a list of one, so that data.files=a.txt will do on a command line.
Texts = Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False), BeforeValidator(_as_list)]
Sizes = Annotated[tuple[Positive, ...], Field(strict=False)]

Kept = Literal["none", "full", "selective"]
"""Which activation checkpointing."""

NAMED, LISTED = "a name", "a list"
"""Which sort of a key such as `pipeline.split` was meant, so that a wrong one is judged as that."""
Name = TypeVar("Name")
Other = TypeVar("Other")
NameOr = Annotated[
    Annotated[Name, Tag(NAMED)] | Annotated[Other, Tag(LISTED)],
    Discriminator(lambda value: NAMED if isinstance(value, str) else LISTED),
]
Split = NameOr[Literal["declared", "even", "measured"], Sizes]
Checkpointing = NameOr[Kept, Annotated[tuple[Kept, ...], Field(strict=False)]]


class Section(BaseModel):
    """Sections, and parts of other files, are frozen, with no unknown keys, no conversions, and finite numbers only."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def meaning_of(field: FieldInfo) -> str:
    """Return the meaning of a key on one line."""
    return " ".join((field.description or "").split())
