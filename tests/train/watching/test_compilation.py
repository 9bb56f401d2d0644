"""A line where a compilation begins, and none where nothing is compiled."""

import pytest
import torch

from penstock.train.watching.compilation import CompilationWatch


@pytest.fixture(autouse=True)
def _forget_what_was_compiled():
    yield
    torch.compiler.reset()


def test_the_first_compilation_of_a_block_is_told_when_it_begins():
    watch, told = CompilationWatch(), []
    functions = [torch.compile(function, backend="eager") for function in (torch.tanh, torch.sigmoid)]

    with watch.around("step 1", told.append):
        told.append("begun")
        for function in functions:
            function(torch.ones(2))
            told.append("compiled")
    with watch.around("step 2", told.append):
        functions[0](torch.ones(2))

    line = "step 1 compiles the layers; that takes a while"
    assert told == ["begun", line, "compiled", "compiled"]
    assert not watch.has_begun


def test_a_compilation_after_a_block_that_failed_is_not_told():
    watch, told = CompilationWatch(), []

    with pytest.raises(ZeroDivisionError), watch.around("step 1", told.append):
        raise ZeroDivisionError
    torch.compile(torch.tanh, backend="eager")(torch.ones(2))

    assert (told, watch.has_begun) == ([], False)
