"""One call draws a timeline in every format, as the command does."""

from dataclasses import replace

import pytest

from penstock.errors import ConfigError, PenstockError
from penstock.show import SUFFIXES
from penstock.show.picture import draw, picture_of, predict_again
from tests.cli.recorded_steps import recorded_step
from tests.show.timelines import COSTS, timeline_of

BEGINNINGS = {"svg": b"<?xml", "png": b"\x89PNG", "html": b"<!DOCTYPE html>", "trace": b"{"}


@pytest.mark.parametrize("format", BEGINNINGS)
def test_a_prediction_is_drawn_in_every_format(format):
    picture = picture_of(timeline_of(2, 2), format, costs=COSTS, title="mine", more={"gap": "3 %"})

    assert picture.startswith(BEGINNINGS[format])
    assert format in ("png", "trace") or (b"mine" in picture and b"3 %" in picture)


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_the_suffix_of_a_file_says_its_format(suffix, tmp_path):
    path = tmp_path / f"step{suffix.upper()}"
    path.write_bytes(b"of before")

    draw(timeline_of(2, 2), path, costs=COSTS)

    assert path.read_bytes().startswith(BEGINNINGS[SUFFIXES[suffix]])
    assert [file.name for file in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("format", "source"), [("svg", "predicted"), ("html", "measured"), ("html", "predicted"), ("trace", "measured")]
)
def test_a_file_is_what_the_command_prints_for_the_saved_timeline(format, source, tmp_path, capsysbinary):
    from penstock.cli.entry import main

    timeline = replace(recorded_step(), source=source)
    timeline.save(tmp_path / "step.json")
    theme = None if format == "trace" else "dark"
    draw(timeline, str(tmp_path / f"step.{format}"), theme=theme)

    assert main(["show", str(tmp_path / "step.json"), "--to", format, *(["--theme", theme] if theme else [])]) == 0
    assert capsysbinary.readouterr().out == (tmp_path / f"step.{format}").read_bytes()


def test_a_prediction_from_the_measured_costs_comes_near_the_measurement():
    timelines = predict_again(recorded_step())

    assert [timeline.source for timeline in timelines.values()] == ["predicted", "measured"]
    assert timelines["predicted"].makespan_s == pytest.approx(timelines["measured"].makespan_s, rel=0.01)


@pytest.mark.parametrize(
    ("name", "theme", "told"),
    [
        ("step.json", None, r"path: .*step\.json has none of the suffixes \.svg, \.png, .*; end it in one of them"),
        ("step.trace", "dark", r"theme: only for svg, png, html; leave it out for trace"),
        ("step.html", "blue", r"theme.*blue"),
    ],
)
def test_a_wrong_wish_is_one_message_and_leaves_no_file(name, theme, told, tmp_path):
    with pytest.raises(ConfigError, match=told) as caught:
        draw(timeline_of(2, 2), tmp_path / name, theme=theme)
    assert "\n" not in str(caught.value)
    assert not list(tmp_path.iterdir())


def test_only_a_timeline_is_drawn(tmp_path):
    with pytest.raises(ConfigError, match=r"timeline: '1f1b' of type str; expected a Timeline, such as"):
        draw("1f1b", tmp_path / "step.svg")


def test_a_folder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(PenstockError, match=r"none/step\.trace: cannot be written: No such file"):
        draw(timeline_of(2, 2), tmp_path / "none" / "step.trace")
