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


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        ("timeline.json", r"holds no timeline\.json: the run has not come to its recorded step.*run\.record_step"),
        ("config.toml", r"holds no config\.toml, so it is no run folder"),
    ],
)
def test_a_run_folder_gives_its_recorded_step_or_names_what_is_missing_or_cut_short(folder, missing, told):
    path = folder / "timeline.json"
    assert read_recorded_step(folder).step == 20
    with pytest.raises(ConfigError, match=r"nowhere is no folder; give the run folder .* or the \.json file"):
        read_recorded_step(folder / "nowhere")

    path.write_bytes(path.read_bytes()[:500])
    with pytest.raises(FormatError, match=r"timeline\.json:1:\d+: this is no JSON: .*cut short.*Record the step again"):
        read_recorded_step(folder)
    (folder / missing).unlink()
    with pytest.raises(ConfigError, match=told):
        read_recorded_step(folder)
