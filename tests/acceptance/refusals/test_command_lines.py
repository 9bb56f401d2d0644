"""Every command with wrong, doubled and contradictory input, files in the way, and outputs that cannot take all.

What somebody new gets wrong first is among them: each is one message, which leads to what was meant.
"""

import io
import os
import re
import sys

import pytest

from penstock.cli import main
from penstock.cli.entry import COMMANDS
from penstock.errors import ConfigError, PartitionError
from penstock.schedules import build
from penstock.train.settings.config import load_config
from penstock.train.setup import check_plan
from tests.support.pages import ONLY_ONCE
from tests.support.tiny_run import PENSTOCK, TORCHRUN, files_below, fork, fork_training, settings, write_tiny_run

SIZE = ["--ranks", "2", "--microbatches", "4"]
SCHEDULE = build("1f1b", ranks=2, microbatches=4)
NEEDS_MORE = {command.__name__.rpartition(".")[2] for command in COMMANDS} - {"init", "schedules"}
WRONG_USAGE = {
    "a folder and the machine": (["doctor", "run", "--system"], "give either RUN_DIR or --system"),
    "a format of the machine": (
        ["doctor", "--system", "--to", "json"],
        "--to, --memory-limit and --split are for a RUN_DIR",
    ),
    "a file twice": (["show", "1f1b", *SIZE, "-o", "a.svg", "--output", "b.svg"], "--output is given twice"),
    "an unknown format": (["show", "1f1b", *SIZE, "--to", "yaml"], "--to: invalid choice: 'yaml'"),
    "a word as number": (["check", "a.csv", "--ranks", "two"], "--ranks: 'two' is not a whole number"),
    "a word as any number": (
        ["generate", "run", "--prompt", "a", "--temperature", "hot"],
        "--temperature: 'hot' is not a number",
    ),
    "an empty name": (["show", "", *SIZE], "NAME is empty"),
    "an empty output": (["compare", "1f1b", *SIZE, "-o", ""], "-o is empty"),
    "ranks as an option": (["train", "run.toml", "--ranks", "2"], "a run file sets it: --set pipeline.ranks=VALUE"),
    "a short option": (["show", "1f1b", "-r", "4"], "unknown option -r."),
}
REFUSED = {
    "a misspelt size": (["show", "1f1b", *SIZE, "--set", "microbatch=3"], "Did you mean 'microbatches'"),
    "capitals": (["show", "1F1B", *SIZE], "Did you mean '1f1b"),
    "a short name": (["show", "interleaved", *SIZE], "Did you mean 'interleaved-"),
    "a folder as file": (["check", "."], ".: cannot be read (Is a directory)"),
    "costs in lower case": (["compare", "1f1b", *SIZE, "--costs", "f=1"], "there is no cost 'f'; known: F, B"),
    "a file of costs that is none": (["compare", "1f1b", *SIZE, "--costs", "c.toml"], "cannot read 'c.toml'"),
    "no schedule": (["check", "text.txt"], "text.txt:1:1: 'the' is not an action; expected stage, type, microbatch"),
    "no run file": (
        ["train", "none.toml"],
        "none.toml: cannot be read: No such file or directory. Give the path of a TOML file",
    ),
    "a run file that is cut off": (["train", "cut.toml"], "cut.toml:2:10: not TOML"),
}
PROGRESS = r"(run folder: run \(holds no run yet\)\n([0-9]+ ranks? on .*; precision .*\n)?(.* \.\.\.\n)*)?"
"""All that a refused command may print: the folder that a run would have used, where, and what it began to do."""

