"""The words of schedules are explained on a page, and only the command line prints or reads the environment."""

import ast
import re

from tests.house.source import ROOT, modules, nodes, parse

WORDS = ["rank", "stage", "microbatch", "action", "instruction", "timeline", "span", "makespan"]
WORDS += ["activation", "context", "carry", "tied", "stream", "skip"]
READERS_OF_THE_ENVIRONMENT = {  # below cli/: the variables of torchrun, and one by which NCCL's backend is made
    "penstock.execute.transport.torchrun",
    "penstock.execute.undocumented_backends",
}
ENVIRONMENT = {"os.environ", "os.getenv", "os.environb", "os.putenv", "sys.argv"}


def prints(module):
    calls = nodes(module, ast.Call)
    return [module.at(node) for node in calls if isinstance(node.func, ast.Name) and node.func.id == "print"]


def environment_reads(module):
    return [module.at(node) for node in nodes(module, ast.Attribute) if ast.unparse(node) in ENVIRONMENT]


def test_nothing_below_the_command_line_prints():
    assert [place for module in modules() if module.room != "cli" for place in prints(module)] == []


def test_nothing_below_the_command_line_reads_the_environment():
    below = [module for module in modules() if module.room != "cli" and module.name not in READERS_OF_THE_ENVIRONMENT]
    assert [place for module in below for place in environment_reads(module)] == []


def test_warnings_are_given_at_the_users_line_by_the_one_function_for_it():
    assert [module.name for module in modules() if "warnings.warn(" in module.text] == ["penstock.errors"]


def test_nothing_is_left_unfinished():
    pattern = re.compile(r"\b(TODO|FIXME|XXX|NotImplementedError)\b")
    assert [module.name for module in modules() if pattern.search(module.text)] == []


def test_the_words_are_written_down():
    text = (ROOT / "docs" / "words.md").read_text(encoding="utf-8")
    assert [word for word in WORDS if not re.search(rf"^\|[^|]*\*\*{word}\*\*", text, re.MULTILINE)] == []


def test_planted_prints_and_environment_reads_are_found():
    module = parse("import os\nprint(os.environ['HOME'])", "penstock.ir.example")

    assert len(prints(module)) == 1
    assert len(environment_reads(module)) == 1
