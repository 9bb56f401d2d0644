"""A user's own model in a run file: found, checked, trained on any number of ranks, and known again."""

import json
from contextlib import chdir

import pytest
import torch
from safetensors.torch import load_file

from penstock.cli.convert import convert_to_pretrained
from penstock.cli.entry import main
from penstock.errors import ConfigError, PenstockError
from penstock.models import LayerSpec, cross_entropy_loss
from penstock.train.model_source import (
    KEY,
    adapter_of,
    build_layers,
    loss_of,
    pipeline_loss,
    require_named_code,
    source_digest,
)
from penstock.train.settings.config import config_from_table, load_config
from penstock.train.setup import check_plan
from tests.support.local_pipelines import error_of
from tests.train.settings.tables import merged, refusal_of
from tests.train.tiny_runs import tiny_table, trained

MODELS = """
import torch
from torch import nn
from penstock import LayerSpec


class Recurrent(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gru = nn.GRU(width, width, batch_first=True)

    def forward(self, features):  # [batch, seq, width]
        return features + self.gru(features)[0]


class Mixer(nn.Module):
    def __init__(self, length):
        super().__init__()
        self.over_tokens = nn.Linear(length, length)

    def forward(self, features):
        return features + self.over_tokens(features.transpose(1, 2)).transpose(1, 2)


def recurrent(vocabulary, length, width=8, depth=2):
    layers = [nn.Embedding(vocabulary, width), *(Recurrent(width) for _ in range(depth)), nn.Linear(width, vocabulary)]
    return nn.Sequential(*layers)


def mixer(vocabulary, length):
    return [nn.Embedding(vocabulary, 8), Mixer(length), nn.Linear(8, vocabulary)]


def described(vocabulary, length):
    embedding = LayerSpec("embedding", lambda: nn.Embedding(vocabulary, 8))
    return [embedding, LayerSpec("head", lambda: nn.Linear(8, vocabulary))]


class Normed(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)

    def forward(self, features):
        return features + self.norm(features.transpose(1, 2)).transpose(1, 2)


def normed(vocabulary, length, width=8):
    return [nn.Embedding(vocabulary, width), Normed(width), Normed(width), nn.Linear(width, vocabulary)]


def tied(vocabulary, length):
    first, last = nn.Embedding(vocabulary, 8), nn.Linear(8, vocabulary, bias=False)
    last.weight = first.weight
    return [first, nn.Tanh(), last]


def narrow(vocabulary, length):
    return [nn.Embedding(vocabulary, 8), nn.Linear(8, 7)]


def nothing(vocabulary, length):
    return []


def number(vocabulary, length):
    return 3


def functions(vocabulary, length):
    return [nn.Embedding(vocabulary, 8), torch.tanh]


def failing(vocabulary, length):
    raise KeyError("size")


def halved(outputs, target):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), target.flatten()) / 2
"""


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MODELS)
    (tmp_path / "text.txt").write_text("it is a pipeline, and a pipeline is a row of stages. " * 40)
    return tmp_path


def table_of(source="recurrent", **changes):
    run = {"steps": 4, "evaluate_batches": 1}
    table = tiny_table("run", "text.txt", run=run, optimizer={"learning_rate": 2e-2})
    return merged(table | {"model": {"source": f"mine.py:{source}"}}, changes)


def config_of(source="recurrent", **changes):
    return config_from_table(table_of(source, **changes))


def run(source="recurrent", **changes):
    return trained(table_of(source, **changes))