WRONG_SETTINGS = {
    "no ranks": ("pipeline.ranks=0", r"pipeline\.ranks: got 0, expected greater than or equal to 1"),
    "a wrong option": ("pipeline.options={warm=1}", r"pipeline\.options\.warm: 1f1b has no option .*'warmup'"),
    "a schedule cut off": ("pipeline.schedule=truncated.csv", r"truncated\.csv:2:\d+: '1F' ends"),
    "a missing schedule": ("pipeline.schedule=none.csv", r"pipeline\.schedule: cannot read 'none\.csv'.*give the path"),
    "a missing text": ('data.files=["none.txt"]', r"data\.files: none\.txt: cannot be read: No such file"),
    "no place for folders": ("run.folder=/proc/run", r"/proc/run: cannot be written: No such file"),
    "a name too long": (f"run.folder={'x' * 300}", "cannot be written: File name too long"),
    "the root": ("run.folder=/", r"run\.folder: '/' is no folder for a run; name another one"),
    "no name at all": ('run.folder="a\\u0000b"', r"run\.folder: .* holds a null character"),
}
IN_THE_WAY = {
    "show": ["show", "1f1b", *SIZE, "-o", "there.svg"],
    "compare": ["compare", "1f1b", *SIZE, "-o", "there.json"],
    "search": ["search", *SIZE, "-o", "there.json"],
    "schedule of a search": ["search", *SIZE, "--schedule", "there.json"],
    "convert": ["convert", "in.csv", "there.json"],
    "profile": ["profile", "run.toml", "-o", "there.json"],
    "profile in the run folder": ["profile", "run.toml"],
}
NOWHERE = {
    "show": ["show", "1f1b", *SIZE, "-o", "/proc/a.svg"],
    "compare": ["compare", "1f1b", *SIZE, "-o", "/proc/a.json"],
    "search": ["search", *SIZE, "--seconds", "0", "-o", "/proc/a.json"],
    "convert": ["convert", "in.csv", "/proc/a.json"],
    "profile": ["profile", "run.toml", "-o", "/no/such/folder/costs.toml"],
}
PRINTING = {
    "help": ["--help"],
    "help of a command": ["compare", "--help"],
    "schedules": ["schedules"],
    "a family": ["schedules", "zbv"],
    "markdown": ["schedules", "dualpipe", "--to", "markdown"],
    "a grid": ["show", "1f1b", *SIZE],
    "a program": ["show", "zbv", *SIZE, "--lowered"],
    "a picture": ["show", "1f1b", *SIZE, "--to", "html"],
    "a comparison": ["compare", "1f1b", "zbv", *SIZE],
    "JSON": ["compare", "1f1b", "zbv", *SIZE, "--to", "json"],
    "searches": ["search", *SIZE, "--seconds", "0", "--sweep", "memory_limit=1,2 microbatches"],
    "a check": ["check", "in.csv"],
    "a conversion": ["convert", "in.csv", "-", "--to", "json"],
}


def lines(cases):
    return pytest.mark.parametrize("arguments", cases.values(), ids=cases.keys())


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """A folder with a run file, a schedule, and files that are in the way of results."""
    write_tiny_run(tmp_path)
    (tmp_path / "in.csv").write_text(SCHEDULE.to_csv())
    (tmp_path / "truncated.csv").write_text("0F0,0F1,0B0,0B1\n1F0,1B0,1F\n")
    (tmp_path / "cut.toml").write_text("[run]\nfolder = \n")
    (tmp_path / "run").mkdir()
    for name in ("there.svg", "there.json", "run/costs.toml"):
        (tmp_path / name).write_text("precious")
    monkeypatch.chdir(tmp_path)
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


class Terminal(io.TextIOWrapper):
    """A terminal that keeps what it shows."""

    def isatty(self):
        return True

    @property
    def shown(self):
        self.flush()
        return self.buffer.getvalue().decode(self.encoding)


@pytest.fixture
def terminal(monkeypatch):
    """Replace standard output by a terminal of some encoding."""

    def replace(encoding="utf-8"):
        shown = Terminal(io.BytesIO(), encoding=encoding)
        monkeypatch.setattr(sys, "stdout", shown)
        return shown

    return replace


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def refusal(here, capsys):
    """Run a command that must be refused with one message and change nothing, and return the message."""

    def run(arguments, status=1):
        before = contents(here)

        assert main(arguments) == status
        said, complained = capsys.readouterr()
        assert re.fullmatch(PROGRESS if arguments[0] == "train" else "", said)
        assert complained.startswith("penstock: " if status == 1 else "penstock")
        assert len(re.findall("^penstock", complained, flags=re.MULTILINE)) == 1
        assert len(complained.splitlines()) <= 2
        assert "Traceback" not in complained
        assert "Did you mean '-" not in complained or "'--" in complained
        assert contents(here) == before
        return complained

    return run


