"""`penstock show`."""

import json
import subprocess
import sys
from dataclasses import replace

import pytest

from penstock.cli.entry import main
from penstock.ir.formats import WRITABLE
from penstock.ir.formats.deepspeed import to_deepspeed
from penstock.ir.formats.megatron import to_megatron
from penstock.schedules import build
from tests.cli.recorded_steps import recorded_step

SHAPE = ["--ranks", "2", "--microbatches", "3"]


@pytest.mark.feature("H13")
def test_the_default_is_the_grid_and_the_lowered_program_sends(printed):
    rows = printed("show", "1f1b", *SHAPE).splitlines()

    assert any("0F0" in row and "0B2" in row for row in rows)
    assert len([row for row in rows if "F0" in row]) == 2
    for form in ("grid", "csv", "json"):
        assert "SEND_F" in printed("show", "1f1b", *SHAPE, "--lowered", "--to", form)
        assert "SEND_F" not in printed("show", "1f1b", *SHAPE, "--to", form)


@pytest.mark.parametrize("words", [["--forward-only"], ["--lowered"]])
def test_streams_of_deepspeed_always_have_communication_and_a_table_of_megatron_none(printed, refused, words):
    schedule = build("1f1b", ranks=2, microbatches=3, forward_only="--forward-only" in words)
    megatron = ["interleaved-1f1b", "--ranks", "2", "--microbatches", "4", "--to", "megatron"]

    for form, is_old in (("deepspeed", False), ("deepspeed-old", True)):
        assert printed("show", "1f1b", *SHAPE, *words, "--to", form) == to_deepspeed(schedule, old=is_old)
    assert printed("show", *megatron) == to_megatron(build("interleaved-1f1b", ranks=2, microbatches=4))
    assert "a table of Megatron-LM has no communication" in refused("show", *megatron, "--lowered")


@pytest.mark.parametrize("name", WRITABLE)
def test_every_format_may_be_asked_for_and_a_schedule_that_it_cannot_express_is_refused(capsys, name):
    arguments = ["interleaved-zb", "--ranks", "2", "--microbatches", "4", "--stages-per-rank", "2", "--to", name]

    status = main(["show", *arguments])

    assert status == (0 if name in ("grid", "csv", "json") else 1)
    assert ("cannot express this order" in capsys.readouterr().err) == (status == 1)


def test_a_file_needs_no_shape_and_can_be_lowered(printed, tmp_path):
    schedule = build("1f1b", ranks=2, microbatches=3)
    (tmp_path / "mine.json").write_text(schedule.to_json())

    assert printed("show", str(tmp_path / "mine.json"), "--to", "csv") == schedule.to_csv()
    assert "SEND_F" in printed("show", str(tmp_path / "mine.json"), "--lowered")


