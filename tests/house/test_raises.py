"""scripts/raises.py: which `raise` of a folder its tests execute, in processes that they start too."""

import ast
import builtins
from textwrap import dedent

import pytest

from tests.house.source import script

raises = script("raises")
SOURCE = """
    def first(number):
        if number < 0:
            raise ValueError(
                "negative")
        try:
            return 1 / number
        except ZeroDivisionError:
            raise
    """
"""Line 4 raises an error, and line 9 only hands one on."""
TEST = """
    import subprocess, sys
    import pytest
    from penstock.partition.balance import balance

    def test_one_is_refused_here_and_one_in_another_process():
        with pytest.raises(Exception, match="0 parts were asked for"):
            balance([1.0], 0)
        code = "from penstock.partition.balance import balance; balance([1.0], 2)"
        assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode
    """


def test_a_raise_is_listed_and_a_bare_one_is_not(tmp_path):
    path = tmp_path / "source.py"
    path.write_text(dedent(SOURCE))

    assert raises.raises_of(path) == {4: "ValueError('negative')"}


@pytest.mark.feature("0.2")
def test_a_note_is_written_before_a_raise_and_the_lines_stay(monkeypatch):
    noted = []
    monkeypatch.setattr(builtins, raises.NOTE, noted.append, raising=False)
    names = {}
    tree = raises._Noting("source.py").visit(ast.parse(dedent(SOURCE)))
    exec(compile(ast.fix_missing_locations(tree), "source.py", "exec"), names)

    with pytest.raises(ZeroDivisionError):
        names["first"](0)
    assert noted == []
    with pytest.raises(ValueError, match="negative") as caught:
        names["first"](-1)
    assert noted == ["source.py:4"]
    assert caught.traceback[-1].lineno + 1 == 4


def test_tests_mirror_folders_and_files():
    names = {folder: str(raises.mirrors_of(folder).relative_to(raises.ROOT)) for folder in ("ir", "files.py", ".")}

    assert names == {"ir": "tests/ir", "files.py": "tests/package/test_files.py", ".": "tests"}
    assert str(raises.mirrors_of("cli/launch.py")).endswith("tests/cli/test_launch.py")


@pytest.mark.slow
def test_what_tests_and_their_processes_raise_is_noted(tmp_path):
    path = tmp_path / "test_balance.py"
    path.write_text(dedent(TEST))

    raises.run_noting([path], ["-n0", "-p", "no:cacheprovider"], tmp_path / "notes")

    places = set((tmp_path / "notes").read_text().splitlines())
    found = {
        raises.raises_of(raises.PACKAGE / "partition" / "balance.py")[int(place.split(":")[1])] for place in places
    }
    assert len(found) == 2
    assert all("partition/balance.py" in place for place in places)
