"""TOML files and dotted overrides."""

import pytest

from penstock.errors import ConfigError, FormatError
from penstock.train.settings.overrides import apply_overrides, read_toml


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("32", 32),
        ("3e-4", 3e-4),
        ("true", True),
        ('["a", "b"]', ["a", "b"]),
        ("runs/demo", "runs/demo"),
        ("'32'", "32"),
        ("a=b", "a=b"),
        ("", ""),
        ("1\nother = 2", "1\nother = 2"),
    ],
)
def test_value_is_toml_or_else_a_plain_string(text, value):
    assert apply_overrides({}, [f"a.b={text}"]) == {"a": {"b": value}}


def test_overrides_leave_the_given_table_alone():
    table = {"a": {"b": 1, "c": 2}}

    changed = apply_overrides(table, ["a.b=6", "a.d.e=7"])

    assert changed == {"a": {"b": 6, "c": 2, "d": {"e": 7}}}
    assert table == {"a": {"b": 1, "c": 2}}


@pytest.mark.parametrize(
    ("overrides", "told"),
    [
        (["a.b=5", "a.b=6"], "^a.b: is set twice, a.b=5 and a.b=6; keep one$"),
        (["a.b=5", "a.b=5"], "^a.b: is set twice, a.b=5 and a.b=5; keep one$"),
        (["a.b=5", " a . b = 6"], "^a.b: is set twice, a.b=5 and a.b=6; keep one$"),
        *(([text], r"section\.key=value") for text in ("a.b", "=1", ".b=1", "a.=1", "")),
        (["c.d.e.f=2"], r"^c\.d: holds 1, not a table, so c\.d\.e\.f cannot be set"),
        (["data.files=['a'"], r"data\.files: \['a' is not a TOML value"),
    ],
)
def test_an_override_that_cannot_be_applied_is_refused(overrides, told):
    with pytest.raises(ConfigError, match=told):
        apply_overrides({"c": {"d": 1}}, overrides)


@pytest.mark.parametrize(
    ("content", "place"),
    [
        (b"[run]\nsteps = = 3\n", (2, 9)),
        (b"[run]\nname = 'abc", (2, 12)),
        (b"[run]\nsteps = 1\nsteps = 2\n", (3, 10)),
        (b"[run]\nname = '\xff'\n", (2, 9)),
        (b"x = " + b"[" * 100_000, (1, 100_005)),
    ],
    ids=["two signs", "open string", "twice", "not UTF-8", "too deep"],
)
def test_a_broken_file_is_located_by_line_and_column_and_one_that_cannot_be_read_refused_with_the_reason(
    tmp_path, content, place
):
    path = tmp_path / "run.toml"
    path.write_bytes(content)

    with pytest.raises(FormatError) as caught:
        read_toml(path)

    assert (caught.value.file, caught.value.line, caught.value.column) == (str(path), *place)
    for name, told in (("none.toml", r"none\.toml: cannot be read: No such file"), ("", "read: Is a directory")):
        with pytest.raises(ConfigError, match=told):
            read_toml(tmp_path / name)