def train_as_rank(rank, folder, table):
    with chdir(folder):
        return trained(table)[0].held_out_loss


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["none", "full"])
def test_a_recurrent_model_trains_the_same_bits_on_1_2_and_3_ranks(files, kept, two_ranks, three_ranks):
    alone, _ = run()
    expected = (files / "run" / "weights.safetensors").read_bytes()

    for ranks, pool in ((2, two_ranks), (3, three_ranks)):
        pipeline = {"ranks": ranks, "activation_checkpointing": kept}
        losses = pool.run(train_as_rank, files, table_of(run={"folder": f"run{ranks}"}, pipeline=pipeline))
        assert losses == [alone.held_out_loss] * ranks
        assert (files / f"run{ranks}" / "weights.safetensors").read_bytes() == expected

    assert "1.gru.weight_hh_l0" in load_file(files / "run" / "weights.safetensors")
    rows = [json.loads(line) for line in (files / "run" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["loss"] < rows[0]["loss"]


@pytest.mark.parametrize("compute", ["bfloat16", "float16"])
def test_a_model_with_batch_norms_trains_in_low_precision_and_is_evaluated(files, compute):
    result, _ = run("normed", precision={"compute": compute})

    weights = load_file(files / "run" / "weights.safetensors")
    assert 0 < result.held_out_loss < 10
    assert weights["1.norm.running_mean"].dtype is torch.float32
    assert weights["1.norm.num_batches_tracked"] == 8
    assert weights["1.norm.weight"].ne(1).any()


def test_layers_come_with_vocabulary_length_and_options(files):
    layers = build_layers(config_of(model={"options": {"width": 12, "depth": 3}}), vocabulary=300)

    assert isinstance(layers[0], LayerSpec)
    assert [layer.name for layer in layers] == ["0", "1", "2", "3", "4"]
    assert layers[0]().weight.shape == (300, 12)
    assert layers[0]().weight.data_ptr() != layers[0]().weight.data_ptr(), "each call builds a module"
    assert build_layers(config_of("mixer"), 300)[1]().over_tokens.weight.shape == (16, 16)


def test_the_seed_decides_the_first_values_of_modules_and_of_specs(files):
    for source in ("recurrent", "described"):
        one, same, other = [build_layers(config_of(source, run={"seed": seed}), 300)[0]().weight for seed in (1, 1, 2)]
        assert torch.equal(one, same)
        assert not torch.equal(one, other)


def test_parameters_that_modules_share_are_tied(files):
    first, _, last = build_layers(config_of("tied"), 300)

    assert (first.tied, last.tied) == ((), (("weight", "0.weight"),))
    run("tied")
    assert list(load_file(files / "run" / "weights.safetensors")) == ["0.weight"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("nothing", "returned no layers; expected a list of torch.nn.Module"),
        ("number", "returned 3 of type int; expected a list of"),
        ("functions", "as layer 1; expected a list of"),
        ("failing", "mine.py:failing failed: KeyError: 'size'"),
        ("none", "has no function 'none'"),
    ],
)
def test_what_is_wrong_with_a_function_is_one_message_before_anything_is_made(files, source, message):
    with pytest.raises(ConfigError, match=message):
        run(source)

    assert not (files / "run").exists()
    with pytest.raises(ConfigError, match=r"^pipeline\.ranks: .*the model has 4 \(those of mine.py:recurrent\)"):
        check_plan(config_of(pipeline={"ranks": 5}))
    shapes = r"the last layer returned \(2, 16, 7\).*\(2, 16, 256\) \[batch, length, voc"
    with pytest.raises(PenstockError, match=shapes):
        run("narrow", run={"steps": 1})


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"model": {"width": 64}}, "model.width"),
        ({"model": {"options": {"length": 3}}}, "model.options.length"),
        ({"model": {"source": "", "options": {"width": 3}}}, "model.options"),
        ({"model": {"source": "", "loss": "mine.py:halved"}}, "model.loss"),
        ({"data": {"packing": "documents"}}, "data.packing"),
    ],
)
def test_keys_that_do_not_go_together_are_refused(files, changes, key):
    assert refusal_of(table_of(**changes)).key == key


def test_a_loss_of_ones_own_is_used(files):
    run(run={"folder": "usual"})
    halved, _ = run(run={"folder": "halved", "steps": 1}, model={"loss": "mine.py:halved"})

    first = json.loads((files / "usual" / "metrics.jsonl").read_text().splitlines()[0])["loss"]
    assert halved.loss == pytest.approx(first / 2, rel=1e-6)
    assert loss_of(config_of(model={"loss": "mine.py:halved"}), 256).__name__ == "halved"


def test_a_run_knows_its_file_and_continues_only_with_it(files):
    run(run={"steps": 2}, checkpoint={"every": 2})
    digest = load_config(files / "run" / "config.toml").model.source_digest
    assert digest == source_digest(config_of()) != ""

    _, printed = run(run={"steps": 3}, checkpoint={"every": 2})
    assert "continuing after step 2" in printed
    (files / "mine.py").write_text(MODELS + "\nCHANGED = True\n")
    _, printed = run(run={"steps": 4}, checkpoint={"every": 2})
    assert printed.startswith("run folder: run-2 (run holds a finished run")

    with pytest.raises(ConfigError, match="have changed since the run began"):
        build_layers(load_config(files / "run" / "config.toml"), 256)


def test_a_causal_model_writes_text_and_another_says_why_it_does_not(files, capsys):
    sample = {"prompt": "it is ", "tokens": 5}
    _, written = run(sample=sample)
    assert "writes no text" not in written
    assert len(written.rpartition("\nsample:\n")[2]) >= len("it is ")
    given = ["--function", "mine.py:recurrent"]
    assert main(["generate", "run", "--prompt", "it is ", "--tokens", "3", *given]) == 0
    capsys.readouterr()

    _, refused = run("mixer", run={"folder": "mixed"}, sample=sample)
    assert "the model of mine.py:mixer writes no text: a position of it reads tokens behind it" in refused
    assert main(["generate", "mixed", "--prompt", "it is ", "--function", "mine.py:mixer"]) == 1
    assert "model.source: mine.py:mixer writes no text" in capsys.readouterr().err


