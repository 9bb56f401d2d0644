"""`main`: the frozen flags, fast help, and the exit status of every way to end."""

import io
import re
import subprocess
import sys
from types import SimpleNamespace

import pytest

from penstock.cli import entry
from penstock.errors import ConfigError, DeadlineExceeded
from penstock.version import VERSION

SHAPE = "--forward-only --function --microbatches --ranks --set --slices --stages --stages-per-rank"
REPLICAS = "--data --look-ahead --residency --shard"
RESULT = "--force --output --theme --to"
FLAGS = {
    "init": "--force",
    "train": "RUN.toml --force --fresh --port --resume --set",
    "schedules": "NAME --to",
    "show": f"NAME {SHAPE} {REPLICAS} {RESULT} --costs --heavy --lowered --split",
    "check": "FILE --costs --memory-limit --ranks --split --transport --weight-order",
    "verify": "--set",
    "compare": f"NAME {SHAPE} {REPLICAS} {RESULT} --costs --heavy --memory-limit --per-action --split --sweep",
    "search": f"{RESULT} --costs --heavy --memory-limit --microbatches --noise --objective --per-action --placement "
    "--ranks --schedule --seconds --seed --split --stages-per-rank --sweep",
    "plan": "FILE NAME RUN.toml --costs --device --export --force --global-batch --gpus --memory --nodes --output "
    "--run --seconds --sequence-length --to",
    "convert": "--compute-only --force --from --like --lowered --to",
    "profile": "RUN.toml --force --output --port --set --steps",
    "doctor": "RUN_DIR --memory-limit --split --system --to",
    "runs": RESULT,
    "generate": "--function --prompt --seed --temperature --tokens --top-k --top-p",
    "evaluate": "--checkpoint --data --function --port --set --to",
    "completion": "",
}


def usage_words(name):
    """Return the arguments of a command as its usage line shows them, without values."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("COLUMNS", "600")
        patch.setattr(sys, "stdout", printed := io.StringIO())
        entry.main([name, "--help"])
    words = [word.strip("[]") for word in printed.getvalue().splitlines()[0].split()[3:]]
    words = ["--output" if word == "-o" else word for word in words]
    return [word for word in words if word.startswith("--") or word in ("RUN.toml", "RUN_DIR", "NAME", "FILE")]


@pytest.fixture
def run_command(monkeypatch):
    """Run `main` with a command of our own that does what it is given."""

    def run(action):
        command = SimpleNamespace(
            __name__="act", SUMMARY="act", add_arguments=lambda parser: None, run_command=lambda arguments: action()
        )
        monkeypatch.setattr(entry, "COMMANDS", (command,))
        return entry.main(["act"])

    return run


@pytest.mark.parametrize("name", FLAGS)
def test_the_flags_of_a_command_are_frozen(name):
    assert sorted(usage_words(name)) == sorted(FLAGS[name].split())
    assert [command.__name__.rpartition(".")[2] for command in entry.COMMANDS] == list(FLAGS)


def test_help_loads_nothing_heavy():
    commands = [["--help"], ["show", "--help"], ["compare", "--help"], ["train", "--help"], ["doctor", "--help"]]
    program = (
        f"import sys; from penstock.cli import main; [main(words) for words in {commands}]; "
        "print(*sys.modules, file=sys.stderr)"
    )

    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)

    assert not {"torch", "numba", "numpy", "pydantic", "rich", "importlib.metadata"} & set(done.stderr.split())


@pytest.mark.parametrize(
    ("error", "status", "printed"),
    [
        (ConfigError("is wrong", key="a.b"), 1, "penstock: a.b: is wrong\n"),
        (DeadlineExceeded("waited 2 s"), 5, "penstock: waited 2 s\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_the_status_of_a_command_is_passed_on_and_an_error_of_ours_is_one_message(
    run_command, capsys, error, status, printed
):
    def fail():
        raise error

    assert run_command(lambda: 4) == 4
    assert run_command(fail) == status
    assert capsys.readouterr().err == printed


def test_a_bug_shows_its_traceback_and_how_to_report_it(run_command, capsys):
    assert run_command(lambda: 1 // 0) == 70

    printed = capsys.readouterr().err
    assert printed.startswith("penstock: Traceback (most recent call last):\n")
    assert "ZeroDivisionError: integer division or modulo by zero\n\nThis is a bug in Penstock" in printed
    assert printed.endswith("and the output of `penstock doctor --system`.\n")


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["shw"], "penstock: unknown command 'shw'; known: init, train, schedules, .*Did you mean 'show'"),
        (["--verson"], "penstock: unknown option --verson. Did you mean '--version'"),
        (["show"], "penstock show: give either NAME or --function FILE:NAME"),
        (["show", "1f1b", "--rank", "4"], "penstock show: unknown option --rank. Did you mean '--ranks'"),
        (["show", "1f1b", "--ranks", "4", "--ranks", "2"], "penstock show: --ranks is given twice; keep one"),
        (["show", "1f1b", "gpipe"], "penstock show: unexpected argument 'gpipe'"),
        (["show", "1f1b", "--ranks"], "penstock show: argument --ranks: expected one argument"),
        (["doctor"], "penstock doctor: give either RUN_DIR or --system"),
        (["show", "1f1b", "--option", "warmup=eager"], "penstock show: --option is called --set now$"),
        (["show", "--from", "mine.py:f"], "penstock show: --from is called --function now$"),
        (["doctor", "run", "--format", "json"], "penstock doctor: --format is called --to now$"),
        (
            ["compare", "1f1b", "--per-rank"],
            "penstock compare: --per-rank is gone: costs are per rank by default; --per-action makes them per action$",
        ),
    ],
)
def test_wrong_usage_is_a_line_and_a_hint_unless_the_option_has_a_new_name(arguments, told, refused):
    complaint, *hint = refused(*arguments, status=2).splitlines()

    assert re.match(told, complaint)
    assert hint == ([] if told.endswith("$") else [f"Try `{complaint.partition(':')[0]} --help`."])


def test_no_command_prints_three_to_try(capsys):
    assert entry.main([]) == 2

    printed = capsys.readouterr().err
    commands = re.findall("^  penstock (.*?)(?:   .*)?$", printed, re.MULTILINE)
    assert len(commands) == 3
    assert max(map(len, printed.splitlines())) <= 80
    for command in commands:
        entry.build_parser().parse_args(command.split())


def test_help_and_the_version_are_status_0(printed):
    text = " ".join(printed("--help").split())
    assert "Exit status: 0 fine, 1 wrong input, 2 wrong usage, 4 a rank failed, 5 a hang was ended, 6 " in text
    assert text.endswith("70 a bug in Penstock, 130 interrupted.")
    assert printed("--version") == f"penstock {VERSION}\n"


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_error():
    program = (
        "import sys; from penstock.cli import entry, output, schedules\n"
        "schedules.run = lambda arguments: [output.say('line') for _ in range(90_000)] and 0\n"
        "sys.exit(entry.main(['schedules']))"
    )

    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    child.stdout.readline()
    child.stdout.close()
    complaint = child.stderr.read()
    child.stderr.close()

    assert (child.wait(timeout=10), complaint) == (0, b"")
