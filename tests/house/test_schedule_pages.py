"""docs/schedules.md, the pages in docs/schedules and their pictures are what the families say now."""

import re

from penstock.schedules import FAMILIES
from tests.house.source import script

schedule_pages = script("schedule_pages")
PAGES = schedule_pages.pages()


def test_the_pages_and_pictures_are_what_is_generated_now():
    made = {schedule_pages.DOCS / name: text for name, text in PAGES.items()}
    made |= {schedule_pages.DOCS / "pictures" / name: text for name, text in schedule_pages.pictures().items()}

    stale = [str(path) for path, text in made.items() if not path.exists() or path.read_text(encoding="utf-8") != text]
    assert stale == [], "run: scripts/schedule_pages.py"


def test_every_family_is_on_one_page_and_in_the_table_of_all():
    text = "".join(text for name, text in PAGES.items() if name != "schedules.md")

    assert sorted(re.findall(r"^## (.*)", text, re.MULTILINE)) == sorted(FAMILIES)
    assert re.findall(r"^\| \[`([\w-]+)`\]", PAGES["schedules.md"], re.MULTILINE) == list(FAMILIES)


def test_a_picture_has_a_block_for_each_action():
    family = FAMILIES["dualpipe"]

    drawn = schedule_pages.draw(schedule_pages.example(family), schedule_pages.THEMES["light"])

    num_actions = schedule_pages.example(family).program.num_rows
    assert drawn.count("<text") == num_actions + family.example[0]
