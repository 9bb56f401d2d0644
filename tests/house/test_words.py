"""The code uses the project's words, and only the command line speaks or looks at the world."""

import ast
import io
import re
import tokenize

import pytest

from tests.house.source import ROOT, defined_names, modules, parse
from tests.house.test_pages import prose

WORDS_OF_SCHEDULES = ["rank", "stage", "microbatch", "action", "instruction", "timeline", "span", "makespan"]
BANNED_WORDS = {"mb", "pg", "cfg", "fwd", "bwd", "chunk", "chunks"}
BANNED_NAMES = ("stage_idx", "stage_id")
READERS_OF_THE_ENVIRONMENT = {  # below cli/: the variables of torchrun, and one by which NCCL's backend is made
    "penstock.execute.transport.torchrun",
    "penstock.execute.undocumented_backends",
}
ENVIRONMENT = {"os.environ", "os.getenv", "os.environb", "os.putenv", "sys.argv"}


def wrong_words(module):
    return [
        f"{module.at(node)}: {name}"
        for name, node in defined_names(module)
        if BANNED_WORDS & set(re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name.lower() if name.isupper() else name))
        or BANNED_WORDS & set(name.lower().split("_"))
        or name.lower().endswith(BANNED_NAMES)
    ]


def prints(module):
    called = [node for node in ast.walk(module.tree) if isinstance(node, ast.Call)]
    return [module.at(node) for node in called if isinstance(node.func, ast.Name) and node.func.id == "print"]


def environment_reads(module):
    used = [node for node in ast.walk(module.tree) if isinstance(node, ast.Attribute)]
    return [module.at(node) for node in used if ast.unparse(node) in ENVIRONMENT]


def test_only_the_words_of_the_project_are_used():
    found = [line for module in modules() for line in wrong_words(module)]
    assert not found, "\n" + "\n".join(found)


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


@pytest.mark.parametrize(
    "text", ["num_mb = 1", "def fwd(): ...", "x.pg = 1", "def f(stage_idx): ...", "import a as cfg"]
)
def test_planted_words_are_found(text):
    assert len(wrong_words(parse(text, "penstock.example"))) == 1


@pytest.mark.parametrize("text", ["parts = tensor.chunk(2)", "num_microbatches = 1", "backward_s = 2", "HUMBLE = 1"])
def test_other_peoples_words_and_longer_words_pass(text):
    assert wrong_words(parse(text, "penstock.example")) == []


def test_planted_prints_and_environment_reads_are_found():
    module = parse("import os\nprint(os.environ['HOME'])", "penstock.ir.example")

    assert len(prints(module)) == 1
    assert len(environment_reads(module)) == 1


OLD_WORDS = [
    word for word in (ROOT / "tests" / "house" / "old_words.txt").read_text(encoding="utf-8").splitlines() if word
]


def old_words(text):
    """Words of a private dictionary that the project once had: names as they were written, phrases over line ends."""
    either = "|".join(r"\s+".join(map(re.escape, word.split())) for word in OLD_WORDS)
    return re.findall(rf"(?<![\w-])(?:{either})(?![\w-])", text)


def written_files():
    folders = [ROOT / name for name in ("src", "docs", "tests", "examples", "bench", "changelog.d")]
    found = [path for folder in folders for path in folder.rglob("*") if path.suffix in (".py", ".md", ".toml", ".js")]
    return [*ROOT.glob("*.md"), *(path for path in found if "data" not in path.relative_to(ROOT).parts)]


def test_old_words_are_gone():
    found = {str(path.relative_to(ROOT)): old_words(path.read_text(encoding="utf-8")) for path in written_files()}
    assert {path: words for path, words in found.items() if words} == {}


def test_an_old_word_is_found_as_a_whole():
    words = " ".join(reversed(("out", "way"))), "Led" + "ger"

    assert old_words(f"the {words[0]}, and a {words[1]}s {words[1]}") == list(words)
    assert len(old_words("way" + "\n    out")) == 1


RIDDLE = re.compile(r"(?:\A|[.!?]\s+|\n\s*\n\s*|\n *[*-] )((?:What|Whatever|Who|Whoever) [^\n?]*)(?=\n|\Z)")
"""A sentence, no question, without a thing that acts."""


def riddles(text):
    """Sentences that begin with a relative word; a name in bold, such as a heading within a list, is none."""
    return RIDDLE.findall(text)


def spoken(module):
    """The docstrings and comments of a module, each as one text."""
    comments = [
        token.string.lstrip("# ")
        for token in tokenize.generate_tokens(io.StringIO(module.text).readline)
        if token.type == tokenize.COMMENT
    ]
    bodies = [body for node in ast.walk(module.tree) if isinstance(body := getattr(node, "body", None), list)]
    statements = [each for body in bodies for each in body]
    values = [each.value for each in statements if isinstance(each, ast.Expr)]
    return comments + [each.value for each in values if isinstance(each, ast.Constant) and isinstance(each.value, str)]


def test_sentences_of_the_code_begin_with_the_thing_that_acts():
    assert [f"{module.name}: {line}" for module in modules() for text in spoken(module) for line in riddles(text)] == []


def test_sentences_of_the_pages_begin_with_the_thing_that_acts():
    folders = ((ROOT, "*.md"), (ROOT / "docs", "**/*.md"), (ROOT / "changelog.d", "*.md"))
    pages = [path for folder, pattern in folders for path in folder.glob(pattern) if path.name != "CHANGELOG.md"]
    texts = {path.name: prose(path.read_text(encoding="utf-8")) for path in pages}
    plain = {name: re.sub(r"^(?:\||#).*$", "", text, flags=re.MULTILINE) for name, text in texts.items()}
    assert {name: found for name, text in plain.items() if (found := riddles(text))} == {}


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("What a stage keeps is freed.", 1),
        ("It waits. Whoever sends it is known.", 1),
        ("A list:\n\n* What comes is kept.\n* It says what comes.", 1),
        ("What are stages?", 0),
        ("1. **What would help** simulates changes.", 0),
    ],
)
def test_a_planted_riddle_is_found(text, number):
    assert len(riddles(text)) == number
