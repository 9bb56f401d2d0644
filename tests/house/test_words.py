"""The words of schedules are explained on a page, and only the command line prints or reads the environment."""

import ast
import re

import pytest

from tests.house.source import ROOT, modules, parse

WORDS_OF_SCHEDULES = ["rank", "stage", "microbatch", "action", "instruction", "timeline", "span", "makespan"]
READERS_OF_THE_ENVIRONMENT = {  # below cli/: the variables of torchrun, and one by which NCCL's backend is made
    "penstock.execute.transport.torchrun",
    "penstock.execute.undocumented_backends",
}
ENVIRONMENT = {"os.environ", "os.getenv", "os.environb", "os.putenv", "sys.argv"}


def prints(module):
    called = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    return [module.at(node) for node in called if isinstance(node.func, ast.Name) and node.func.id == "print"]


def environment_reads(module):
    used = [node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]
    return [module.at(node) for node in used if ast.unparse(node) in ENVIRONMENT]


def test_nothing_below_the_command_line_prints():
    assert [place for module in modules() if module.room != "cli" for place in prints(module)] == []


def test_nothing_below_the_command_line_reads_the_environment():
    below = [module for module in modules() if module.room != "cli" and module.name not in READERS_OF_THE_ENVIRONMENT]
    assert [place for module in below for place in environment_reads(module)] == []


def test_warnings_are_given_at_the_users_line_by_the_one_function_for_it():
    assert [module.name for module in modules() if "warnings.warn(" in module.text] == ["penstock.errors"]


@pytest.mark.parametrize("text", ["TODO", "FIXME", "XXX", "NotImplementedError"])
def test_nothing_is_left_unfinished(text):
    pattern = re.compile(rf"\b{text}\b")
    assert [module.name for module in modules() if pattern.search(module.text)] == []


@pytest.mark.parametrize("word", [*WORDS_OF_SCHEDULES, "activation", "context", "carry", "tied", "stream", "skip"])
def test_the_words_are_written_down(word):
    text = (ROOT / "docs" / "words.md").read_text(encoding="utf-8")
    assert re.search(rf"^\|[^|]*\*\*{word}\*\*", text, re.MULTILINE)


def test_planted_prints_and_environment_reads_are_found():
    module = parse("import os\nprint(os.environ['HOME'])", "penstock.ir.example")

    assert len(prints(module)) == 1
    assert len(environment_reads(module)) == 1
