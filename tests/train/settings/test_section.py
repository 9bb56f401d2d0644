"""What sections of a run file are."""

import pytest
from pydantic import ValidationError

from penstock.train.settings.section import Section, Texts, meaning_of


class Shelf(Section):
    """A section."""

    books: Texts = ()
    """what stands
    on it"""


def test_a_meaning_is_one_line():
    assert meaning_of(Shelf.model_fields["books"]) == "what stands on it"


def test_one_text_is_a_list_of_one_and_nothing_else_is_converted():
    assert Shelf(books="a").books == ("a",)
    assert Shelf(books=["a", "b"]).books == ("a", "b")
    for wrong in ({"books": 5}, {"books": [""]}, {"shelves": "a"}):
        with pytest.raises(ValidationError):
            Shelf(**wrong)
    with pytest.raises(ValidationError, match="frozen"):
        Shelf().books = ("a",)
