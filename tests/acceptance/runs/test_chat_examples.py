"""The examples on chats: a folder of chats in, a model of transformers out."""

import json
import runpy

import pytest
import torch

from penstock.cli.entry import main
from penstock.train.watching.metrics import read_metrics
from tests.house.source import ROOT
from tests.support.tiny_run import PENSTOCK, TORCHRUN, fork, settings

transformers = pytest.importorskip("transformers")

EXAMPLES = ROOT / "examples"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    runpy.run_path(str(EXAMPLES / "sft" / "make_tiny.py"))["write"](tmp_path / "tiny-chat", tmp_path / "chats")
    (tmp_path / "tmp").mkdir()
    return tmp_path


def run(arguments, folder):
    process = fork(arguments, folder)
    printed, complained = process.communicate(timeout=280)
    assert process.returncode == 0, complained
    return printed


def test_no_file_has_more_than_60_lines():
    files = [path for name in ("sft", "trainer") for path in sorted((EXAMPLES / name).iterdir()) if path.is_file()]

    assert [path.name for path in files] == ["make_tiny.py", "run.toml", "train.py"]
    assert all(len(path.read_text(encoding="utf-8").splitlines()) <= 60 for path in files)


@pytest.mark.feature("X57")
@pytest.mark.slow
def test_fifty_steps_on_two_ranks_are_those_of_one_process_and_make_a_folder(folder):
    run_file = str(EXAMPLES / "sft" / "run.toml")
    for name, ranks in (("two", 2), ("one", 1)):
        given = settings(f"run.folder={name}", f"pipeline.ranks={ranks}")
        run([*PENSTOCK, "train", run_file, *given], folder)

    rows = [read_metrics(folder / name / "metrics.jsonl") for name in ("two", "one")]
    two, one = ([row["loss"] for row in rows_of_run] for rows_of_run in rows)
    assert len(two) == 50
    assert two[-1] == pytest.approx(one[-1], abs=1e-6)
    assert two[-1] < two[0] / 4
    assert main(["convert", "two", "trained", "--like", "tiny-chat"]) == 0
    trained = transformers.AutoModelForCausalLM.from_pretrained("trained")
    tokenizer = transformers.AutoTokenizer.from_pretrained("trained")
    chat = [{"role": "user", "content": "What is 3 + 4?"}]
    inputs = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    answer = trained.generate(**inputs, max_new_tokens=20, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert tokenizer.decode(answer).startswith("It is ")
    assert answer[-1] == tokenizer.eos_token_id  # it has learned to end its turn


def plain_training():
    """Train as the example on the Trainer does, with the whole model in this process; return what was logged."""
    tokenizer = transformers.AutoTokenizer.from_pretrained("tiny-chat", pad_token="<|endoftext|>")
    with open("chats/sums.jsonl") as file:
        talks = [json.loads(line)["messages"] for line in file][:128]
    ids = [tokenizer.apply_chat_template(talk, return_dict=True)["input_ids"] for talk in talks]
    rows = [{"input_ids": row, "labels": row} for row in ids]
    model = transformers.AutoModelForCausalLM.from_pretrained("tiny-chat")
    args = transformers.TrainingArguments(
        "plain",
        max_steps=20,
        learning_rate=1e-2,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        logging_steps=5,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        dataloader_pin_memory=False,
        use_cpu=True,
    )
    collator = transformers.DataCollatorForSeq2Seq(tokenizer)
    trainer = transformers.Trainer(model, args, train_dataset=rows, data_collator=collator)
    trainer.train()
    return model, trainer.state.log_history


@pytest.mark.slow
def test_a_trainer_on_each_rank_learns_what_one_trainer_learns(folder):
    pytest.importorskip("accelerate")
    expected, logged = plain_training()

    printed = run([*TORCHRUN, "2", str(EXAMPLES / "trainer" / "train.py"), "tiny-chat", "chats", "trained"], folder)

    lines = [line for line in printed.splitlines() if "'grad_norm'" in line]
    assert len(lines) == 4  # of rank 0 alone
    for line, row in zip(lines, logged, strict=False):
        assert f"'loss': '{row['loss']:.4g}', 'grad_norm': '{row['grad_norm']:.4g}'" in line
    trained = transformers.AutoModelForCausalLM.from_pretrained("trained")
    for name, weight in expected.named_parameters():
        torch.testing.assert_close(trained.get_parameter(name), weight, rtol=0, atol=1e-4)
