"""The layouts of a plan as plain values, and its run file."""

import json

import pytest

from penstock.errors import ConfigError
from penstock.train.settings.config import load_config
from tests.run_planning.cases import plan_of

MEMBERS = {
    "pipeline", "data", "shard", "schedule", "microbatches", "microbatch_size", "step_s", "step_range_s",
    "tokens_per_s", "peak_bytes",
}  # fmt: skip


def test_its_json_has_the_layouts_best_first(tmp_path):
    document = json.loads(plan_of(tmp_path).to_json())

    assert document["fits"] is True
    assert document["bound_s"] <= document["layouts"][0]["step_s"]
    assert document["gap"] == pytest.approx(document["layouts"][0]["step_s"] / document["bound_s"] - 1)
    for row in document["layouts"]:
        assert row.keys() >= MEMBERS
        assert row["step_range_s"][0] < row["step_s"] < row["step_range_s"][1]
        assert row["peak_bytes"] == max(row["peak_bytes_of_ranks"])


def test_the_run_file_keeps_the_comments_and_keys_of_its_base(tmp_path):
    plan = plan_of(tmp_path)
    file = tmp_path / "run.toml"

    file.write_text(plan.run_toml(), encoding="utf-8")

    text, config, best = file.read_text(), load_config(file), plan.best.planned
    assert text.startswith("# a run of ours\n")
    assert "  # two of them\n" in text
    assert not {"accumulate", "microbatch_size"} & {line.split(" = ")[0] for line in text.splitlines()}
    assert (config.pipeline.ranks, config.parallel.data) == (best.layout.pipeline, best.layout.data)
    assert config.pipeline.split == best.split
    assert config.pipeline.microbatches == best.layout.microbatches
    assert (config.batch.size, config.batch.length, config.model.width) == (16, 32, 16)
    assert config.plan.step_s == pytest.approx(best.step_s, rel=1e-5)
    assert config.plan.peak_bytes == tuple(best.rank_bytes)


def test_a_plan_that_does_not_fit_the_rules_of_run_files_is_refused(tmp_path):
    plan = plan_of(tmp_path, sequence_length=32, global_batch=16)
    object.__setattr__(plan.model, "base_text", plan.model.base_text.replace("[model]", "[model]\nlength = 8"))

    with pytest.raises(ConfigError, match=r"batch.length: 32 tokens are more than model.length = 8"):
        plan.run_toml()


def test_a_share_of_the_peak_is_told_where_operations_are_known(tmp_path):
    plan = plan_of(tmp_path)
    assert plan.best.flops_utilization is None

    object.__setattr__(plan, "step_flops", 1e9)
    object.__setattr__(plan, "device_flops_per_s", 1e12)

    assert plan.best.flops_utilization == pytest.approx(1e9 / (4e12 * plan.best.step_s))
