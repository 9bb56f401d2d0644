"""Packages that a run asks for are looked up before it begins."""

import sys

import pytest

from penstock.errors import ConfigError
from penstock.train.settings.optional_packages import (
    OPTIONAL_PACKAGES,
    PICTURES,
    describe_missing_pictures,
    require_packages,
)
from tests.support.tiny_run import PENSTOCK, fork, settings
from tests.train.settings.tables import config_with, merged

# The settings that ask for each package, in the order of the packages.
ASKED = {
    "tensorboard": {"metrics": {"tensorboard": True}},
    "wandb": {"metrics": {"wandb": "offline"}},
    "tokenizers": {"data": {"corpus": "stdlib", "tokenizer": "words.json"}},
    "transformers": {"model": {"transformers": "llama"}},
    "peft": {"adapter": {"kind": "lora"}, "model": {"transformers": "llama"}},
    "datasets": {"data": {"corpus": "datasets", "files": ["saved"]}},
    "chats": {"data": {"corpus": "chats", "files": ["a.jsonl"], "tokenizer": "words.json"}},
}


@pytest.fixture
def blocked(monkeypatch):
    for package in (*OPTIONAL_PACKAGES, PICTURES):
        monkeypatch.setitem(sys.modules, package.module, None)


@pytest.mark.parametrize(("package", "asked"), list(zip(OPTIONAL_PACKAGES, ASKED.values(), strict=True)), ids=ASKED)
def test_a_missing_package_is_refused_where_the_run_asks_for_it(package, asked, blocked, monkeypatch):
    require_packages(config_with())
    if package.name == "peft":  # which needs transformers too
        monkeypatch.setitem(sys.modules, "transformers", sys)

    with pytest.raises(ConfigError) as caught:
        require_packages(config_with(**asked))

    message = str(caught.value)
    assert package.key in message
    assert f"needs the {package.name} package" in message
    assert f"pip install '.[{package.extra}]' in Penstock's clone, or {package.alternative}" in message


def test_several_are_told_at_once_and_those_that_can_be_imported_are_no_problem(request):
    config = config_with(**merged(ASKED["tensorboard"], ASKED["tokenizers"]))
    require_packages(config)
    assert describe_missing_pictures(config) == ""

    request.getfixturevalue("blocked")
    with pytest.raises(ConfigError, match=r"(?s)2 settings cannot be used:.*metrics.tensorboard:.*data.tokenizer:"):
        require_packages(config)
    assert describe_missing_pictures(config).startswith("note: there will be no picture of step 20: needs the mat")
    assert describe_missing_pictures(config_with(run={"record_step": 0})) == ""


@pytest.mark.parametrize(
    "environment", [{}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}]
)
def test_the_command_ends_before_a_process_starts_or_the_text_is_read(tmp_path, environment):
    (tmp_path / "run.toml").write_text('[run]\nfolder = "run"\n[data]\nfiles = ["no such file"]\n')
    (tmp_path / "tmp").mkdir()
    words = ["train", "run.toml", *settings("metrics.tensorboard=true", f"pipeline.ranks={1 if environment else 2}")]
    missing = "import sys; sys.modules['torch.utils.tensorboard'] = None"

    process = fork([*PENSTOCK, *words], tmp_path, plant=missing, **environment)
    printed, complained = process.communicate(timeout=60)

    assert process.returncode == 1
    [line] = complained.splitlines()
    assert line.startswith("penstock: metrics.tensorboard: needs the tensorboard package (")
    assert "starting 2 ranks" not in printed
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.toml", "tmp"]