def test_a_schedule_is_shown_without_loading_torch_numba_or_matplotlib():
    """bench/startup.py measures the seconds."""
    program = (
        "import sys; from penstock.cli import main; main(['show', '1f1b', '--ranks', '8', '--microbatches', '32']);"
        "print(*sys.modules, file=sys.stderr)"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert not {"torch", "numba", "matplotlib"} & set(done.stderr.split())


@pytest.mark.parametrize(("form", "begins"), [("png", b"\x89PNG"), ("trace", b'{"trace')])
def test_pictures_go_to_a_file_or_to_standard_output(tmp_path, capsysbinary, form, begins):
    file = tmp_path / "picture.json" if form == "trace" else tmp_path / f"picture.{form}"
    chosen = ["--to", form] if form == "trace" else []

    assert main(["show", "zbv", *SHAPE, "--output", str(file), *chosen]) == 0
    assert capsysbinary.readouterr().out == b""
    assert main(["show", "zbv", *SHAPE, "--to", form]) == 0

    assert file.read_bytes().startswith(begins)
    assert capsysbinary.readouterr().out == file.read_bytes()


def test_a_picture_says_what_it_was_predicted_with(printed):
    page = printed("show", "1f1b", *SHAPE, "--to", "html", "--costs", "F=1,B=3", "--theme", "dark")

    assert "<h1>1f1b, 2 ranks, 3 microbatches, predicted with F=1,B=3</h1>" in page
    assert "<dt>makespan</dt><dd>16.0 s</dd>" in page
    assert 'data-theme="dark"' in page


def test_gathers_are_shown_in_a_program_and_a_picture(printed):
    rows = printed("show", "1f1b", *SHAPE, "--lowered", "--shard", "full").splitlines()
    assert "0UNSHARD" in rows[-2]
    assert rows[-2].split()[-2:] == ["0REDUCE_GRAD", "0RESHARD"]

    costs = ["--costs", "F=1,I=1,W=1,unshard=2,reduce=1", "--data", "4"]
    page = printed("show", "1f1b", *SHAPE, "--to", "html", "--shard", "full", *costs)

    assert "reduce=1, shard full, 4 replicas</h1>" in page
    assert "collective" in page


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--costs", "F=1,B=2"], "--costs: only for svg, png, html, trace; leave it out for grid"),
        (["--data", "2", "--lowered"], "--data: only for svg, png, html, trace; leave it out for grid"),
        (["--shard", "full"], "--shard: of a program, which --lowered shows, or of a picture; add one of them"),
        (["--to", "svg", "--output", "no/such/folder/a.svg"], "no/such/folder is not a folder; make it first"),
        (["--set", "warmpu=eager"], "Did you mean 'warmup'"),
    ],
)
def test_wrong_wishes_for_pictures_are_one_message(refused, arguments, told):
    error = refused("show", "1f1b", *SHAPE, *arguments)
    assert told in error
    assert error.count("\n") == 1


def test_a_grid_that_is_too_large_to_read_is_drawn_on_request_alone(refused, printed, monkeypatch):
    monkeypatch.setattr("penstock.cli.drawing.MAX_CELLS", 10)

    assert refused("show", "1f1b", *SHAPE).count("penstock: ") == 1
    assert "0F0" in printed("show", "1f1b", *SHAPE, "--to", "grid")
    assert "0F0" in printed("show", "1f1b", *SHAPE, "--to", "csv")


@pytest.fixture
def recorded(tmp_path):
    path = tmp_path / "timeline.json"
    path.write_bytes(recorded_step().to_json().encode())
    return path


def test_a_recorded_step_opens_as_a_page_measured_above_predicted(capsys, recorded, tmp_path):
    assert main(["show", str(recorded), "-o", str(tmp_path / "step.html")]) == 0

    page = (tmp_path / "step.html").read_text()
    assert "1f1b, 4 ranks, 8 microbatches, step 20: measured above predicted" in page
    assert page.index('"0 measured"') < page.index('"0 predicted"') < page.index('"1 measured"')


def test_a_recorded_step_is_drawn_in_every_format(printed, recorded):
    svg = printed("show", str(recorded), "--to", "svg", "--theme", "dark")
    events = json.loads(printed("show", str(recorded), "--to", "trace"))["traceEvents"]

    assert "measured: bubble" in svg
    assert {event["args"]["timeline"] for event in events if event["ph"] == "X"} == {"predicted", "measured"}
    assert printed("show", str(recorded)) == printed("show", "1f1b", "--ranks", "4", "--microbatches", "8")
    assert "SEND_F" in printed("show", str(recorded), "--lowered")


def test_a_recorded_step_has_its_own_shape_and_costs_and_is_named_of_a_run_folder(refused, printed, recorded, tmp_path):
    for key, value in (("--ranks", "4"), ("--shard", "full")):
        told = (
            f"penstock: {key}: {recorded} is a step that a run recorded, with its own shape and times; leave it out\n"
        )
        assert refused("show", recorded, "--to", "svg", key, value) == told
    (tmp_path / "schedule.csv").write_text("")
    fix = f"(Is a directory). Give the path of a schedule file, such as {recorded}\n"
    assert refused("show", tmp_path).endswith(fix)

    replace(recorded_step(), source="predicted").save(tmp_path / "step.json")
    svg = printed("show", tmp_path / "step.json", "--to", "svg")
    assert "1f1b, 4 ranks, 8 microbatches, predicted" in svg
    assert "measured" not in svg
