"""A configuration is turned into a pipeline, or refused before training, on all ranks alike."""

import io
from pathlib import Path

import pytest

from penstock.errors import ConfigError, FormatError, PartitionError, PenstockError, ScheduleError
from penstock.lowering import lower
from penstock.schedules import build
from penstock.train.folder.run_folder import RunFolder
from penstock.train.model_source import build_layers
from penstock.train.settings.config import config_from_table
from penstock.train.setup import (
    build_plan,
    check_plan,
    load_costs,
    memory_limit,
    prepare_together,
)
from tests.support.local_pipelines import error_of, on_ranks
from tests.train.settings.tables import merged

BATCH = {"size": 4, "length": 8}


def config_of(folder="run", files=("text",), **sections):
    table = {"run": {"folder": str(folder)}, "data": {"files": [str(file) for file in files]}, "batch": BATCH}
    return config_from_table(merged(table | {"pipeline": {"ranks": 2, "microbatches": 4}}, sections))


def with_pipeline(**settings):
    return config_of(pipeline=settings)


def test_a_file_may_hold_a_program_which_is_proved_and_limited_as_a_schedule_is(tmp_path):
    program = lower(build("1f1b", ranks=2, microbatches=4))
    path = tmp_path / "program.csv"
    path.write_text(program.to_csv())
    text = tmp_path / "text"
    text.write_text("text " * 2000)
    config = config_of(files=[text], pipeline={"schedule": str(path)})

    assert build_plan(config).to_csv() == program.to_csv()
    check_plan(config)
    limited = config.pipeline.model_copy(update={"memory_limit": "1 activation"})
    with pytest.raises(ScheduleError, match=r"the limit of rank 0 is 1"):
        check_plan(config.model_copy(update={"pipeline": limited}))

    path.write_text(program.to_csv().replace("0SEND_F1,", ""))
    with pytest.raises((ScheduleError, FormatError), match=r"F1"):
        check_plan(config)
    path.write_text(lower(build("forward-only", ranks=2, microbatches=4)).to_csv())
    with pytest.raises(ConfigError, match=r"pipeline.schedule: program has no backwards"):
        build_plan(config)


@pytest.mark.parametrize(
    ("settings", "error", "told"),
    [
        ({"memory_limit": 7}, ConfigError, r"^pipeline\.memory_limit: 7 is a number of bytes, but there are no costs"),
        ({"memory_limit": "7 Gbit"}, ConfigError, r"^pipeline\.memory_limit: '7 Gbit' has no known unit"),
        ({"memory_limit": "1 activation"}, ScheduleError, "the limit of rank 0 is 1"),
        ({"costs": "none.toml"}, ConfigError, "cannot read 'none.toml'"),
        ({"schedule": "forward-only"}, ConfigError, "nothing would be learned"),
        ({"schedule": "1f1b", "slices": 2}, ConfigError, r"^pipeline\.slices: 1f1b does not cut microbatches, got 2"),
        *(
            ({"options": {name: 2}}, ConfigError, rf"pipeline\.options\.{name}: .*set pipeline\.{name}")
            for name in ("ranks", "microbatches", "slices", "stages_per_rank")
        ),
    ],
)
def test_what_cannot_be_planned_is_refused(settings, error, told):
    with pytest.raises(error, match=told):
        check_plan(with_pipeline(**settings))


@pytest.mark.feature("H1")
def test_stages_whose_activations_wait_on_the_host_are_proved_with_the_plan():
    pipeline = {"ranks": 4, "microbatches": 8, "memory_limit": "2 activations"}
    more = {"model": {"layers": 4}, "batch": {"size": 8}}
    check_plan(config_of(pipeline=pipeline | {"offload": [0, 1]}, **more))

    for offload, told in (([0], "the limit of rank 1 is 2"), ([4], "stage 4 of 1f1b; expected stages from 0 to 3")):
        with pytest.raises((ScheduleError, ConfigError), match=told):
            check_plan(config_of(pipeline=pipeline | {"offload": offload}, **more))


def test_a_residency_that_overlapped_pairs_exceed_is_refused_with_the_plan():
    def config(**parallel):
        return config_of(pipeline={"schedule": "dualpipe-v"}, parallel={"data": 2} | parallel, batch={"size": 8})

    check_plan(config(shard="full"))
    check_plan(config(residency=1))
    with pytest.raises(ConfigError, match=r"^parallel\.residency: 1, but dualpipe-v has overlapped pairs"):
        check_plan(config(shard="full", residency=1))


def test_a_limit_in_bytes_goes_with_a_file_of_costs(tmp_path):
    (tmp_path / "costs.toml").write_text('per = "layer"\nactivation_bytes = [1, 2, 3]')
    config = with_pipeline(memory_limit="20GiB", costs=str(tmp_path / "costs.toml"))

    check_plan(config)

    assert memory_limit(config).amounts == (20 * 2**30,)
    assert load_costs(config).num_layers == 3
    assert (memory_limit(with_pipeline()), load_costs(with_pipeline())) == (None, None)


