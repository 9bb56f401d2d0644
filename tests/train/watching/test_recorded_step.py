"""A run folder gives its recorded step, or says what it lacks."""

import pytest

from penstock.errors import ConfigError, FormatError
from penstock.train.watching.recorded_step import read_recorded_step
from tests.cli.recorded_steps import recorded_step


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.toml").write_text("")
    recorded_step().save(tmp_path / "timeline.json")
    return tmp_path


def test_a_run_folder_gives_its_recorded_step(folder):
    assert read_recorded_step(folder).step == 20


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("timeline.json", r"holds no timeline\.json: the run has not come to its recorded step.*run\.record_step"),
        ("config.toml", r"holds no config\.toml, so it is no run folder"),
    ],
)
def test_an_incomplete_folder_names_what_is_missing(folder, missing, told):
    (folder / missing).unlink()

    with pytest.raises(ConfigError, match=told):
        read_recorded_step(folder)


def test_what_is_no_folder_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"nowhere is no folder; give the run folder .* or the \.json file"):
        read_recorded_step(tmp_path / "nowhere")


def test_a_file_that_was_cut_short_says_so(folder):
    path = folder / "timeline.json"
    path.write_bytes(path.read_bytes()[:500])

    with pytest.raises(FormatError, match=r"timeline\.json:1:\d+: this is no JSON: .*cut short.*Record the step again"):
        read_recorded_step(folder)
