"""scripts/families.py: docs/families.md has each family, and a trial says right, refused or WRONG."""

import json
import subprocess
import sys

import pytest

from tests.house.source import ROOT, script

pytest.importorskip("transformers")

families = script("families")
PAGE = families.PAGE.read_text(encoding="utf-8")


def result_of(**words):
    """Return the result of a model whose forms have these verdicts."""
    forms = {form: {"word": families.RIGHT, "reason": ""} for form in families.FORMS}
    refused = {form: {"word": word, "reason": "source: no; take another"} for form, word in words.items()}
    return {"class": "TinyForCausalLM", "forms": forms | refused, "seconds": 1.0}


@pytest.mark.slow
def test_the_page_has_a_row_for_each_family_that_is_tried():
    assert families.names_of_page(PAGE) == [family.name for family in families.families()]


def test_a_page_keeps_what_is_around_the_table_and_writing_it_twice_changes_nothing():
    results = {"tiny": result_of(), "small": result_of(plain=families.REFUSED)}

    once = families.page(f"before\n{families.BEGIN}\nstale\n{families.END}\nbehind\n", results)

    assert once.startswith("before\n")
    assert once.endswith("behind\n")
    assert "stale" not in once
    assert families.page(once, results) == once
    assert families.names_of_page(once) == ["tiny", "small"]
    assert "2 families: 1 right, 1 refused, 0 WRONG." in once
    assert "| `small` | `TinyForCausalLM` | refused | right | right | right | right |" in once
    assert "* `small`: no." in once


@pytest.mark.slow
def test_two_families_are_tried_and_one_that_cannot_be_made_is_wrong(tmp_path, monkeypatch):
    command = [sys.executable, ROOT / "scripts" / "families.py", "llama", "hrm_text", "--results", tmp_path / "results"]
    done = subprocess.run(command, capture_output=True, text=True)

    results = json.loads((tmp_path / "results").read_text())
    assert {verdict["word"] for verdict in results["llama"]["forms"].values()} == {families.RIGHT}
    assert families.REFUSED in {verdict["word"] for verdict in results["hrm_text"]["forms"].values()}
    assert done.returncode == 0, done.stdout
    broken = families.tried(families.Family("decoder", "no such family"))
    assert {verdict["word"] for verdict in broken["forms"].values()} == {families.WRONG}
    monkeypatch.setattr(families, "LIMIT_S", 0.001)
    late = families.tried(families.families()[0])
    assert late["forms"]["plain"]["reason"] == "no result after 0.001 s"


def test_no_family_is_wrong():
    assert "| WRONG" not in PAGE