@pytest.mark.parametrize("name", sorted(NEEDS_MORE))
def test_a_command_without_arguments_says_what_it_needs(name, capsys):
    assert main([name]) == 2
    complaint, hint = capsys.readouterr().err.splitlines()
    assert re.match(rf"penstock {name}: (give |the following arguments are required: )", complaint)
    assert hint == f"Try `penstock {name} --help`."


@pytest.mark.parametrize(("arguments", "told"), WRONG_USAGE.values(), ids=WRONG_USAGE)
def test_wrong_usage_is_told_in_two_lines(refusal, arguments, told):
    complained = refusal(arguments, status=2)

    assert told in complained
    assert len(complained.splitlines()) == 2


@pytest.mark.parametrize(("arguments", "told"), REFUSED.values(), ids=REFUSED)
def test_arguments_of_no_use_are_refused(refusal, arguments, told):
    assert told in refusal(arguments)


@pytest.mark.parametrize(("given", "message"), WRONG_SETTINGS.values(), ids=WRONG_SETTINGS)
def test_a_wrong_setting_is_refused_before_anything_is_written(refusal, given, message):
    assert re.search(message, refusal(["train", "run.toml", "--set", given]))


def test_more_stages_than_layers_are_refused_before_anything_is_read(here):
    missing = 'data.files=["none.txt"]'
    too_many = load_config("run.toml", ["pipeline.ranks=6", missing])
    too_many_stages = load_config("run.toml", ["pipeline.ranks=3", "pipeline.schedule=zbv", missing])

    with pytest.raises(ConfigError, match=r"pipeline\.ranks: 6 ranks need at least 6 layers, but the model has 5 .*"):
        check_plan(too_many)
    with pytest.raises(PartitionError, match=r"6 stages, but the model has only 5 layers .* use at most 5 stages"):
        check_plan(too_many_stages)


def test_too_little_text_is_refused_with_the_numbers(here, capsys):
    assert main(["train", "run.toml", *settings("batch.length=200", "data.held_out_fraction=0.01")]) == 1

    complained = capsys.readouterr().err
    assert re.match(r"penstock: .*held-out part has 0 sequences .*raise data\.held_out_fraction", complained)
    assert complained.count("penstock: ") == 1
    assert set(os.listdir(here / "run")) == {"costs.toml", "tokens"}


@pytest.mark.slow
def test_a_refused_run_leaves_the_findings_of_an_earlier_one(here):
    assert main(["train", "run.toml", *settings("metrics.every=99")]) == 0
    before = {name: (here / "run" / name).read_bytes() for name in ("config.toml", "schedule.csv", "metrics.jsonl")}

    status = main(["train", "run.toml", *settings('data.files=["none.txt"]')])

    assert status == 1
    assert {name: (here / "run" / name).read_bytes() for name in before} == before


@pytest.mark.slow
def test_wrong_input_that_several_ranks_meet_is_told_once(here):
    """By the ranks that are started here, and by torchrun's, whatever torchrun itself has to say."""
    train = [*PENSTOCK, "train", "run.toml", *settings("pipeline.ranks=2", 'data.files=["none.txt"]')]
    run_many = [*TORCHRUN, "2", *train]
    wrong_number = [*TORCHRUN, "3", *PENSTOCK, "train", "run.toml", *settings("pipeline.ranks=2")]
    started = [
        fork_training(here, "pipeline.ranks=2", "pipeline.schedule=gpip"),
        fork(run_many, here),
        fork(wrong_number, here),
    ]

    complaints = [process.communicate(timeout=100)[1] for process in started]

    assert [process.returncode for process in started] == [1, 1, 1]
    assert complaints[0].startswith("penstock: pipeline.schedule: there is no schedule 'gpip'; known: ")
    ours = [re.findall("^penstock: .*", complaint, flags=re.MULTILINE) for complaint in complaints]
    assert [len(messages) for messages in ours] == [1, 1, 1], complaints
    assert "data.files: none.txt: cannot be read" in ours[1][0]
    assert "for 2 ranks, but 3 processes run" in ours[2][0]
    assert files_below(here / "run") == {"costs.toml"}


