"""Run what a page shows: its Python, its files and its commands, in an empty folder, and compare what they print.

python -m tests.support.pages docs/start.md             run a page
python -m tests.support.pages --update docs/start.md    run it, and write what its commands print now into the page

The Python blocks of a page run one after another in one namespace. A comment behind a `print(...)` at the start of a
line is what it prints. In a console block, the lines after a line with `$ ` are what the command prints; a line `...`
stands for any lines, also for none. What a block needs beyond this is said in comments right above it:

    <!-- file: train.py -->               the block is this file of the page's folder, and does not run by itself
    <!-- printed -->                      the text is all that the Python block before it prints
    <!-- alone -->                        the block runs in a namespace of its own
    <!-- numbers vary -->                 what it prints holds measured numbers: only the other text is compared
    <!-- in a shell -->                   python and torchrun start as a user starts them, which takes longer
    <!-- equal numbers -->                likewise, but numbers that are shown twice must be printed twice
    <!-- output varies -->                what its commands print is from one run, and is not compared
    <!-- exit status 1 -->                the last command ends with this status
    <!-- needs the module transformers --> the block is left out where this module is not installed
    <!-- not run: REASON -->              the block needs what a test has not
"""

import difflib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from tests.support.page_python import PagePython
from tests.support.page_ranks import free_port, ranks_of, run_script

ROOT = Path(__file__).resolve().parents[2]
FENCE = re.compile(
    r"^(?P<marks>(?:<!-- [^\n]* -->\n)*)```(?P<language>\w+)\n(?P<text>.*?)^```$", re.MULTILINE | re.DOTALL
)
SHOWN_PRINT = re.compile(r"^( *print\(.*\)  # )(.*)$", re.MULTILINE)
MARKS = (
    "file: ",
    "printed",
    "alone",
    "in a shell",
    "numbers vary",
    "equal numbers",
    "output varies",
    "exit status ",
    "needs the module ",
    "not run: ",
)
PIPE = re.compile(r" (?=[|>] )")
NUMBER = re.compile(r"[-+]?\d[\d.,e+-]*")
ONLY_ONCE = "penstock: compiling loops"
"""How a line begins that only the first command prints on a machine whose caches are empty: no page shows it."""
LONGEST_COMMAND_S = 300
COLUMNS = "100"


@dataclass(frozen=True)
class Block:
    """A fenced block: where its text begins in the page, its language, and what the comment above it says."""

    start: int
    language: str
    marks: tuple
    text: str

    def mark(self, name):
        """What follows the name of a mark, or None where the block has no such mark."""
        return next((mark.removeprefix(name) for mark in self.marks if mark.startswith(name)), None)


class PageError(Exception):
    """A block does not do what the page says."""


def blocks_of(page):
    """List the blocks of a page's text that are run, or are files, in their order."""
    found = []
    for match in FENCE.finditer(page):
        marks = tuple(re.findall(r"^<!-- (.*) -->$", match["marks"], re.MULTILINE))
        unknown = [mark for mark in marks if not mark.startswith(MARKS)]
        if unknown:
            raise PageError(f"unknown mark {unknown[0]!r}")
        block = Block(match.start("text"), match["language"], marks, match["text"])
        if block.language in ("python", "console") or any(mark.startswith(MARKS[:2]) for mark in marks):
            found.append(block)
    return found


def run_page(page, folder):
    """Run the blocks of a page's text in a folder, and return the page with what they printed.

    Raises:
        PageError: a command ended with another status than expected, Python raised, or printed more than its comments
            show.
    """
    with closing(PagePython(folder, environment())) as python:
        results = _results_of(page, folder, python)
    for block, text in reversed(results):
        page = page[: block.start] + text + page[block.start + len(block.text) :]
    return page


def _results_of(page, folder, python):
    """Run the blocks, and pair each that shows something with what it shows now."""
    said, results = "", []
    for block in blocks_of(page):
        module = block.mark("needs the module ")
        if block.mark("not run: ") is not None or (module and importlib.util.find_spec(module) is None):
            continue
        if block.mark("file: ") is not None:
            path = folder / block.mark("file: ")
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.text, encoding="utf-8")
        elif "printed" in block.marks:
            results.append((block, block.text if matches(block.text, said, block) else said))
        elif block.language == "python":
            said = run_python(block, python)
            results.append((block, with_comments(block, said)))
        else:
            results.append((block, run_console(block, folder)))
    return results


def run_python(block, python):
    """Run a Python block, and return what it prints."""
    is_fine, output = python.run(block.text, is_alone="alone" in block.marks, timeout_s=LONGEST_COMMAND_S)
    if not is_fine:
        raise PageError(f"{block.text}\nfailed:\n{output}")
    return "".join(f"{line.rstrip()}\n" for line in output.splitlines())


def with_comments(block, said):
    """The block with what it printed in the comments behind its prints."""
    lines = said.splitlines()
    shown = SHOWN_PRINT.findall(block.text)
    if all(any(matches(text, line, block) for line in lines) for _, text in shown):
        return block.text
    if len(lines) != len(shown):
        raise PageError(f"printed {len(lines)} lines, but {len(shown)} are shown:\n{said}")
    remaining = iter(lines)
    return SHOWN_PRINT.sub(lambda match: match[1] + next(remaining), block.text)


