"""What tests of commands ask most often: what one printed, or why it was refused."""

import pytest

from penstock.cli.entry import main


@pytest.fixture
def printed(capsys):
    """Run a command that ends well; return what it printed."""

    def run(*arguments):
        assert main([*map(str, arguments)]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture
def refused(capsys):
    """Run a command that ends badly and prints no result; return its complaint."""

    def run(*arguments, status=1):
        capsys.readouterr()
        assert main([*map(str, arguments)]) == status
        said, complained = capsys.readouterr()
        assert said == ""
        return complained

    return run
