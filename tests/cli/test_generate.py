"""`penstock generate`: what it refuses; what it writes is tested in tests/train/test_loop.py."""

import pytest


@pytest.fixture
def run_folder(tmp_path):
    """That of a run that has not finished."""
    (tmp_path / "config.toml").write_text("[run]\nfolder = 'elsewhere'\n[data]\ncorpus = 'stdlib'\n")
    return tmp_path


def test_a_folder_without_a_run_is_refused(refused, tmp_path):
    told = f"penstock: RUN_FOLDER: {tmp_path / 'none'} holds no config.toml; give the folder of a run\n"
    assert refused("generate", tmp_path / "none", "--prompt", "a") == told


def test_a_run_that_has_not_finished_has_no_weights_yet(refused, run_folder):
    assert str(run_folder) in refused("generate", run_folder, "--prompt", "a", status=6).splitlines()[0]


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--prompt", ""], 2, "--prompt is empty"),
        (["--prompt", "a", "--tokens", "0"], 1, "sample.tokens: got 0, expected greater than or equal to 1"),
        (["--prompt", "a", "--top-k", "x"], 2, "--top-k"),
    ],
)
def test_wrong_arguments_are_refused_by_their_name(refused, run_folder, arguments, status, text):
    assert text in refused("generate", run_folder, *arguments, status=status).splitlines()[0]
