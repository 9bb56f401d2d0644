"""No file of text is opened in the encoding of the user's locale, which may be another one than that of the file."""

import ast

import pytest

from tests.house.source import assert_none, modules, nodes, parse


def left_to_the_locale(module):
    """List the calls that open a file of text without its encoding."""
    calls = nodes(module, ast.Call)
    return [module.at(call) for call in calls if _opens_text(call) and "encoding" not in _keywords(call)]


def _opens_text(call):
    is_method = isinstance(call.func, ast.Attribute)
    name = call.func.attr if is_method else getattr(call.func, "id", "")
    if name != "open":
        return is_method and name in ("read_text", "write_text")
    modes = [_keywords(call).get("mode"), *call.args[0 if is_method else 1 :][:1]]
    mode = next(filter(None, modes), ast.Constant("r"))
    return isinstance(mode, ast.Constant) and "b" not in str(mode.value)


def _keywords(call):
    """Return the values of keywords by name."""
    return {keyword.arg: keyword.value for keyword in call.keywords}


def test_every_file_of_text_is_opened_in_an_encoding_of_its_own():
    assert_none([place for module in modules() for place in left_to_the_locale(module)])


@pytest.mark.parametrize(
    "call", ["path.read_text(*x)", "path.write_text(x)", "open(x)", "open(x, 'w')", "path.open('a')"]
)
def test_one_that_is_left_to_the_locale_is_met(call):
    assert left_to_the_locale(parse(call, "penstock.example"))
    assert not left_to_the_locale(parse(call.replace(")", ", encoding='utf-8')"), "penstock.example"))


def test_bytes_and_descriptors_have_no_encoding():
    calls = "open(x, 'rb')\nopen(x, mode='wb')\npath.open('rb')\nos.open(path, flags)"

    assert not left_to_the_locale(parse(calls, "penstock.example"))
