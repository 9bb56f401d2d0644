"""`penstock generate`: what it refuses; what it writes is tested in tests/train/test_loop.py."""

import pytest

from penstock.cli.entry import main


@pytest.fixture
def run_folder(tmp_path):
    """That of a run that has not finished."""
    (tmp_path / "config.toml").write_text("[run]\nfolder = 'elsewhere'\n[data]\ncorpus = 'stdlib'\n")
    return tmp_path


def refused(capsys, *arguments):
    status = main(["generate", *map(str, arguments)])
    printed = capsys.readouterr()
    assert printed.out == ""
    return status, printed.err.removeprefix("penstock: ").splitlines()[0]


def test_a_folder_without_a_run_is_refused(capsys, tmp_path):
    status, text = refused(capsys, tmp_path / "none", "--prompt", "a")

    assert status == 1
    assert text == f"RUN_FOLDER: {tmp_path / 'none'} holds no config.toml; give the folder of a run"


def test_a_run_that_has_not_finished_has_no_weights_yet(capsys, run_folder):
    _, text = refused(capsys, run_folder, "--prompt", "a")

    assert str(run_folder) in text


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        ([], 2, "the following arguments are required: --prompt"),
        (["--prompt", ""], 2, "--prompt is empty"),
        (["--prompt", "a", "--tokens", "0"], 1, "sample.tokens: got 0, expected greater than or equal to 1"),
        (["--prompt", "a", "--temperature", "-1"], 1, "sample.temperature: got -1.0, expected greater than or equal"),
        (["--prompt", "a", "--top-k", "-1"], 1, "sample.top_k: got -1, expected greater than or equal to 0"),
        (["--prompt", "a", "--top-k", "x"], 2, "--top-k"),
    ],
)
def test_wrong_arguments_are_refused_by_their_name(capsys, run_folder, arguments, status, text):
    found, told = refused(capsys, run_folder, *arguments)

    assert found == status
    assert text in told
