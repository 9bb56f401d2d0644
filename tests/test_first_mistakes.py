"""What somebody new gets wrong first: each command is one message, which leads to what was meant."""

import pytest

from penstock.cli import main

SHAPE = ["--ranks", "4", "--microbatches", "8"]
RUN = '[run]\nfolder = "run"\n\n[data]\ncorpus = "stdlib"\n'

MISTAKES = {
    "no shape": (2, ["show", "1f1b"], "1f1b needs --ranks P and --microbatches M"),
    "capitals": (1, ["show", "1F1B", *SHAPE], "Did you mean '1f1b"),
    "a name without its dash": (1, ["show", "zbh1", *SHAPE], "Did you mean 'zb-h1'"),
    "a short name": (1, ["show", "interleaved", *SHAPE], "Did you mean 'interleaved-"),
    "no ranks": (1, ["show", "1f1b", "--ranks", "0", "--microbatches", "8"], "ranks: 0 is below 1; give a number of 1"),
    "a rank in words": (2, ["show", "1f1b", "--ranks", "four", "--microbatches", "8"], "'four' is not a whole number"),
    "an odd number of ranks": (1, ["show", "chimera", "--ranks", "3", "--microbatches", "4"], "use 4, or hanayo"),
    "an old option": (2, ["show", "1f1b", *SHAPE, "--format", "csv"], "--format is called --to now"),
    "a format as suffix": (1, ["show", "1f1b", *SHAPE, "-o", "a.pdf"], "a.pdf has none of the suffixes .csv, .json"),
    "an option of another": (1, ["show", "gpipe", *SHAPE, "--set", "warmup=eager"], "gpipe has no option 'warmup'"),
    "half of the costs": (1, ["compare", "1f1b", *SHAPE, "--costs", "F=1"], "I and W missing; give F, and I and W or"),
    "costs in lower case": (1, ["compare", "1f1b", *SHAPE, "--costs", "f=1"], "there is no cost 'f'; known: F, B"),
    "a file of costs that is none": (1, ["compare", "1f1b", *SHAPE, "--costs", "c.toml"], "cannot read 'c.toml'"),
    "a limit without a unit": (1, ["compare", "1f1b", *SHAPE, "--memory-limit", "6"], "6 is a number of bytes"),
    "a limit in words": (1, ["compare", "1f1b", *SHAPE, "--memory-limit", "6 acts"], "'6 acts' has no known unit"),
    "nothing to compare": (2, ["compare", *SHAPE], "give "),
    "no file": (1, ["check", "none.csv"], "none.csv: cannot be read (No such file or directory). Give the path of a"),
    "no schedule": (1, ["check", "text.txt"], "text.txt:1:1: 'the' is not an action; expected stage, type, microbatch"),
    "no run file": (1, ["train", "none.toml"], "none.toml: cannot be read: No such file or directory. Give the path"),
    "a text as run file": (1, ["train", "text.txt"], "text.txt:1:5: not TOML"),
    "a key without a value": (1, ["train", "run.toml", "--set", "batch.size"], "not of the form section.key=value"),
    "a number in words": (1, ["train", "run.toml", "--set", "batch.size=four"], "batch.size: got 'four', expected"),
    "a key without its section": (1, ["train", "run.toml", "--set", "batchsize=4"], "Did you mean 'batch.size'?"),
    "a key of others": (1, ["train", "run.toml", "--set", "lr=1"], "Did you mean 'optimizer.learning_rate'?"),
    "a schedule misspelt": (1, ["train", "run.toml", "--set", "pipeline.schedule=1f2b"], "Did you mean '1f1b"),
    "a batch that is too small": (1, ["train", "run.toml", "--set", "batch.size=2"], "one sequence per microbatch"),
    "ranks as an option": (2, ["train", "run.toml", "--ranks", "2"], "a run file sets it: --set pipeline.ranks=VALUE"),
    "a short option": (2, ["show", "1f1b", "-r", "4"], "unknown option -r."),
    "no run to diagnose": (1, ["doctor", "nothing"], "nothing is no folder; give the run folder of `penstock train`"),
    "no runs": (1, ["runs", "nothing"], "nothing is no folder; give a run's folder, or one that holds such"),
    "no command": (2, ["help"], "unknown command 'help'; known: init, train, schedules, show"),
    "a command misspelt": (2, ["trian", "run.toml"], "Did you mean 'train'"),
}  # fmt: skip


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "text.txt").write_text("the quick brown fox\n")
    return tmp_path


@pytest.mark.parametrize(("status", "command", "message"), MISTAKES.values(), ids=MISTAKES)
def test_a_first_mistake_is_one_message_with_its_fix(here, capsys, status, command, message):
    before = {path.name for path in here.iterdir()}

    assert main(command) == status

    _, complained = capsys.readouterr()
    assert message in complained
    assert complained.startswith("penstock")
    assert len(complained.splitlines()) <= 2
    assert "Did you mean '-" not in complained or "'--" in complained
    assert {path.name for path in here.iterdir()} == before
