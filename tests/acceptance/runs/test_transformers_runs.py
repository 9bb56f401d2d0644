"""Runs of models of transformers: from a folder, on ranks and replicas, sampled, evaluated, and written back."""

import json
import re
import runpy

import pytest
import torch

from penstock.cli.entry import main
from penstock.errors import ConfigError
from penstock.train.model_source import build_layers, source_digest
from penstock.train.settings.config import config_from_table
from tests.house.source import ROOT
from tests.support.tiny_run import RUN as TINY_RUN
from tests.support.tiny_run import fork_training, write_tiny_run

pytest.importorskip("transformers")

RUN = re.sub(r"(?<=\[model\]\n)(.+\n)+", 'transformers = "tiny"\n', TINY_RUN).replace("steps = 6", "steps = 8")
RUN += "learning_rate = 0.01\n"
"""Of the optimizer, whose section comes last."""


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Return a folder with the tiny Llama of the example, and a run file."""
    folder = tmp_path_factory.mktemp("runs")
    runpy.run_path(str(ROOT / "examples" / "llama" / "make_tiny.py"))["write"](folder / "tiny")
    write_tiny_run(folder)
    (folder / "run.toml").write_text(RUN)
    return folder


@pytest.fixture
def files(made, monkeypatch):
    monkeypatch.chdir(made)
    return made


def train(folder, run, *settings):
    training = fork_training(folder, f"run.folder={run}", *settings)
    printed, complained = training.communicate(timeout=280)
    assert training.returncode == 0, complained
    return printed


def losses_of(folder, run):
    return [json.loads(line)["loss"] for line in (folder / run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
@pytest.mark.parametrize(
    "settings",
    [
        ("pipeline.ranks=2", "pipeline.schedule=zbv"),
        ("parallel.data=2", "parallel.shard=full", "pipeline.ranks=2"),
        ("pipeline.ranks=2", "pipeline.activation_checkpointing=selective"),
    ],
)
def test_a_run_learns_the_same_on_ranks_and_replicas(files, settings):
    if not (files / "one").exists():
        train(files, "one")
    name = settings[-1].replace("=", "-")
    train(files, name, *settings)

    one, found = losses_of(files, "one"), losses_of(files, name)
    assert one[-1] < one[0] - 0.1
    assert found == pytest.approx(one, rel=1e-5)


@pytest.mark.feature("X50")
@pytest.mark.slow
def test_a_run_writes_text_is_evaluated_continues_and_becomes_a_folder_again(files, capsys):
    from transformers import AutoModelForCausalLM

    train(files, "whole", "checkpoint.every=4", "data.packing=documents")
    assert main(["generate", "whole", "--prompt", "the quick", "--tokens", "4"]) == 0
    assert capsys.readouterr().out.startswith("the quick")
    assert main(["evaluate", "whole"]) == 0
    assert "on held-out text" in capsys.readouterr().out
    assert main(["convert", "whole", "back", "--like", "tiny"]) == 0

    model, info = AutoModelForCausalLM.from_pretrained("back", output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert not torch.equal(model.model.norm.weight, AutoModelForCausalLM.from_pretrained("tiny").model.norm.weight)
    assert (files / "back" / "tokenizer.json").read_bytes() == (files / "tiny" / "tokenizer.json").read_bytes()
    train(files, "again", "model.transformers=back", "run.steps=2")
    assert losses_of(files, "again")[0] < losses_of(files, "whole")[0]


def config_of(**sections):
    table = {"run": {"folder": "run"}, "data": {"files": ["text.txt"]}, "model": {"transformers": "tiny"}}
    return config_from_table(table | sections)


def test_the_tokenizer_is_the_models_own_unless_another_is_named(files):
    assert config_of().data.tokenizer == "tiny/tokenizer.json"
    assert config_of(data={"files": ["text.txt"], "tokenizer": "bytes"}).data.tokenizer == "bytes"
    assert config_of(model={}).data.tokenizer == "bytes"


def test_a_folder_without_a_tokenizer_that_can_be_read_is_refused_unless_none_is_needed(files, tmp_path):
    (tmp_path / "config.json").touch()
    (tmp_path / "tokenizer.model").touch()
    model, text = {"transformers": str(tmp_path)}, {"files": ["text.txt"]}

    with pytest.raises(ConfigError, match=r"has no tokenizer\.json.*AutoTokenizer.*'bytes'") as caught:
        config_of(model=model)
    assert caught.value.key == "data.tokenizer"
    assert config_of(model=model, data=text | {"tokenizer": "bytes"}).data.tokenizer == "bytes"
    config_of(model=model, data={"source": "own.py:batches"})
    config_of(model=model, data={"corpus": "datasets", "files": ["saved"], "column": "input_ids"})
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        config_of(model=model, data={"corpus": "datasets", "files": ["saved"]})


def test_a_changed_config_is_found_and_a_small_vocabulary_is_refused(files):
    config = config_of()
    known = config.model.model_copy(update={"source_digest": "another"})
    with pytest.raises(ConfigError, match="have changed since the run began") as caught:
        build_layers(config.model_copy(update={"model": known}), 512)
    assert caught.value.key == "model.transformers"
    assert len(source_digest(config)) == 64
    with pytest.raises(ConfigError, match="is for 512 token ids, but the tokenizer has 600"):
        build_layers(config, 600)


def test_a_model_that_is_no_decoder_of_text_is_refused(files):
    runpy.run_path(str(ROOT / "examples" / "t5" / "make_tiny.py"))["write"](files / "tiny-t5")

    with pytest.raises(
        ConfigError, match="tiny-t5 is a T5ForConditionalGeneration; a run file trains causal"
    ) as caught:
        build_layers(
            config_of(model={"transformers": "tiny-t5"}, data={"files": ["text.txt"], "tokenizer": "bytes"}), 512
        )
    assert caught.value.key == "model.transformers"


@pytest.mark.parametrize(
    ("model", "key"),
    [
        ({"transformers": "tiny", "width": 8}, "model.width"),
        ({"transformers": "tiny", "source": "a.py:b"}, "model.source"),
        ({"transformers": "tiny", "vocabulary": 9}, "model.vocabulary"),
    ],
)
def test_keys_that_the_config_of_the_model_decides_are_refused(files, model, key):
    with pytest.raises(ConfigError, match=r"config\.json says it all") as caught:
        config_of(model=model)
    assert caught.value.key == key


def test_no_such_folder_is_one_message_before_any_rank_starts(files, capsys):
    assert main(["train", "run.toml", "--set", "model.transformers=none", "--set", "pipeline.ranks=2"]) == 1

    error = capsys.readouterr().err
    assert "model.transformers: none/config.json: cannot be read" in error
    assert len(error.splitlines()) == 1


def test_a_folder_of_no_language_model_is_one_message(files, capsys):
    (files / "unknown").mkdir()
    (files / "unknown" / "config.json").write_text("{}")
    settings = ("model.transformers=unknown", "data.tokenizer=bytes", "pipeline.ranks=1")

    assert main(["train", "run.toml", *(f"--set={setting}" for setting in settings)]) == 1

    error = capsys.readouterr().err
    assert "model.transformers: unknown/config.json: transformers makes no model of it" in error
    assert len(error.splitlines()) == 1
