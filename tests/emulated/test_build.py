"""What the build lacks is said by name, and what was built is found again."""

import pytest

from tests.emulated import build

pytestmark = pytest.mark.emulated


@pytest.fixture
def empty_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize(
    ("compiler", "has_headers", "reason"),
    [
        ("no-such-compiler", True, "no C++20 compiler: no-such-compiler is not on the path"),
        ("true", False, "Python.h does not exist"),
        ("true", True, "no ninja"),
    ],
)
def test_what_is_missing_is_named(empty_cache, monkeypatch, compiler, has_headers, reason):
    monkeypatch.setenv("CXX", compiler)
    if has_headers:
        (empty_cache / "Python.h").touch()
    monkeypatch.setattr(build.sysconfig, "get_paths", lambda: {"include": str(empty_cache)})
    monkeypatch.setattr(build, "_path_with_scripts", lambda: str(empty_cache))

    assert reason in build.reason_not_to_build()
    build.library().parent.mkdir(parents=True)
    build.library().touch()
    assert build.reason_not_to_build() == ""  # nothing is needed where it was built before


@pytest.mark.parametrize("place", ["a file", "read-only", ""])
def test_it_lies_in_the_checkout_where_the_user_has_no_cache_folder(tmp_path, monkeypatch, place):
    (tmp_path / "a file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / place) if place else "")
    if place == "read-only":
        monkeypatch.setattr(build.os, "access", lambda path, mode: False)  # root may write anywhere
    monkeypatch.setattr(build.os.path, "expanduser", str)  # a user without a home

    assert build.library().is_relative_to(build.ROOT / ".pytest_cache")