@lines(IN_THE_WAY)
def test_a_file_that_exists_is_kept(refusal, arguments):
    assert re.search(r"exists; give another name, or --force to replace it", refusal(arguments))


@lines({name: IN_THE_WAY[name] for name in ("show", "compare", "convert", "search")})
def test_a_file_that_exists_is_replaced_on_request(here, arguments):
    assert main([*arguments, "--force"]) == 0
    assert "precious" not in (here / arguments[-1]).read_text()


@lines(NOWHERE)
def test_a_folder_that_cannot_be_written_is_named(refusal, arguments):
    message = refusal(arguments)

    assert arguments[-1].rpartition("/")[0] in message
    assert "cannot be written" in message or "is not a folder" in message


def complaints(capsys):
    """Return what went to the error stream, without what the first command on a machine says."""
    lines = capsys.readouterr().err.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith(ONLY_ONCE))


@lines(PRINTING)
def test_a_full_disk_is_one_message(capsys, monkeypatch, arguments):
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        status = main(arguments)

    assert complaints(capsys).startswith("penstock: standard output cannot be written: No space left on device")
    assert status == 1


@lines(PRINTING)
def test_a_pipe_that_closes_is_no_error(capsys, monkeypatch, arguments):
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, "w", encoding="utf-8") as closed:
        monkeypatch.setattr(sys, "stdout", closed)
        status = main(arguments)

    assert (status, complaints(capsys)) == (0, "")


@lines({name: arguments for name, arguments in PRINTING.items() if name != "a picture"})
def test_an_ascii_terminal_gets_what_it_can_show(capsys, terminal, arguments):
    shown = terminal("ascii")

    assert main(arguments) == 0
    assert shown.shown
    assert complaints(capsys) == ""


@lines(PRINTING)
def test_no_color_is_shown_where_none_is_wanted(monkeypatch, terminal, arguments):
    monkeypatch.setenv("NO_COLOR", "1")
    shown = terminal()

    assert main(arguments) == 0
    assert "\x1b" not in shown.shown


@pytest.mark.parametrize("width", [40, 250])
@lines(
    {
        name: PRINTING[name]
        for name in ("help", "schedules", "a family", "a grid", "a comparison", "searches", "a check")
    }
)
def test_a_narrow_or_wide_terminal_is_served(monkeypatch, terminal, width, arguments):
    monkeypatch.setenv("COLUMNS", str(width))
    shown = terminal()

    assert main(arguments) == 0
    found = re.sub("\x1b\\[[0-9;]*m", "", shown.shown).splitlines()
    to_copy = "penstock show "  # a command stays on one line
    assert 0 < max(len(line) for line in found if not line.startswith(to_copy)) <= width


def test_names_need_not_stand_together(capsys):
    assert main(["compare", "1f1b", "--ranks", "2", "zbv", "--microbatches", "4"]) == 0
    assert "zbv" in capsys.readouterr().out


@pytest.mark.slow
def test_two_ranks_whose_numbers_overflow_end_with_7(capfd):
    # An epsilon that float32 lacks: AdamW divides zero by zero for embeddings that the batch does not use.
    settings = ["--set", "pipeline.ranks=2", "--set", "optimizer.epsilon=1e-300", "--set", "run.folder=other"]

    assert main(["train", "run.toml", *settings]) == 7
    complained = capfd.readouterr().err
    assert re.fullmatch(r"penstock: step 2: the loss is nan; expected a finite number\..*\n", complained)
