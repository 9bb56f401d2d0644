"""`penstock doctor --system`."""

import time

from penstock.cli.entry import main


def test_the_table_names_everything_that_training_needs(capsys):
    begin_s = time.monotonic()

    status = main(["doctor", "--system"])

    lines = capsys.readouterr().out.splitlines()
    assert status == 0
    assert lines[0].split("  ")[0] == "what"
    assert lines[0].endswith("what to fix")
    subjects = [line.split("  ")[0] for line in lines[2:]]
    assert subjects[:8] == [
        "Python", "torch", "backends", "CUDA devices", "cores", "memory", "loopback", "hostname",
    ]  # fmt: skip
    assert subjects[8:] == ["disk, this folder", "disk, temporary", "matplotlib", "tensorboard", "tokenizers"]
    assert time.monotonic() - begin_s < 5.0