@pytest.mark.feature("A15")
def test_a_file_brings_its_own_slices_and_microbatches_and_a_family_takes_those_that_are_set(tmp_path):
    path = str(tmp_path / "mine.csv")
    (tmp_path / "mine.csv").write_text(build("seq1f1b", ranks=2, microbatches=4, slices=2).to_csv())

    eager = with_pipeline(schedule="1f1b", options={"warmup": "eager"})
    assert build_plan(eager)[0] == build("1f1b", ranks=2, microbatches=4, warmup="eager")[0]
    roomy = with_pipeline(schedule="gpipe", options={"recompute": 2})
    assert build_plan(roomy) == build("gpipe", ranks=2, microbatches=4, recompute=2)
    for named in ({"schedule": path}, {"schedule": path, "slices": 2}, {"schedule": "seq1f1b", "slices": 2}):
        found = build_plan(with_pipeline(**named))
        assert found == build("seq1f1b", ranks=2, microbatches=4, slices=2)
    assert build_plan(with_pipeline(schedule="seq1f1b")).num_slices == 1
    with pytest.raises(ConfigError, match=r"^pipeline\.slices: 4, but .* is for 2 slices; make them equal"):
        build_plan(with_pipeline(schedule=path, slices=4))
    with pytest.raises(ConfigError, match=r"pipeline\.microbatches: 2, but .* is for 4 microbatches"):
        build_plan(with_pipeline(schedule=path, microbatches=2))


@pytest.mark.feature("F5")
def test_a_plan_has_the_microbatches_that_their_size_makes(tmp_path):
    path = str(tmp_path / "mine.csv")
    (tmp_path / "mine.csv").write_text(build("1f1b", ranks=2, microbatches=4).to_csv())

    def with_size(size, **settings):
        return config_from_table(
            {
                "run": {"folder": "run"},
                "data": {"files": ["text"]},
                "batch": {"size": 8},
                "pipeline": {"ranks": 2, "microbatch_size": size, **settings},
            }
        )

    assert build_plan(with_size(4)) == build("1f1b", ranks=2, microbatches=2)
    assert build_plan(with_size(2, schedule=path)).num_microbatches == 4
    with pytest.raises(ConfigError, match=r"microbatches: 8, but .* pipeline\.microbatch_size = 1 makes 8 of them"):
        build_plan(with_size(1, schedule=path))


def test_the_length_must_fill_the_slices_evenly_unless_told_otherwise():
    def check_slices(number, **batch):
        check_plan(config_of(pipeline={"schedule": "seq1f1b", "slices": number}, batch=batch))

    check_slices(4)
    check_slices(3, allow_ragged=True)
    with pytest.raises(ConfigError, match=r"^batch\.length: 8 is not a multiple .* 3 slices; use 6 or 9, or set"):
        check_slices(3)
    with pytest.raises(ConfigError, match=r"^batch\.length: 8 tokens cannot fill 9 slices"):
        check_slices(9, allow_ragged=True)


def test_a_split_is_checked_for_one_copy_of_the_model():
    check_plan(with_pipeline(schedule="chimera", split=[3, 4]))
    with pytest.raises(PartitionError, match="names 4 stages, but the schedule has 2"):
        check_plan(with_pipeline(schedule="chimera", stages_per_rank=2, split=[2, 2, 2, 1]))


def test_the_layers_have_the_shape_and_the_seed_of_the_configuration():
    model = {"width": 8, "layers": 3, "heads": 2, "key_value_heads": 1, "hidden": 12, "tied_head": True}
    config = config_of(model=model, run={"folder": "run", "seed": 5})

    layers = build_layers(config, vocabulary=300)

    assert [layer.name for layer in layers] == [
        "embedding", "blocks.0", "blocks.1", "blocks.2", "norm", "head",
    ]  # fmt: skip
    assert {layer.seed for layer in layers} == {5}
    assert layers[0]().weight.shape == (300, 8)
    assert layers[1]().feed_forward.up.weight.shape == (12, 8)
    assert layers[1]().attention.key.weight.shape == (4, 8)
    assert layers[-1].tied == (("weight", "embedding.weight"),)


def prepare(transport, configs):
    config = configs[transport.rank]
    return prepare_together(config, RunFolder(Path(config.run.folder)), transport, io.StringIO())


@pytest.fixture
def configs_of(tmp_path):
    """Configurations of two ranks, each with one of two texts, or with one that is missing."""
    (tmp_path / "text").write_text("all work and no play " * 60)
    (tmp_path / "other").write_text("no work and all play " * 60)
    return lambda *names: [config_of(tmp_path / "run", [tmp_path / name]) for name in names]


def test_all_ranks_read_the_tokens_that_one_made(tmp_path, configs_of):
    datasets = on_ranks(2, prepare, configs_of("text", "text"))

    assert datasets[0].digest == datasets[1].digest
    assert datasets[0].batch(3).args[0].equal(datasets[1].batch(3).args[0])
    assert sorted(path.suffix for path in (tmp_path / "run" / "tokens").iterdir()) == [".ends", ".json", ".tokens"]
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokens"]


@pytest.mark.parametrize(
    ("names", "told"),
    [
        (("missing", "missing"), "missing"),
        (("text", "missing"), "missing"),
        (("text", "other"), "data.files: the ranks see different text"),
    ],
)
def test_what_stops_one_rank_stops_every_rank(configs_of, names, told):
    errors = on_ranks(2, lambda wires: error_of(prepare, wires, configs_of(*names)))

    assert type(errors[names.index("missing") if "missing" in names else 0]) is ConfigError
    assert all(isinstance(error, PenstockError) and told in str(error) for error in errors)
    assert str(errors[0]) == str(errors[1])
