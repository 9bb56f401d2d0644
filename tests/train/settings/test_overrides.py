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


@pytest.mark.parametrize("second", ["a.b=6", "a.b=5", " a . b = 6"])
def test_a_key_that_is_set_twice_is_refused_with_both_values(second):
    value = second[-1]
    with pytest.raises(ConfigError, match=f"^a.b: is set twice, a.b=5 and a.b={value}; keep one$"):
        apply_overrides({}, ["a.b=5", second])


@pytest.mark.parametrize("override", ["a.b", "=1", ".b=1", "a.=1", ""])
def test_an_override_of_another_form_is_refused(override):
    with pytest.raises(ConfigError, match=r"section\.key=value"):
        apply_overrides({}, [override])


def test_an_override_through_a_value_names_the_value():
    with pytest.raises(ConfigError, match=r"a\.b: holds 1, not a table, so a\.b\.c\.d cannot be set") as caught:
        apply_overrides({"a": {"b": 1}}, ["a.b.c.d=2"])

    assert caught.value.key == "a.b"


def test_a_broken_list_is_refused_instead_of_taken_as_a_string():
    with pytest.raises(ConfigError, match=r"data\.files: \['a' is not a TOML value"):
        apply_overrides({}, ["data.files=['a'"])


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
def test_a_broken_file_is_located_by_line_and_column(tmp_path, content, place):
    path = tmp_path / "run.toml"
    path.write_bytes(content)

    with pytest.raises(FormatError) as caught:
        read_toml(path)

    assert (caught.value.file, caught.value.line, caught.value.column) == (str(path), *place)


def test_a_missing_file_and_a_folder_are_refused_with_the_reason(tmp_path):
    with pytest.raises(ConfigError, match=r"none\.toml: cannot be read: No such file"):
        read_toml(tmp_path / "none.toml")
    with pytest.raises(ConfigError, match="cannot be read: Is a directory"):
        read_toml(tmp_path)
