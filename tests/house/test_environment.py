"""scripts/environment: what it takes, what it makes, and the one line that it says where it can't."""

import os
import shutil
import subprocess

import pytest

from tests.house.source import ROOT

INTERPRETER = """\
#!/bin/sh
# Python {version}, as far as scripts/environment asks: it prints its version, makes environments, and runs a pip.
case "$2" in
  import*) echo {version} ;;
  venv)
    mkdir -p .venv/bin
    cp "$0" .venv/bin/python
    echo "version = {version}.1" > .venv/pyvenv.cfg
    echo "VIRTUAL_ENV=$PWD/.venv" > .venv/bin/activate
    ;;
  pip) shift 2; echo "$@" >> pip.log; cat says 2> /dev/null; exit $(cat status) ;;
esac
"""


RETRYING = "WARNING: Retrying after connection broken by 'x'"


@pytest.fixture
def clone(tmp_path):
    """A folder with a space in its path that has what scripts/environment reads; its pip installs nothing."""
    folder = tmp_path / "a clone" / "penstock"
    (folder / "scripts").mkdir(parents=True)
    for name in ("scripts/environment", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "status").write_text("0")
    return folder


def interpreter(clone, version):
    path = clone / f"python{version}"
    path.write_text(INTERPRETER.format(version=version))
    path.chmod(0o755)
    return str(path)


def make(clone, extra="dev", python=None):
    """Run the script; return its exit status and the last line that it prints."""
    environment = {"PATH": os.environ["PATH"]} | ({"PYTHON": python} if python else {})
    done = subprocess.run(
        [str(clone / "scripts" / "environment"), extra], env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.stdout == ""
    return done.returncode, (done.stderr.splitlines() or [""])[-1]


def installations(clone):
    return (clone / "pip.log").read_text().splitlines() if (clone / "pip.log").exists() else []


@pytest.mark.parametrize("version", ["3.11", "3.14"])
def test_pip_itself_comes_first_and_a_second_call_installs_nothing(clone, version):
    assert make(clone, python=interpreter(clone, version))[0] == 0
    first, second = installations(clone)
    assert first.endswith("-c constraints.txt --upgrade pip")
    assert second.endswith("-c constraints.txt -e .[dev]")

    assert make(clone) == make(clone, "demo") == (0, "")
    assert len(installations(clone)) == 2


@pytest.mark.parametrize("name", ["pyproject.toml", "constraints.txt"])
def test_packages_are_installed_again_where_what_they_should_be_has_changed_or_the_tests_need_more(clone, name):
    assert make(clone, "demo", interpreter(clone, "3.11"))[0] == 0
    assert make(clone, "dev")[0] == 0
    assert len(installations(clone)) == 4

    with open(clone / name, "a") as file:
        file.write("\n# changed\n")

    assert make(clone)[0] == 0
    assert len(installations(clone)) == 6


@pytest.mark.parametrize("version", ["2.7", "3.10", "3.15", ""])
def test_another_python_or_none_is_refused_by_its_version_and_with_those_that_are_taken(clone, version):
    status, line = make(clone, python=interpreter(clone, version) if version else "python9")

    assert status == 1
    problem = f"is Python {version}, and Penstock takes Python 3.11 to 3.14 here. Name another one: make PYTHON="
    assert (problem if version else "penstock: there is no Python that runs as python9. ") in line
    assert not (clone / ".venv").exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("cp python3.12 .venv/bin/python", "was made with Python 3.11, and its interpreter is Python 3.12 now"),
        ("echo VIRTUAL_ENV=/a/.venv > .venv/bin/activate", "was made in another folder, and its commands run there"),
        (
            'mv .venv ..; ln -s ../.venv .venv; echo "VIRTUAL_ENV=\'$(dirname "$PWD")/.venv\'" > .venv/bin/activate',
            "was made in another folder, and its commands run there",
        ),
        ("rm .venv/pyvenv.cfg", "is none that Python's venv has made"),
        ("rm -r .venv; ./python3.10 -m venv .venv", "is Python 3.10, and Penstock takes Python 3.11 to 3.14 here"),
    ],
)
def test_an_environment_of_another_python_or_folder_is_left_as_it_is_and_refused(clone, change, problem):
    make(clone, python=interpreter(clone, "3.11"))
    for version in ("3.10", "3.12"):
        interpreter(clone, version)
    subprocess.run(change, shell=True, cwd=clone, check=True)

    status, line = make(clone)

    assert (status, line) == (1, f"penstock: .venv {problem}. Remove it, then run make again: rm -r .venv")
    assert (clone / ".venv").exists()


def test_an_environment_of_another_python_than_the_one_asked_for_is_refused(clone):
    make(clone, python=interpreter(clone, "3.11"))

    status, line = make(clone, python=interpreter(clone, "3.13"))

    assert status == 1
    assert line.startswith("penstock: .venv has Python 3.11, and PYTHON=")


@pytest.mark.parametrize("name", ["python", "activate"])
def test_an_environment_whose_interpreter_is_gone_or_that_was_interrupted_is_made_anew(clone, name):
    make(clone, python=interpreter(clone, "3.11"))
    (clone / ".venv" / "bin" / name).unlink()

    assert make(clone, python=interpreter(clone, "3.12"))[0] == 0
    assert len(installations(clone)) == 4


def test_two_at_once_install_one_after_the_other(clone):
    environment = {"PATH": os.environ["PATH"], "PYTHON": interpreter(clone, "3.11")}
    command = [str(clone / "scripts" / "environment"), "dev"]
    both = [subprocess.Popen(command, env=environment, stderr=subprocess.DEVNULL) for _ in range(2)]

    assert [process.wait(60) for process in both] == [0, 0]
    assert len(installations(clone)) == 2


@pytest.mark.parametrize(
    ("says", "problem"),
    [
        (f"{RETRYING}\nERROR: No matching distribution found for pip", "no package index"),
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left", "no space is left in"),
        (f"{RETRYING}\nERROR: Failed building wheel", "ERROR: Failed building wheel."),
        ("ERROR: Cannot install x\nERROR: Impossible: for help visit https://pip", "ERROR: Cannot install x. It"),
        ("ERROR: No matching distribution found for a==9", "ERROR: No matching distribution found for a==9. It"),
        ("", "it ended with status 1. It came from: .venv/bin/python -m pip install"),
    ],
)
def test_an_installation_that_fails_is_told_in_one_line_and_tried_again(clone, says, problem):
    (clone / "says").write_text(says)
    (clone / "status").write_text("1")

    status, line = make(clone, python=interpreter(clone, "3.11"))
    assert (status, line.startswith(f"penstock: {problem}")) == (1, True), line

    (clone / "status").write_text("0")
    assert make(clone)[0] == 0
