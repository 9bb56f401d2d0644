"""Runs that were planned: the file that a plan writes trains as it is, on the ranks and replicas that it chose."""

import json
import re
import runpy
import shutil

import pytest
import torch

import penstock as ps
from penstock.cli.entry import main
from penstock.train.settings.config import load_config
from tests.house.source import ROOT
from tests.support.tiny_run import PENSTOCK, fork, write_tiny_run
from tests.support.tiny_run import RUN as TINY_RUN

pytest.importorskip("transformers")

BASE = re.sub(r"(?<=\[model\]\n)(.+\n)+", 'transformers = "tiny"\n', TINY_RUN).replace("steps = 6", "steps = 4")
KIB = 1 << 10


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A folder with a tiny Llama, and one with a tiny Mixtral, each named tiny beside a run file."""
    from transformers import MixtralConfig, MixtralForCausalLM

    llama, mixtral = (tmp_path_factory.mktemp(name) for name in ("llama", "mixtral"))
    runpy.run_path(str(ROOT / "examples" / "llama" / "make_tiny.py"))["write"](llama / "tiny")
    vocabulary = json.loads((llama / "tiny" / "config.json").read_text())["vocab_size"]
    config = MixtralConfig(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=64,
    )
    torch.manual_seed(0)
    MixtralForCausalLM(config).save_pretrained(mixtral / "tiny")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / "tiny" / file, mixtral / "tiny" / file)
    for folder in (llama, mixtral):
        write_tiny_run(folder)
        (folder / "run.toml").write_text(BASE)
    return {"llama": llama, "mixtral": mixtral}


def costs_of(num_layers):
    """Costs under which two replicas of two ranks are best: exchanges are slow, and so are messages."""
    return ps.LayerCosts(
        forward=[4e-3] * num_layers,
        backward_input=[4e-3] * num_layers,
        backward_weight=[3e-3] * num_layers,
        activation_bytes=20 * KIB,
        message_bytes=4 * KIB,
        parameter_bytes=100 * KIB,
        gradient_bytes=100 * KIB,
        optimizer_bytes=200 * KIB,
        latency_s=30e-3,
        replica_bandwidth_bytes_per_s=4e6,
    )


@pytest.mark.slow
@pytest.mark.feature("X44")
@pytest.mark.parametrize("model", ["llama", "mixtral"])
def test_the_run_file_of_a_plan_trains_on_the_ranks_that_it_chose(model, folders, monkeypatch, capsys):
    folder = folders[model]
    monkeypatch.chdir(folder)
    num_layers = len(ps.from_transformers("tiny"))
    memory = 400 * KIB * (num_layers - 1)

    plan = ps.plan_run(
        "run.toml", gpus=4, memory=memory, sequence_length=16, global_batch=8, costs=costs_of(num_layers), seconds=0.5
    )
    (folder / "planned.toml").write_text(plan.run_toml("planned.schedule.json"))
    (folder / "planned.schedule.json").write_text(plan.best.planned.schedule.to_json())
    training = fork([*PENSTOCK, "train", "planned.toml", "--set", "run.record_step=2"], folder)
    printed, complained = training.communicate(timeout=280)

    config = load_config("planned.toml")
    assert (config.pipeline.ranks, config.parallel.data) == (2, 2)
    assert training.returncode == 0, complained + printed
    rows = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    assert len(rows) == 4
    assert all(row["num_tokens"] == 8 * 16 for row in rows)
    assert rows[-1]["loss"] < rows[0]["loss"]
    assert main(["doctor", "run"]) == 0
    assert re.search(r"^planned: +step .*, measured .*s \(", capsys.readouterr().out, re.MULTILINE)
