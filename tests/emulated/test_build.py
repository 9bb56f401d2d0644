"""What the build lacks is said by name, and what was built is found again."""

import pytest

from tests.emulated import build

pytestmark = pytest.mark.emulated


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_a_missing_compiler_is_named(empty_cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")

    assert "no C++20 compiler: no-such-compiler is not on the path" in build.reason_not_to_build()


def test_missing_headers_are_named(empty_cache, monkeypatch):
    monkeypatch.setenv("CXX", "true")
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda: {"include": "/no/such/folder"})

    assert "/no/such/folder/Python.h does not exist" in build.reason_not_to_build()


def test_a_missing_ninja_is_named(empty_cache, monkeypatch):
    monkeypatch.setenv("CXX", "true")
    headers = empty_cache / "Python.h"
    headers.touch()
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda: {"include": str(empty_cache)})
    monkeypatch.setattr(build, "_path_with_scripts", lambda: str(empty_cache))

    assert "no ninja" in build.reason_not_to_build()


def test_nothing_is_needed_where_it_was_built_before(empty_cache, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    build.library().parent.mkdir(parents=True)
    build.library().touch()

    assert build.reason_not_to_build() == ""


@pytest.mark.parametrize("place", ["a file", "read-only", "no home"])
def test_it_lies_in_the_checkout_where_the_user_has_no_cache_folder(tmp_path, monkeypatch, place):
    (tmp_path / "file").touch()
    (tmp_path / "read-only").mkdir()
    caches = {"a file": str(tmp_path / "file"), "read-only": str(tmp_path / "read-only"), "no home": ""}
    monkeypatch.setenv("XDG_CACHE_HOME", caches[place])
    if place == "read-only":
        monkeypatch.setattr(build.os, "access", lambda path, mode: False)  # root may write anywhere
    if place == "no home":
        monkeypatch.setattr(build.os.path, "expanduser", str)

    assert build.library().is_relative_to(build.ROOT / ".pytest_cache")


def test_another_source_has_another_folder(empty_cache, monkeypatch):
    before = build.library()
    (empty_cache / "other.cpp").write_text("int x;")
    monkeypatch.setattr(build, "SOURCES", [*build.SOURCES, empty_cache / "other.cpp"])

    assert build.library() != before
    assert "emulated-" in build.library().parent.name
