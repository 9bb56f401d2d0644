"""What commands print, and where."""

import os
import sys

from penstock.cli.output import complain, forget_stdout, say


def test_results_and_complaints_go_to_their_own_streams(capsys):
    say("a result")
    say("ends its line\n")
    complain("a problem")

    assert capsys.readouterr() == ("a result\nends its line\n", "penstock: a problem\n")


def test_forgotten_output_goes_nowhere(tmp_path, monkeypatch):
    with open(tmp_path / "out", "w") as file:
        monkeypatch.setattr(sys, "stdout", file)
        forget_stdout()
        os.write(file.fileno(), b"lost")

    assert (tmp_path / "out").read_text() == ""
