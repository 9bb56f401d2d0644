"""Planned layouts for torchtitan and Automodel."""

import json
import tomllib

import pytest
from torch.distributed.pipelining.schedules import _PipelineScheduleRuntime

import penstock as ps
from penstock.errors import ConfigError
from penstock.run_planning.exports import SCHEDULE, Batch, export, exportable, module_names_of_parts
from penstock.searching.layouts.cluster import Cluster
from penstock.searching.layouts.layout import Layout
from penstock.searching.layouts.planned import planned
from penstock.searching.layouts.problem import LayoutProblem
from tests.run_planning.cases import costs

NAMES = ["embedding", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"]
LAYERS = [[name] for name in NAMES]
BATCH = Batch(sequences=16, sequence_length=32)


def row(name, split, shard="none", pipeline=2, **options):
    layout = Layout(pipeline=pipeline, data=2, shard=shard, microbatch_size=2, microbatches=4, checkpointing="none")
    problem = LayoutProblem.of(layout, costs(), Cluster(gpus=2 * pipeline, memory_bytes=1 << 30))
    schedule = ps.build(name, ranks=pipeline, microbatches=4, **options)
    return planned(problem, schedule, split, name)


LINE, LOOP, WAVE = row("zb-h1", (4, 3)), row("interleaved-1f1b", (2, 2, 2, 1)), row("zbv", (2, 2, 2, 1))


@pytest.mark.parametrize("exported", [LINE, LOOP], ids=["line", "loop"])
def test_torch_loads_the_schedule(exported, tmp_path):
    files = export("torchtitan", [exported], LAYERS, BATCH, str(tmp_path))
    path = tmp_path / SCHEDULE
    path.write_text(files[SCHEDULE], encoding="utf-8")
    runtime = object.__new__(_PipelineScheduleRuntime)
    vars(runtime).update(pipeline_order={}, pp_group_size=2, _n_microbatches=4, _defer_pp_recv=False, _stages=[])
    runtime._num_stages = exported.schedule.num_stages

    runtime._load_csv(str(path), format="compute_only")

    orders = runtime.pipeline_order_with_comms
    computed = [[str(action) for action in orders[rank] if action.is_compute_op] for rank in range(2)]
    ranks = [range(rows.start, rows.stop) for rows in exported.schedule.ranks]
    assert computed == [[str(exported.schedule.row(row)) for row in rows] for rows in ranks]
    assert runtime.stage_index_to_group_rank == dict(enumerate(exported.schedule.placement.rank_of_stage))


def test_torchtitan_gets_its_settings():
    settings = tomllib.loads(export("torchtitan", [LOOP], LAYERS, BATCH, "out")["settings.toml"])

    assert settings["parallelism"] == {
        "pipeline_parallel_degree": 2,
        "pipeline_parallel_schedule_csv": "out/schedule.csv",
        "pipeline_parallel_microbatch_size": 2,
        "module_fqns_per_model_part": [NAMES[:2], NAMES[2:4], NAMES[4:6], NAMES[6:]],
        "data_parallel_shard_degree": 1,
        "data_parallel_replicate_degree": 2,
    }
    assert settings["training"] == {"local_batch_size": 8, "global_batch_size": 16, "seq_len": 32}


def test_replicas_that_share_out_are_shards_there():
    sharded = row("1f1b", (4, 3), shard="optimizer")

    settings = tomllib.loads(export("torchtitan", [sharded], LAYERS, BATCH, "out")["settings.toml"])

    assert settings["parallelism"]["data_parallel_shard_degree"] == 2


def test_automodel_gets_its_settings():
    text = export("automodel", [LINE], LAYERS, BATCH, "out")["settings.yaml"]

    settings = {key: json.loads(value) for key, value in (line.split(": ", 1) for line in text.splitlines())}
    assert settings["module_fqns_per_model_part"] == [NAMES[:4], NAMES[4:]]
    assert (settings["pp_schedule_csv"], settings["pp_microbatch_size"]) == ("out/schedule.csv", 2)
    assert settings["pp_batch_size"] == 8


def test_the_best_row_that_torch_can_run_is_exported_and_none_is_refused():
    assert not exportable(WAVE)
    assert not exportable(row("1f1b", (4, 3), recompute=True))
    assert export("automodel", [WAVE, LINE], LAYERS, BATCH, "out")[SCHEDULE].count("I") == 8

    with pytest.raises(ConfigError, match=r"torch's runtime lays stages as a loop.*the layouts have zbv"):
        export("automodel", [WAVE], LAYERS, BATCH, "out")


def test_every_layer_is_in_one_part():
    assert module_names_of_parts((1, 2), [["a"], ["b"], ["c", "d"]]) == [["a"], ["b", "c", "d"]]


def test_automodel_keeps_the_rotary_tables_that_every_part_of_a_model_of_transformers_calls():
    names = [["model.embed_tokens"], *([f"model.layers.{block}"] for block in range(5)), ["lm_head", "model.norm"]]

    text = export("automodel", [LINE], names, BATCH, "out")["settings.yaml"]

    parts = json.loads(text.partition("module_fqns_per_model_part: ")[2])
    assert [part[-1] for part in parts] == ["model.rotary_emb"] * 2
    assert parts[1][-3:-1] == ["lm_head", "model.norm"]


def test_one_rank_is_no_pipeline_there():
    """The batch of a replica is run at once then: it is one microbatch, and their gradients are added up."""
    alone = row("interleaved-1f1b", (2, 2, 2, 1), pipeline=1, stages_per_rank=4)

    files = export("torchtitan", [alone], LAYERS, BATCH, "out")
    settings = tomllib.loads(files["settings.toml"])

    assert SCHEDULE not in files
    assert settings["training"]["local_batch_size"] == 2
    assert settings["parallelism"] == {
        "pipeline_parallel_degree": 1, "data_parallel_shard_degree": 1, "data_parallel_replicate_degree": 2,
    }  # fmt: skip
    assert "pp_batch_size: 2\n" in export("automodel", [alone], LAYERS, BATCH, "out")["settings.yaml"]


def test_stages_that_take_turns_in_memory_are_dropped_behind_their_forward():
    turns = row("interleaved-1f1b", (2, 2, 2, 1), shard="full")

    settings = tomllib.loads(export("torchtitan", [turns], LAYERS, BATCH, "out")["settings.toml"])

    assert settings["parallelism"]["fsdp_reshard_after_forward"] == "always"
