"""The configuration of a run."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from penstock.errors import ConfigError
from penstock.pipeline import Pipeline
from penstock.train.settings.config import config_from_table, config_to_toml, load_config
from tests.train.settings.tables import MINIMAL, config_with, refusal_of, table_with

EXAMPLES = Path(__file__).parents[3] / "examples"


def test_the_demo_loads_and_overrides_change_it():
    config = load_config(EXAMPLES / "demo.toml", ["batch.size=32", "model.dtype=bfloat16", "pipeline.split=[3, 4]"])

    assert config.run.folder == "runs/demo"
    assert (config.batch.size, config.model.dtype, config.pipeline.split) == (32, "bfloat16", (3, 4))
    for split in ("declared", "even", "measured"):
        named = load_config(EXAMPLES / "demo.toml", [f"pipeline.split={split}"])
        assert named.pipeline.split == split
        assert f'\nsplit = "{split}"\n' in config_to_toml(named)


def test_defaults_are_a_valid_run_and_what_is_left_out_follows_from_what_is_given():
    config, text = config_with(), config_to_toml(config_with())

    assert (config.max_length, config.batch_plan.full) == (config.batch.length, 1)
    assert config_with(model={"length": 512}).max_length == 512
    for steps, recorded in ((5, 5), (50, 20)):
        run = {"steps": steps, "record_step": 20}
        assert config_with(run=run, optimizer={"warmup_steps": 0}).recorded_step == recorded
    with Pipeline([nn.Linear(2, 2)], ranks=1) as pipeline:
        assert config.pipeline.microbatches == pipeline.schedule.num_microbatches == 8
    one_text = config_with(data={"corpus": "files", "files": "a.txt", "suffixes": ".md"}).data
    assert (one_text.files, one_text.suffixes) == (("a.txt",), (".md",))
    assert "# sequences per batch\nsize = 16\n" in text
    assert text.startswith("[run]\n")
    assert text.endswith("\n")


@pytest.mark.slow
@given(
    folder=st.text(min_size=1).filter(lambda text: text.isprintable() or "\x7f" in text),
    rate=st.floats(min_value=1e-300, max_value=1000),
    files=st.lists(st.text(min_size=1, alphabet="a\"\\\n\x7f\x00é😀'"), min_size=1, max_size=3),
    options=st.dictionaries(st.text(max_size=5), st.one_of(st.booleans(), st.integers(-9, 9), st.text(max_size=5))),
)
def test_resolved_configuration_reads_back_as_it_was(tmp_path_factory, folder, rate, files, options):
    config = config_from_table(
        {
            "run": {"folder": folder},
            "optimizer": {"learning_rate": rate},
            "data": {"files": files},
            "pipeline": {"options": options, "split": [2, 1]},
        }
    )
    path = tmp_path_factory.getbasetemp() / "resolved.toml"

    path.write_text(config_to_toml(config), encoding="utf-8", newline="")

    assert load_config(path) == config


SOURCES = [{"files": ["a.txt"], "weight": 2.0}, {"corpus": "stdlib"}]


def source_with(**keys):
    return {"run": {"folder": "x"}, "data": {"sources": [{"corpus": "stdlib"}, keys]}}


@pytest.mark.feature("X49")
@pytest.mark.parametrize(
    ("table", "key", "message"),
    [
        (table_with(batch={"sise": 3}), "batch.sise", "unknown key. Did you mean 'batch.size'?"),
        (table_with(bach={"size": 3}), "bach", "Did you mean 'batch'?"),
        ({**MINIMAL, "learning_rate": 1.0}, "learning_rate", "Did you mean 'optimizer.learning_rate'?"),
        ({**MINIMAL, "batch_size": 1}, "batch_size", "Did you mean 'batch.size'"),
        ({**MINIMAL, "lr": 1}, "lr", "Did you mean 'optimizer.learning_rate'"),
        ({**MINIMAL, "dat": 1}, "dat", "Did you mean 'data'"),
        (table_with(metrics={"zzz": 1}), "metrics.zzz", "Known here: jsonl, tensorboard, wandb, wandb_project, every"),
        (source_with(files=["a"], weight=0.0), "data.sources[1].weight", "got 0.0, expected greater than 0"),
        (source_with(files=["a"], wieght=1.0), "data.sources[1].wieght", "unknown key. Did you mean 'weight'?"),
        (source_with(), "data.sources[1].files", "no file or folder is named"),
        (source_with(corpus="stdlib", files=["a"]), "data.sources[1].files", "files are named although"),
        (source_with(files=["a"], suffixes=[]), "data.sources[1].suffixes", "the list is empty"),
        ({"run": {"folder": "x"}, "data": {"sources": SOURCES, "files": ["b.txt"]}}, "data.sources", ""),
        (
            table_with(batch={"size": "many"}),
            "batch.size",
            "got 'many', expected a valid integer (sequences per batch)",
        ),
        (table_with(batch={"size": 0}), "batch.size", "got 0, expected greater than or equal to 1"),
        (table_with(optimizer={"beta1": True}), "optimizer.beta1", "got True"),
        (table_with(optimizer={"epsilon": float("nan")}), "optimizer.epsilon", "expected a finite number"),
        (table_with(optimizer={"weight_decay": float("inf")}), "optimizer.weight_decay", "expected a finite number"),
        (table_with(optimizer={"learning_rate": 0.0}), "optimizer.learning_rate", "got 0.0, expected greater than 0"),
        (table_with(optimizer={"minimum_fraction": 1.5}), "optimizer.minimum_fraction", "got 1.5"),
        (table_with(optimizer={"beta1": 1.0}), "optimizer.beta1", "got 1.0, expected less than 1"),
        (table_with(model={"dtype": "float23"}), "model.dtype", "Did you mean 'float32'"),
        (table_with(data={"files": 3}), "data.files", "got 3, expected a list, such as ['a.txt', 'b.txt']"),
        (table_with(pipeline={"split": [2, 0]}), "pipeline.split[1]", "got 0"),
        (
            table_with(pipeline={"split": "mesured"}),
            "pipeline.split",
            "got 'mesured', expected 'declared', 'even' or 'measured' ('declared': even by the weights that layers",
        ),
        (table_with(pipeline={"split": 3}), "pipeline.split", "got 3, expected a list ('declared'"),
        (table_with(pipeline={"options": {"a": [1]}}), "pipeline.options.a", "expected a string, a number, true or"),
        ({**MINIMAL, "batch": 3}, "batch", "got 3, expected a table"),
        ({"data": {"corpus": "stdlib"}}, "run", "is missing"),
        (table_with(data={"files": [1]}), "data.files[0]", "got 1, expected a valid string"),
        (table_with(parallel={"data": 0}), "parallel.data", "got 0, expected greater than or equal to 1"),
        (table_with(parallel={"shard": "fll"}), "parallel.shard", "got 'fll', expected 'none', 'optimizer' or 'full' "),
        (
            table_with(parallel={"replicas": 2}),
            "parallel.replicas",
            "Known here: data, shard, residency, look_ahead, gradients",
        ),
        ({**MINIMAL, "run": {}}, "run.folder", "is missing (folder for everything that the run writes)"),
    ],
)
def test_a_wrong_value_is_named_with_its_key_and_what_was_expected(table, key, message):
    error = refusal_of(table)

    assert error.key == key
    assert message in str(error)


def test_all_mistakes_of_a_file_come_in_one_message(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text("[run]\nfolder = 'x'\nsteps = 'a'\n[batch]\nsise = 3\n[optimizer]\nbeta1 = 2\n")

    with pytest.raises(ConfigError) as caught:
        load_config(path, ["model.width=-1"])

    message = str(caught.value)
    assert message.startswith(f"{path}: 4 settings cannot be used:")
    assert all(key in message for key in ("run.steps", "batch.sise", "optimizer.beta1", "model.width"))
    path.write_text("[run]\nfolder = 'x'\n[data]\ncorpus = 'stdlib'\n")
    with pytest.raises(ConfigError, match=r"^batch\.size: .*run\.toml") as caught:
        load_config(path, ["batch.size=x"])
    assert caught.value.key == "batch.size"


def test_sources_are_tables_and_are_written_and_read_again(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[run]\nfolder = "runs/x"\n[[data.sources]]\nfiles = ["a.txt"]\nweight = 2.0\n'
        '[[data.sources]]\ncorpus = "stdlib"\n'
    )

    config = load_config(path)

    assert config == config_from_table({"run": {"folder": "runs/x"}, "data": {"sources": SOURCES}})
    assert [(each.files, each.weight) for each in config.data.all_sources] == [(("a.txt",), 2.0), ((), 1.0)]
    path.write_text(config_to_toml(config))
    assert load_config(path) == config
