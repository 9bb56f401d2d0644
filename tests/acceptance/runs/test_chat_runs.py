"""Runs on chats: losses and weights of a plain loop over single conversations, and what is refused before a step."""

import io
import json
import shutil
from itertools import pairwise

import pytest
import torch
from torch.nn import functional

from penstock.cli.entry import main
from penstock.errors import CheckpointError, ConfigError
from penstock.train.data.dataset import open_dataset, whole_text
from penstock.train.loop import train
from penstock.train.settings.config import config_from_table
from penstock.train.watching.metrics import read_metrics
from tests.hugging_face.tiny_models import config_of as model_config
from tests.support.chats import CHATML, MISTRAL, said, save_chat_tokenizer, write_chats
from tests.support.tiny_run import fork_training
from tests.train.settings.tables import merged

transformers = pytest.importorskip("transformers")

TALKS = [said(*[f"{number} " + "what is that? " * (number % 5)] * (2 + 2 * (number % 2))) for number in range(80)]
NUM_STEPS = 4


def save_model(folder, family="llama", **options):
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(model_config(family, vocab_size=400, **options))
    model.save_pretrained(folder)
    save_chat_tokenizer(folder, CHATML.plain())


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save_model(tmp_path / "model")
    (tmp_path / "chats").mkdir()
    write_chats(tmp_path / "chats" / "a.jsonl", TALKS)

    def make(*, is_llama=False, **sections):
        tiny = {
            "run": {"folder": "run", "steps": NUM_STEPS, "evaluate_batches": 2, "record_step": 0, "device": "cpu"},
            "pipeline": {"ranks": 1, "microbatches": 2},
            "model": {"width": 16, "layers": 1, "heads": 2, "key_value_heads": 1, "hidden": 16},
            "data": {
                "corpus": "chats",
                "files": ["chats"],
                "tokenizer": "model/tokenizer.json",
                "held_out_fraction": 0.3,
            },
            "batch": {"size": 4, "length": 120, "accumulate": 2},
            "optimizer": {
                "name": "SGD",
                "options": {"momentum": 0.9},
                "learning_rate": 0.2,
                "learning_rate_schedule": "constant",
                "warmup_steps": 1,
                "weight_decay": 0.0,
            },
        }
        if is_llama:
            tiny["model"] = {"transformers": "model", "verify": False}
        return merged(tiny, sections)

    return make


def trained(table):
    output = io.StringIO()
    return train(config_from_table(table), output=output), output.getvalue()


def conversations_of(batch):
    """Return the conversations of a batch of packed rows, each as its inputs and its target."""
    for inputs, target, positions in zip(batch.args[0], batch.target, batch.kwargs["position_ids"], strict=True):
        begins = [*(positions == 0).nonzero().flatten().tolist(), len(inputs)]
        yield from ((inputs[begin:end], target[begin:end]) for begin, end in pairwise(begins))


def plain_losses(table, folder):
    """Train the model of a table with transformers and torch alone, one conversation after another; save it."""
    config = config_from_table(table)
    dataset = open_dataset(config, folder / "tokens")
    model = transformers.AutoModelForCausalLM.from_pretrained("model", attn_implementation="eager")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.9)
    tokenizer = transformers.AutoTokenizer.from_pretrained("model")
    texts = {"".join(text for text, _ in CHATML.pieces(talk)).strip() for talk in TALKS}
    losses = []
    for step in range(NUM_STEPS):
        talks = [talk for number in (2 * step, 2 * step + 1) for talk in conversations_of(dataset.batch(number))]
        # Each is a conversation, whole but for the token that is a target only; id 0 fills up the last of a row.
        assert {tokenizer.decode(inputs).replace("<s>", "").strip() for inputs, _ in talks} <= texts
        num_targets = sum(int((target >= 0).sum()) for _, target in talks)
        total = 0.0
        for inputs, target in talks:
            logits = model(inputs[None]).logits[0]
            loss = functional.cross_entropy(logits, target, reduction="sum") / num_targets
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
    return losses, model


def losses_of(folder):
    return [row["loss"] for row in read_metrics(folder / "metrics.jsonl")]


@pytest.mark.feature("X57")
def test_a_run_learns_what_a_plain_loop_over_single_conversations_learns(table, tmp_path):
    expected, model = plain_losses(table(is_llama=True), tmp_path)

    result, printed = trained(table(is_llama=True))

    assert "are left out" not in printed
    assert losses_of(tmp_path / "run") == pytest.approx(expected, abs=1e-6)
    assert expected[-1] < expected[0] - 0.1
    assert main(["convert", "run", "back", "--like", "model"]) == 0
    back = transformers.AutoModelForCausalLM.from_pretrained("back")
    for name, weight in model.named_parameters():
        assert torch.allclose(back.get_parameter(name), weight, rtol=0, atol=1e-6), name
    assert (tmp_path / "back" / "chat_template.jinja").read_text() == CHATML.plain()
    assert result.held_out_loss is not None


@pytest.mark.slow
@pytest.mark.parametrize("settings", [("pipeline.ranks=2",), ("pipeline.ranks=2", "pipeline.schedule=zbv")])
def test_ranks_learn_the_same(table, tmp_path, settings):
    write_run(tmp_path, table(is_llama=True))
    for name, given in (("one", ()), ("two", settings)):
        training = fork_training(tmp_path, f"run.folder={name}", *given)
        _, complained = training.communicate(timeout=280)
        assert training.returncode == 0, complained

    assert losses_of(tmp_path / "two") == pytest.approx(losses_of(tmp_path / "one"), abs=1e-6)


