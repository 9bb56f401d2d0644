"""Run files with other settings, whose comments stay."""

import pytest
import tomlkit

from penstock.errors import ConfigError
from penstock.run_planning.run_file import new_run_settings, run_file_text, settings_of_model
from tests.run_planning.cases import RUN


def test_values_change_and_comments_stay():
    text = run_file_text(RUN, {"pipeline": {"ranks": 4, "microbatch_size": None, "split": [2, 2, 2, 1]}})

    assert "ranks = 4  # two of them\n" in text
    assert "microbatch_size" not in text
    assert "split = [2, 2, 2, 1]\n" in text
    assert "evaluate_batches = 0  # none\n" in text


def test_a_section_that_is_empty_is_taken_out_and_a_new_one_is_added():
    text = run_file_text(RUN, {"batch": {"size": None, "length": None, "accumulate": None}, "plan": {"step_s": 0.5}})

    assert "[batch]" not in text
    assert text.endswith("[plan]\nstep_s = 0.5\n")


def test_a_table_within_a_section_is_on_one_line():
    text = run_file_text(RUN, {"pipeline": {"schedule": "zbv", "options": {"recompute": True}}})

    assert "options = {recompute = true}\n" in text


def test_a_new_file_says_what_it_is_and_has_text_to_train_on():
    text = run_file_text("", new_run_settings("runs/planned", {"source": "mine.py:make"}))

    assert text.startswith("# Written by penstock plan")
    assert 'corpus = "stdlib" # the sources of Python\'s standard library' in text


def test_another_model_takes_the_place_of_that_of_the_base_with_all_its_keys():
    base = RUN.replace("[model]", "[model]\nloss = 'mine.py:loss'")

    by_source, of_transformers = (
        tomlkit.parse(base)["model"].unwrap() | settings_of_model(base, model, "runs/new")["model"]
        for model in ({"source": "mine.py:make"}, {"transformers": "llama"})
    )

    assert {key: value for key, value in by_source.items() if value} == {
        "source": "mine.py:make", "loss": "mine.py:loss",
    }  # fmt: skip
    assert {key: value for key, value in of_transformers.items() if value} == {"transformers": "llama"}
    assert settings_of_model(base, {}, "runs/new") == {}


def test_what_is_no_run_file_is_refused():
    with pytest.raises(ConfigError, match=r"pipeline.ranks: got 0"):
        run_file_text(RUN, {"pipeline": {"ranks": 0}})
