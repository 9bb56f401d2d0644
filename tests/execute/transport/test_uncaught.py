"""An uncaught error of Penstock, or a Ctrl-C, is printed by one rank, with the user's lines only, and ends all."""

import json
import signal
import subprocess
import sys
import time

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.errors import ConfigError, NotFinite, PipelineError
from penstock.execute.transport.uncaught import install, text_of
from tests.support.forked_python import ForkedPython
from tests.support.local_pipelines import error_of
from tests.support.page_ranks import _settings_of, free_port
from tests.support.pages import environment

SCRIPT = """\
import sys
import time
import torch
import penstock as ps

class Bad(torch.nn.Module):
    def forward(self, hidden):
        if sys.argv[1] == "layer":
            raise ValueError("mine")
        if sys.argv[1] == "sleep":
            print("asleep", file=sys.stderr, flush=True)
            time.sleep(60)
        return hidden

layers = [torch.nn.Linear(4, 4), Bad()]
split = [9] if sys.argv[1] == "split" else None
pipeline = ps.Pipeline(layers, "1f1b", 2, torch.nn.functional.mse_loss, split=split)
if sys.argv[1] == "other" and pipeline.rank:
    raise KeyError("own")
pipeline.step(torch.ones(8, 4), target=torch.ones(8, 4))
"""


def start(case, folder, **options):
    """Start the script as two ranks; return what are processes of Python, or forks of one."""
    (folder / "train.py").write_text(SCRIPT, encoding="utf-8")
    port = free_port()
    environments = [environment() | _settings_of(rank, 2, port) for rank in range(2)]
    if options:
        return [
            subprocess.Popen([sys.executable, "train.py", case], cwd=folder, env=each, **options)
            for each in environments
        ]
    return [ForkedPython(["train.py", case], folder, each) for each in environments]


def end(ranks):
    """Return the exit statuses of the ranks, and what both printed."""
    texts = [rank.communicate(timeout=60)[1] for rank in ranks]
    return [rank.returncode for rank in ranks], "".join(texts)


HIDDEN = dict.fromkeys(["site-packages", "src/penstock", "contextlib.py"], 0)
BLAMED = "PipelineError: rank 1, 1F0, in layer 1 (Bad): ValueError: mine"
PRINTED = {
    "layer": ([4, 4], {BLAMED: 1, 'train.py", line': 2, "in forward": 1} | HIDDEN),
    "split": ([1, 1], {"split [9] names 1 stage,": 1} | HIDDEN),
    "other": ([4, 1], {"KeyError: 'own'": 1, "penstock.errors.PeerLost: ": 1}),
}
"""By case, the statuses of both ranks, and how often they print some text."""


@pytest.mark.slow
@pytest.mark.parametrize("case", PRINTED)
def test_the_rank_to_blame_prints_the_users_lines_once_and_those_that_lose_it_say_so(case, tmp_path):
    statuses, counts = PRINTED[case]

    status, text = end(start(case, tmp_path))

    assert status == statuses
    assert {each: text.count(each) for each in counts} == counts


@pytest.mark.slow
def test_a_ctrl_c_that_reaches_each_rank_twice_is_printed_by_one(tmp_path):
    ranks = start("sleep", tmp_path, stderr=subprocess.PIPE, text=True)  # which end on a signal as users' processes do
    assert any("asleep" in line for line in ranks[1].stderr)

    for _ in range(2):  # the terminal's, and torchrun's
        for rank in ranks:
            rank.send_signal(signal.SIGINT)
        time.sleep(0.05)  # as long as one signal is not handled, the next one is lost

    status, text = end(ranks)
    assert status == [-signal.SIGINT, -signal.SIGINT]
    assert text.count("KeyboardInterrupt") == text.count("Traceback") == 1
    assert "src/penstock" not in text


@pytest.fixture
def hook(monkeypatch, tmp_path):
    """Install the hook over one that notes what it gets; return both."""
    handler = signal.getsignal(signal.SIGINT)
    passed = []
    monkeypatch.setattr(sys, "excepthook", lambda *found: passed.append(found[0]))

    def end_with(error, claims=lambda rank: True):
        install(claims, str(tmp_path / "error.json"))
        with pytest.raises(SystemExit) as ended:
            sys.excepthook(type(error), error, error.__traceback__)
        return ended.value.code

    yield end_with, passed
    signal.signal(signal.SIGINT, handler)


def test_the_file_of_torchrun_has_the_first_line_and_the_whole_traceback(hook, tmp_path):
    end_with, _ = hook
    error = error_of(ps.Pipeline, [nn.Linear(2, 2)], "1f1bb", 2)

    assert end_with(error) == 1
    found = json.loads((tmp_path / "error.json").read_text())["message"]
    assert found["message"] == str(error).partition("\n")[0]
    assert "construction.py" in found["extraInfo"]["penstock_traceback"]


def test_a_rank_that_may_not_report_is_silent_and_ends_with_the_same_status(hook, capsys, tmp_path):
    end_with, _ = hook
    asked = []

    assert end_with(PipelineError("x", rank=3), lambda rank: asked.append(rank)) == 4
    assert (asked, capsys.readouterr().err) == ([3], "")
    assert "another rank" in (tmp_path / "error.json").read_text()


def test_other_errors_keep_the_hook_of_before(hook):
    end_with, passed = hook
    assert end_with(NotFinite("x")) == 7

    sys.excepthook(ValueError, ValueError("x"), None)

    assert passed == [ValueError]


def test_an_error_without_a_line_of_the_users_is_its_message():
    assert text_of(ConfigError("wrong", key="split")) == "penstock.errors.ConfigError: split: wrong\n"
    assert torch.__path__[0] not in text_of(error_of(nn.Linear(2, 2), "x"))


def test_an_interrupt_shows_the_users_call_that_it_ended():
    class Interrupted(nn.Module):
        def forward(self, hidden):
            raise KeyboardInterrupt

    pipeline = ps.Pipeline([nn.Linear(2, 2), Interrupted()], "1f1b", 1, nn.functional.mse_loss)
    with pytest.raises(KeyboardInterrupt) as found:
        pipeline.step(torch.ones(1, 2), target=torch.ones(1, 2))

    lines = text_of(found.value).splitlines()

    assert "pipeline.step(" in lines[2]
    assert lines[-1] == "KeyboardInterrupt"
    assert sum("File" in line for line in lines) == 1
