"""`penstock completion`, and what a shell gets that asks for completions."""

import os
import shlex
import subprocess
import sys

import pytest


@pytest.fixture
def argcomplete():
    return pytest.importorskip("argcomplete")


def completions_of(line):
    """Return what is offered at the end of a line, by asking as a shell does."""
    asked = {"_ARGCOMPLETE": "1", "_ARGCOMPLETE_IFS": "\n", "COMP_LINE": line, "COMP_POINT": str(len(line))}
    asked["_ARGCOMPLETE_COMP_WORDBREAKS"] = " "
    reading, writing = os.pipe()
    command = f"exec 8>&{writing}; exec {shlex.quote(sys.executable)} -m penstock"
    subprocess.run(["bash", "-c", command], env={**os.environ, **asked}, pass_fds=[writing], check=True, timeout=60)
    os.close(writing)
    with open(reading) as offered:
        return offered.read().split()


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_lines_of_a_shell_name_the_command(argcomplete, printed, shell):
    assert "penstock" in printed("completion", shell)


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("penstock compare 1f", {"1f1b", "1f1b-v"}),
        pytest.param("penstock sh", {"show"}, marks=pytest.mark.slow),
        pytest.param("penstock show --th", {"--theme"}, marks=pytest.mark.slow),
        pytest.param("penstock show --theme da", {"dark"}, marks=pytest.mark.slow),
    ],
)
def test_a_shell_is_offered_commands_options_values_and_families(argcomplete, line, offered):
    assert set(completions_of(line)) == offered


def test_without_argcomplete_the_message_says_what_to_install(refused, monkeypatch):
    monkeypatch.setitem(sys.modules, "argcomplete", None)

    complaint = refused("completion", "bash")
    assert complaint == "penstock: completion needs argcomplete. Install it: pip install argcomplete\n"