def write_run(folder, table):
    import tomlkit

    (folder / "run.toml").write_text(tomlkit.dumps(table))
    (folder / "tmp").mkdir()


@pytest.mark.feature("X57")
def test_a_run_continues_with_the_conversations_that_it_has_not_seen(table, tmp_path):
    every = {"checkpoint": {"every": 1}}
    trained(table(**every, run={"folder": "whole"}))

    trained(table(**every, run={"steps": 3}))
    _, printed = trained(table(**every))

    assert "continues after step 3" in printed
    assert losses_of(tmp_path / "run") == losses_of(tmp_path / "whole")


def test_another_template_or_another_choice_of_what_is_learned_does_not_continue_a_run(table, tmp_path):
    (tmp_path / "own.jinja").write_text(CHATML.plain())
    data = {"chat_template": "own.jinja"}
    trained(table(data=data, checkpoint={"every": 1}, run={"steps": 2}))

    _, printed = trained(table(data=data | {"learn": "all"}, run={"steps": 1}))
    assert "run folder: run-2" in printed
    shutil.rmtree(tmp_path / "run-2")
    (tmp_path / "own.jinja").write_text(CHATML.plain().replace("<|im_start|>", "<|user|>"))
    with pytest.raises(CheckpointError, match="another text, or with another tokenizer or chat template"):
        trained(table(data=data, checkpoint={"every": 1}, run={"steps": 3}))


def refusal_of(table):
    with pytest.raises(ConfigError) as caught:
        trained(table)
    return caught.value


def test_conversations_that_cannot_be_learned_from_are_refused_before_a_folder_is_begun(table, tmp_path):
    write_chats(tmp_path / "chats" / "b.jsonl", [*TALKS[:2], said("and then?")])
    refusal = refusal_of(table())
    assert "chats/b.jsonl, line 3: has no turn of the 'assistant', so that nothing is learned from it" in str(refusal)

    with (tmp_path / "chats" / "b.jsonl").open("a") as file:
        file.write("{'messages': []}\n")
    assert "2 rows are no conversations:" in str(refusal_of(table()))

    write_chats(tmp_path / "chats" / "b.jsonl", [said("a", "b"), said("a", "b", first="assistant")])
    (tmp_path / "mistral.jinja").write_text(MISTRAL.tagged())
    refusal = refusal_of(table(data={"chat_template": "mistral.jinja"}))
    assert "chats/b.jsonl, line 2: the chat template refuses it: Conversation roles must alternate" in str(refusal)
    assert not (tmp_path / "run").exists()


def test_conversations_longer_than_a_sequence_are_left_out_and_counted(table, tmp_path):
    write_chats(tmp_path / "chats" / "long.jsonl", [said("and " * 200, "yes"), said("why? " * 300, "no")])

    _, printed = trained(table(run={"steps": 1}))

    assert (
        "note: 2 of 82 documents of the corpus are left out, for they are longer than batch.length = 120 tokens"
        in printed
    )
    refusal = refusal_of(table(batch={"length": 8}, run={"folder": "other"}))
    assert "the corpus has only documents that are left out" in str(refusal)
    assert "raise batch.length" in str(refusal)


def test_a_model_with_fewer_ids_than_the_tokenizer_is_refused(table, tmp_path):
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(model_config("llama", vocab_size=200)).save_pretrained("model")

    refusal = refusal_of(table(is_llama=True))

    assert "model is for 200 token ids, but the tokenizer has" in str(refusal)
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_a_model_whose_conversations_would_see_each_other_is_refused(table, tmp_path):
    options = {"vocab_size": 400, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2, "intermediate_size": 32}
    config = transformers.GptOssConfig(**options, **experts, layer_types=["full_attention"] * 2)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")

    refusal = refusal_of(table(is_llama=True))

    assert "'whole' promises that no token sees another document, but in GptOssForCausalLM (model) it" in str(refusal)
    assert str(refusal).endswith("Use 'none', one document in a sequence")


def test_a_run_is_evaluated_on_other_conversations(table, tmp_path, capsys):
    trained(table(run={"steps": 1}))
    write_chats(tmp_path / "other.jsonl", TALKS[:30])

    assert main(["evaluate", "run", "--data", "other.jsonl", "--to", "json"]) == 0

    found = json.loads(capsys.readouterr().out)
    data = {"files": ["other.jsonl"], "held_out_fraction": 0.0}
    config = config_from_table(table(data=data, batch={"size": 2}, run={"evaluate_batches": 0}))
    dataset = open_dataset(config, tmp_path / "tokens")
    answers = sum(int((target >= 0).sum()) for batch in whole_text(dataset)[0] for target in batch.target)
    assert found["num_tokens"] == answers > 0


@pytest.mark.slow
def test_a_run_file_of_chats_is_checked_before_any_rank_starts(table, tmp_path, capsys):
    write_run(tmp_path, table(data={"chat_template": "none.jinja"}, pipeline={"ranks": 2}))

    assert main(["train", "run.toml"]) == 1

    assert "data.chat_template: none.jinja: cannot be read: No such file" in capsys.readouterr().err
