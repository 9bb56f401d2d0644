"""`ps.plan_run`: from a model and a cluster to layouts."""

import pytest

import penstock as ps
from penstock.errors import ConfigError
from tests.run_planning.cases import KIB, RUN, costs, plan_of, write_run


@pytest.mark.feature("X44")
def test_the_best_layout_comes_first_and_is_not_below_the_bound(tmp_path):
    plan = plan_of(tmp_path)

    steps_s = [layout.step_s for layout in plan.layouts]
    assert steps_s == sorted(steps_s)
    assert plan.best is not None
    assert plan.bound.seconds <= plan.best.step_s
    assert plan.gap >= 0
    assert all(layout.peak_bytes <= 1024 * KIB for layout in plan.layouts)
    assert {layout.pipeline * layout.data for layout in plan.layouts} == {4}
    assert {layout.planned.layout.microbatch_size for layout in plan.layouts} == {2}


def test_a_list_of_layers_and_costs_of_them_will_do():
    options = {"gpus": 2, "memory": 1 << 30, "sequence_length": 32, "global_batch": 8, "seconds": 0.0}

    plan = ps.plan_run([object()] * 7, costs=costs(), **options)

    assert plan.best.tokens_per_s == pytest.approx(8 * 32 / plan.best.step_s)
    with pytest.raises(ConfigError, match="layers that are given as such have no name in a run file"):
        plan.run_toml()
    with pytest.raises(ConfigError, match="7 layers, but the model has 3"):
        ps.plan_run([object()] * 3, costs=costs(), **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"nodes": 3}, "nodes: 4 GPUs do not divide by 3 nodes; use 2 or 4 nodes, or 3 or 6 GPUs"),
        ({"memory": "200KiB"}, r"device: layer 6 of 7 takes 416 KiB by itself"),
        (
            {"memory": "530KiB", "gpus": 2},
            r"gpus: no layout was found that fits 2 devices of 530 KiB for tensors; .* would do",
        ),
        ({"memory": "6 microbatches"}, "memory: 6 microbatches is no number of bytes; give such as 80GiB"),
        ({"global_batch": -8}, "global_batch: -8 of type int; expected a whole number, 1 or larger"),
        ({"sequence_length": 0}, "sequence_length: 0 of type int; expected a whole number, 1 or larger"),
        ({"seconds": -1.0}, "seconds: -1.0 of type float; expected a number, 0 or larger"),
        ({"seconds": float("nan")}, "seconds: nan of type float; expected a number, 0 or larger"),
        ({"seconds": float("inf")}, "seconds: inf; the best layouts are searched one after another, give a number"),
        ({"memory": None}, "device: neither a device nor a memory is given"),
        ({"device": "h100-sxn", "memory": None}, "device: there is no device 'h100-sxn'; .*Did you mean 'h100-sxm'"),
        ({"device": "h100-sxm", "memory": "90GiB"}, "memory: 90.0 GiB is more than the 74.5 GiB of h100-sxm"),
        ({"device": "h100-sxm", "memory": "2GiB"}, "memory: 2.00 GiB leaves nothing beside the 2.33 GiB"),
        ({"gpus": 16, "global_batch": 3}, "global_batch: the 7 layers of the model fill at most 4 of 16 ranks"),
        ({"base": "other.toml"}, "base: .*base.toml is a run file, and so is other.toml"),
        ({"costs": None}, "device: without one, give the costs of the layers, and the memory of a rank"),
    ],
)
def test_bad_input_is_refused_with_the_way_out(changes, message, tmp_path):
    run_file, costs_file = write_run(tmp_path)
    options = {"gpus": 4, "memory": "1MiB", "sequence_length": 32, "global_batch": 16, "costs": costs_file}

    with pytest.raises(ConfigError, match=message):
        ps.plan_run(run_file, **{"seconds": 0.0} | options | changes)


def test_costs_of_a_device_that_is_named_get_its_links(tmp_path):
    plan = plan_of(tmp_path, device="h100-sxm", memory=None)

    assert plan.question.cluster.within.bandwidth_bytes_per_s > 300e9
    assert plan.question.cluster.limit_bytes == 80_000_000_000 - 2_500_000_000
    assert "reserve 2.5 GB assumed" in plan.notes[0]


def test_a_model_that_no_run_can_train_is_refused_before_its_layers_are_counted(tmp_path):
    transformers = pytest.importorskip("transformers")
    transformers.LlamaConfig(vocab_size=64, hidden_size=16, num_attention_heads=2).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").touch()
    options = {"gpus": 2, "device": "h100-sxm", "sequence_length": 32, "global_batch": 8}

    with pytest.raises(ConfigError, match=r"data.tokenizer: .* has no tokenizer.json"):
        ps.plan_run(tmp_path, needs_run_file=True, **options)


def test_a_loss_in_chunks_is_refused_where_it_would_have_to_be_counted(tmp_path):
    run_file, _ = write_run(tmp_path, RUN + "[loss]\nchunk = 16\n")

    with pytest.raises(ConfigError, match=r"loss.chunk: a loss in chunks cannot be counted; .* penstock profile"):
        ps.plan_run(run_file, gpus=2, device="h100-sxm", sequence_length=32, global_batch=8)