def test_code_that_a_run_folder_names_does_not_run_unless_its_reader_names_it(files, capsys):
    run(run={"steps": 1})
    (files / "mine.py").write_text("open('has_run', 'w').close()\n" + MODELS)
    config = files / "run" / "config.toml"
    config.write_text(config.read_text().replace(load_config(config).model.source_digest, ""))

    for command in (["generate", "run", "--prompt", "it "], ["doctor", "run"], ["runs", "run"]):
        main(command)
        assert not (files / "has_run").exists()
    main(["generate", "run", "--prompt", "it "])
    assert capsys.readouterr().err.splitlines()[-1] == (
        "penstock: model.source: this run uses Python code, 'mine.py:recurrent' (model.source), and a run folder may "
        "come from anyone: no code that it names is run. If you trust that file, name it: --function mine.py:recurrent"
    )

    assert main(["generate", "run", "--prompt", "it ", "--tokens", "1", "--function", "mine.py:recurrent"]) == 0
    assert (files / "has_run").exists()


def test_code_that_does_not_run_need_not_be_named():
    code = {"source": "mine.py:recurrent", "loss": "mine.py:halved"}

    require_named_code(config_of(model=code), ["mine.py:recurrent"], runs=[KEY])
    require_named_code(config_of(model=code), ["mine.py:recurrent", "mine.py:halved"], runs=[KEY])
    with pytest.raises(ConfigError, match=r"'mine.py:halved' \(model.loss\), and a run folder"):
        require_named_code(config_of(model=code), ["mine.py:recurrent"])
    with pytest.raises(ConfigError, match=r"name it: --function mine.py:recurrent"):
        require_named_code(config_of(model=code | {"loss": ""}), ["copy.py:recurrent"])
    with pytest.raises(ConfigError, match=r"--function: got 'mine.py:recurrent', which the run does not use"):
        require_named_code(config_of(model={"source": ""}), ["mine.py:recurrent"], runs=[KEY])


@pytest.mark.feature("X56")
@pytest.mark.parametrize("chunk", ["auto", 5])
def test_a_run_with_a_chunked_loss_has_the_losses_of_one_without(tmp_path, chunk):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox " * 200)
    runs = [tiny_table(tmp_path / str(name), text, run={"steps": 3}, loss={"chunk": name}) for name in ("none", chunk)]

    expected, found = (losses_in(tmp_path / run["run"]["folder"], trained(run)) for run in runs)

    assert len(found) == 3
    assert found == pytest.approx(expected, rel=1e-6)
    assert pipeline_loss(config_from_table(runs[0]), 256) is cross_entropy_loss


def losses_in(folder, result):
    """Return the losses of a run that is over, from its file."""
    assert result
    return [json.loads(line)["loss"] for line in (folder / "metrics.jsonl").read_text().splitlines()]


# ---- adapters


def adapter_config(**adapter):
    return config_of(model={"source": "", "transformers": "tiny", "verify": False}, adapter=adapter)


def test_an_adapter_of_a_run_has_the_settings_of_peft():
    pytest.importorskip("peft")

    lora = adapter_of(
        adapter_config(kind="lora", rank=4, targets=["q_proj"], train="lm_head", options={"use_dora": True})
    )
    assert (lora.r, lora.lora_alpha, lora.target_modules, lora.modules_to_save) == (4, 16, {"q_proj"}, ["lm_head"])
    assert lora.use_dora
    assert adapter_of(adapter_config(kind="lora", targets="all-linear")).target_modules == "all-linear"
    assert adapter_of(adapter_config(kind="vera", rank=3, dropout=0.1)).vera_dropout == 0.1
    assert adapter_of(adapter_config(kind="ia3")).target_modules is None
    assert adapter_of(adapter_config(folder="mine")) == "mine"
    assert adapter_of(adapter_config()) is None


def test_settings_that_peft_does_not_have_are_told_with_the_nearest_name():
    pytest.importorskip("peft")

    error = error_of(adapter_of, adapter_config(kind="lora", options={"use_dorra": True}))
    assert error.key == "adapter"
    assert "LoraConfig has no setting 'use_dorra' that a pipeline trains. Did you mean 'use_dora'" in str(error)


def test_the_digest_of_a_run_has_the_settings_of_the_adapter_that_it_began_with(tmp_path):
    for folder, file in (("model", "config.json"), ("adapter", "adapter_config.json")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / file).write_text("{}")
    model = {"source": "", "transformers": str(tmp_path / "model"), "verify": False}
    config = config_of(model=model, data={"tokenizer": "bytes"}, adapter={"folder": str(tmp_path / "adapter")})
    digest = source_digest(config)

    (tmp_path / "adapter" / "adapter_config.json").write_text('{"lora_alpha": 64}')

    assert source_digest(config) != digest


@pytest.mark.slow
def test_a_run_trains_an_adapter_and_its_folder_becomes_one_of_peft(files):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(vocab_size=256, **sizes))
    model.save_pretrained(files / "tiny")
    changes = {"model": {"source": "", "transformers": "tiny"}, "data": {"tokenizer": "bytes"}}
    adapter = {"kind": "lora", "rank": 2, "targets": ["q_proj"]}

    run(**changes, adapter=adapter)
    told = convert_to_pretrained(files / "run", files / "adapter", files / "tiny", is_forced=False)

    assert "an adapter for LlamaForCausalLM" in told
    loaded = peft.PeftModel.from_pretrained(model, files / "adapter")
    assert all(each.abs().max() > 0 for name, each in loaded.named_parameters() if "lora_B" in name)