def run_console(block, folder):
    """Run the commands of a console block, and return the block with what they print."""
    commands = commands_of(block.text)
    outputs = []
    for number, (command, _) in enumerate(commands):
        done = run_command(command, folder, in_shell="in a shell" in block.marks)
        wanted = int(block.mark("exit status ") or 0) if number == len(commands) - 1 else 0
        if done.returncode != wanted:
            raise PageError(f"$ {command}\nended with {done.returncode}, not {wanted}:\n{done.stdout}")
        lines = done.stdout.replace(f"{folder}/", "").splitlines()
        outputs.append("".join(f"{line.rstrip()}\n" for line in lines if not line.startswith(ONLY_ONCE)))
    shown = [text for _, text in commands]
    if not all(matches(text, output, block) for text, output in zip(shown, outputs, strict=True)):
        shown = outputs
    if "equal numbers" in block.marks and repetitions("".join(shown)) != repetitions("".join(outputs)):
        shown = outputs
    pairs = zip(commands, shown, strict=True)
    return "".join("$ " + command.replace("\n", "\n> ") + "\n" + text for (command, _), text in pairs)


def run_command(command, folder, *, in_shell):
    """Run a command in a folder; scripts start as forks of a process that has imported torch, unless in a shell."""
    first, *rest = PIPE.split(command, maxsplit=1)
    script = None if in_shell else ranks_of(first)
    if script is not None:
        done = run_script(*script, folder, environment(), LONGEST_COMMAND_S)
        return _piped(done, *rest, folder) if rest else done
    return subprocess.run(
        re.sub(r"(?<=--master-port )\d+", str(free_port()), command),  # two runs at once would meet at one port
        shell=True,
        executable="/bin/bash",
        cwd=folder,
        env=environment(),
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=LONGEST_COMMAND_S,
        check=False,
    )


def _piped(done, rest, folder):
    """Give the output of a command to what follows it, `| command` or `> file`."""
    given = {"shell": True, "cwd": folder, "env": environment(), "text": True, "input": done.stdout}
    after = subprocess.run(f"cat {rest}", stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=False, **given)
    done.stdout = after.stdout
    done.returncode = done.returncode if rest.startswith(">") else after.returncode
    return done


def commands_of(text):
    """Split a console block into commands, each with what it shows of their output; `> ` continues a command."""
    parts = re.split(r"^\$ ", text, flags=re.MULTILINE)[1:]
    found = []
    for part in parts:
        command, *rest = part.split("\n> ")
        last, _, shown = (rest[-1] if rest else command).partition("\n")
        lines = [*([command] if rest else []), *rest[:-1], last]
        found.append(("\n".join(lines), shown))
    return found


def matches(shown, output, block):
    """Whether an output is as shown, where a line `...` stands for any lines."""
    if "output varies" in block.marks:
        return bool(shown)
    parts = re.split(r"^\.\.\.\n", comparable(shown, block), flags=re.MULTILINE)
    return re.fullmatch(r"(?:.*\n)*?".join(map(re.escape, parts)), comparable(output, block)) is not None


def comparable(text, block):
    """The text as it is compared: where numbers vary, without them and without what they make wider."""
    if not {"numbers vary", "equal numbers"} & set(block.marks):
        return text
    return re.sub(r"[ \t─━=-]{2,}", " ", NUMBER.sub("#", text))


def repetitions(text):
    """Each number of a text as the place where it first stands among the numbers."""
    numbers = NUMBER.findall(text)
    return [numbers.index(number) for number in numbers]


def environment():
    """What commands run with: this checkout, one thread, no terminal, and nothing of a torchrun around the test."""
    ranks = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    kept = {name: value for name, value in os.environ.items() if name not in ranks}
    paths = [str(ROOT / "src"), *filter(None, [kept.get("PYTHONPATH")])]
    path = os.pathsep.join([str(Path(sys.executable).parent), kept.get("PATH", "")])
    more = {"PYTHONPATH": os.pathsep.join(paths), "PATH": path, "OMP_NUM_THREADS": "1", "COLUMNS": COLUMNS}
    return kept | more | {"TMPDIR": tempfile.gettempdir(), "PYTHONWARNINGS": kept.get("PYTHONWARNINGS", "")}


def difference_of(name, *, is_update=False):
    """Run a page in a folder with the examples; return how it differs from what its commands print, or write that."""
    path = ROOT / name
    page = path.read_text(encoding="utf-8")
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(ROOT / "examples", Path(folder) / "examples", ignore=shutil.ignore_patterns("__pycache__"))
        found = run_page(page, Path(folder))
    if is_update:
        path.write_text(found, encoding="utf-8")
        return ""
    return "\n".join(difflib.unified_diff(page.splitlines(), found.splitlines(), "page", "now", lineterm="", n=1))


def main(arguments):
    """Run pages, and say where they differ from what they show, or write it."""
    is_update = "--update" in arguments
    names = [argument for argument in arguments if argument != "--update"]
    found = {name: difference_of(name, is_update=is_update) for name in names}
    differing = [
        f"{name} shows something else than its commands print:\n{text}" for name, text in found.items() if text
    ]
    if differing:
        sys.exit("\n".join(differing))


if __name__ == "__main__":
    main(sys.argv[1:])
