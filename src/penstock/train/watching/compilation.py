"""Telling of compilations while they last: a first one may take a minute, and looks like a step that hangs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from penstock.execute.undocumented_compiler import watch_compilations

Say = Callable[[str], None]
"""Shows a line to people."""


@dataclass(slots=True)
class CompilationWatch:
    """Whether this process compiles layers in a block; a line says so when the first compilation begins."""

    has_begun: bool = False

    @contextmanager
    def around(self, what: str, say: Say) -> Iterator[None]:
        """Watch what runs in here, which `what` names in the line."""
        self.has_begun = False

        def begin() -> None:
            if not self.has_begun:
                self.has_begun = True
                say(f"{what} compiles the layers; that takes a while")

        stop = watch_compilations(begin, lambda: None)
        try:
            yield
        finally:
            stop()
