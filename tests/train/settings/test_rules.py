"""Rules between settings."""

import pytest

from penstock.train.settings.config import config_from_table, config_to_toml, load_config
from tests.train.settings.tables import config_with, refusal_of, table_with


@pytest.mark.parametrize(
    ("sections", "key", "message"),
    [
        (
            {"pipeline": {"layers_per_stage": 2, "stages_per_rank": 2}},
            "pipeline.layers_per_stage",
            "beside pipeline.stages_per_rank, which says the number of stages too",
        ),
        (
            {"pipeline": {"messages": "coalesced"}, "debug": {"level": "values"}},
            "pipeline.messages",
            "beside debug.level = 'values', which sends a header with each message",
        ),
        (
            {"debug": {"one_stream": True, "level": "values"}},
            "debug.one_stream",
            "debug.level = 'values' needs them one by",
        ),
        (
            {"debug": {"one_stream": True}, "pipeline": {"messages": "rendezvous"}},
            "debug.one_stream",
            "pipeline.messages = 'rendezvous' needs them one by one; drop one",
        ),
        (
            {"loss": {"chunk": "auto"}, "model": {"source": "own.py:layers", "loss": "own.py:loss"}},
            "loss.chunk",
            "is for the loss of next tokens, but model.loss is a function of yours; drop one of the two",
        ),
        ({"debug": {"norms": "all"}}, "debug.norms", "'all' is written nowhere; set debug.log = 'info' too"),
        (
            {"batch": {"size": 18}},
            "batch.size",
            "use 16 or 24, or set batch.allow_ragged = true, or pipeline.microbatches = 6",
        ),
        (
            {"batch": {"size": 10**15}, "pipeline": {"microbatches": 10**15 - 1}},
            "batch.size",
            "or pipeline.microbatches = 1000",
        ),
        (
            {"batch": {"size": 4, "allow_ragged": True}},
            "batch.size",
            "set pipeline.microbatches = 4, or batch.size = 8",
        ),
        (
            {"batch": {"size": 20}, "parallel": {"data": 2}, "pipeline": {"microbatches": 4}},
            "batch.size",
            "in each of parallel.data = 2 replicas; use 16 or 24, or set batch.allow_ragged = true, or pipeline.micro",
        ),
        (
            {"batch": {"size": 17}, "parallel": {"data": 2}},
            "batch.size",
            "use 16 or 32, or set batch.allow_ragged = true",
        ),
        (
            {"batch": {"size": 9, "allow_ragged": True}, "parallel": {"data": 2}},
            "batch.size",
            "replicas; use at least one sequence per microbatch: set pipeline.microbatches = 4, or batch.size = 16",
        ),
        ({"batch": {"size": 3}, "parallel": {"data": 4}}, "batch.size", "sequence per microbatch: set batch.size = 32"),
        (
            {"pipeline": {"microbatch_size": 2, "microbatches": 8}},
            "pipeline.microbatch_size",
            "beside pipeline.microbatches, which follows from it; drop one of the two",
        ),
        (
            {"batch": {"size": 18}, "pipeline": {"microbatch_size": 4}},
            "pipeline.microbatch_size",
            "4 does not divide the 18 sequences of a batch; use one of 1, 2, 3, 6, 9, 18",
        ),
        (
            {"batch": {"size": 24, "allow_ragged": True}, "parallel": {"data": 2}, "pipeline": {"microbatch_size": 24}},
            "pipeline.microbatch_size",
            "the 12 sequences of a batch of each of parallel.data = 2 replicas; use one of 1, 2, 3, 4, 6, 12",
        ),
        (
            {"batch": {"size": 17, "allow_ragged": True}, "parallel": {"data": 2}, "pipeline": {"microbatch_size": 4}},
            "batch.size",
            "17 is not a multiple of parallel.data = 2, so that replicas cannot all have microbatches of pipeline",
        ),
        (
            {"batch": {"size": 2}, "parallel": {"data": 3}, "pipeline": {"microbatch_size": 1}},
            "batch.size",
            "pipeline.microbatch_size = 1; use 3",
        ),
        (
            {"batch": {"size": 10**15}, "pipeline": {"microbatch_size": 3}},
            "pipeline.microbatch_size",
            "use one of 1, 2, 4, 5, 8, 10, 16, 20, 25, 32, ...",
        ),
        ({"pipeline": {"microbatch_size": -1}}, "pipeline.microbatch_size", "greater than or equal to 0"),
        ({"model": {"heads": 3, "key_value_heads": 3}}, "model.heads", "do not divide model.width = 160"),
        ({"model": {"width": 12, "heads": 4}}, "model.heads", "must be even"),
        ({"model": {"key_value_heads": 3}}, "model.key_value_heads", "does not divide model.heads = 4"),
        ({"model": {"length": 64}}, "batch.length", "more than model.length = 64"),
        ({"model": {"vocabulary": 100}}, "model.vocabulary", "too small for bytes"),
        ({"data": {"corpus": "files"}}, "data.files", "no file or folder is named"),
        ({"data": {"files": ["a"]}}, "data.files", "drop one of the two"),
        ({"data": {"suffixes": []}}, "data.suffixes", "is empty"),
        ({"data": {"held_out_fraction": 0}}, "data.held_out_fraction", "nothing to evaluate on"),
        ({"pipeline": {"split": []}}, "pipeline.split", "is empty"),
        (
            {"pipeline": {"compile": "inducter"}},
            "pipeline.compile",
            "Did you mean 'inductor'? Use true, false, 'induct",
        ),
        ({"profile": {"memory": True}}, "profile.memory", "set profile.steps = [FIRST, LAST]"),
        ({"profile": {"steps": [3]}}, "profile.steps", "give the first and the last step"),
        ({"profile": {"steps": [500, 501]}}, "profile.steps", "[500, 501] goes beyond run.steps = 500"),
        ({"batch": {"samples": 24}}, "batch.samples", "24 is not a multiple of batch.size = 16; use 16 or 32"),
        ({"batch": {"tokens": 2049}}, "batch.tokens", "not a multiple of batch.size * batch.length = 2048"),
        ({"batch": {"samples": 32, "accumulate": 2}}, "batch.samples", "batch.accumulate says already"),
        ({"batch": {"accumulate": 99999999999999}}, "batch.accumulate", "take too long; use at most 100000"),
        ({"batch": {"samples": 16 * 10**12}}, "batch.samples", "take too long; use at most 1600000"),
        ({"batch": {"tokens": 2048 * 10**12}}, "batch.tokens", "use at most 204800000"),
        ({"batch": {"ramp_from": 2}}, "batch.ramp_from", "needs batch.ramp_steps too"),
        ({"batch": {"ramp_steps": 2}}, "batch.ramp_steps", "needs batch.ramp_from too"),
        ({"batch": {"ramp_from": 2, "ramp_steps": 9}}, "batch.ramp_from", "more than the 1 that it grows to"),
        ({"precision": {"autocast": True}}, "precision.autocast", "set precision.compute"),
        (
            {"precision": {"compute": "bfloat16"}, "model": {"dtype": "float64"}},
            "precision.compute",
            "leave model.dtype at 'float32'",
        ),
        ({"optimizer": {"decay_steps": 5}}, "optimizer.decay_steps", "only 'wsd' has them"),
        (
            {"run": {"steps": 30}, "optimizer": {"learning_rate_schedule": "wsd", "decay_steps": 15}},
            "optimizer.decay_steps",
            "20 steps of warm-up and 15 of decay do not fit into run.steps = 30",
        ),
        ({"run": {"patience": 2, "evaluate_every": 0}}, "run.patience", "needs evaluations"),
        ({"adapter": {"kind": "lora"}}, "adapter.kind", "name one in model.transformers"),
        ({"adapter": {"rank": 4}}, "adapter.rank", "is of an adapter; set adapter.kind; drop it"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(sections, key, message):
    error = refusal_of(table_with(**sections))

    assert error.key == key
    assert message in str(error)


@pytest.mark.parametrize("batch", [{"accumulate": 3}, {"samples": 48}, {"tokens": 6144}])
def test_how_many_batches_a_step_adds_up_may_be_said_in_three_ways(batch):
    config = config_with(batch={**batch, "ramp_from": 1, "ramp_steps": 4})

    assert [config.batch_plan.count(step) for step in range(1, 6)] == [1, 1, 2, 2, 3]
    assert config.batch.size * config.batch.length * config.batch_plan.full == 6144


def test_all_contradictions_come_at_once_and_none_where_a_rule_does_not_hold():
    error = refusal_of(table_with(batch={"size": 18}, model={"heads": 3, "key_value_heads": 3}, pipeline={"split": []}))

    assert str(error).startswith("3 settings cannot be used:")
    assert error.key == ""
    assert config_with(batch={"size": 18, "allow_ragged": True}).batch.size == 18
    own_batches = {"run": {"folder": "runs/x"}, "data": {"source": "mine.py:batches"}, "model": {"vocabulary": 100}}
    assert config_from_table(own_batches).model.vocabulary == 100


@pytest.mark.feature("F5")
@pytest.mark.parametrize(("replicas", "number"), [(1, 12), (2, 6)])
def test_the_number_of_microbatches_follows_from_their_size_and_from_later_overrides(tmp_path, replicas, number):
    """A stored configuration has the size alone, so that another batch has another number."""
    config = config_with(batch={"size": 24}, parallel={"data": replicas}, pipeline={"microbatch_size": 2})
    path = tmp_path / "config.toml"
    path.write_text(config_to_toml(config))

    assert config.pipeline.microbatches == number
    assert load_config(path) == config
    assert load_config(path, ["batch.size=48"]).pipeline.microbatches == 2 * number
    assert config_with(pipeline={"microbatches": 4}).pipeline.microbatches == 4
    assert config_with().pipeline.microbatches == 8
    assert "microbatches = 8" in config_to_toml(config_with())
