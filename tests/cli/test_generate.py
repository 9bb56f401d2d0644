"""`penstock generate`: what it refuses; what it writes is tested in tests/train/test_loop.py."""

import pytest


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["--prompt", ""], 2, "--prompt is empty"),
        (["--prompt", "a", "--tokens", "0"], 1, "sample.tokens: got 0, expected greater than or equal to 1"),
        (["--prompt", "a", "--top-k", "x"], 2, "--top-k"),
        (["--prompt", "a"], 6, "holds neither weights nor a checkpoint"),
    ],
)
def test_wrong_arguments_a_run_that_has_not_finished_and_a_folder_without_one_are_refused(
    refused, tmp_path, arguments, status, text
):
    (tmp_path / "config.toml").write_text("[run]\nfolder = 'elsewhere'\n[data]\ncorpus = 'stdlib'\n")

    complaint = refused("generate", tmp_path, *arguments, status=status).splitlines()[0]
    assert text in complaint
    assert status != 6 or str(tmp_path) in complaint
    told = f"penstock: RUN_FOLDER: {tmp_path / 'none'} holds no config.toml; give the folder of a run\n"
    assert refused("generate", tmp_path / "none", "--prompt", "a") == told
