"""Seconds that the split uses: measured once, kept in the run folder, the same on every rank and in later starts."""

import json
import re

import pytest

from penstock.errors import FormatError, PenstockError
from penstock.train.data.dataset import open_dataset
from penstock.train.folder.run_folder import LAYER_TIMES, RunFolder
from penstock.train.measuring.split import SplitRule, choose_split
from penstock.train.model_source import build_layers
from penstock.train.profiling import profile_run
from penstock.train.settings.config import config_from_table
from penstock.train.watching.recorded_step import read_recorded_step
from tests.support.local_pipelines import error_of, on_ranks
from tests.train.settings.tables import merged
from tests.train.tiny_runs import tiny_table, trained

NAMES = ["embedding", "blocks.0", "blocks.1", "norm", "head"]
LAST_HEAVY = [1.0, 1.0, 1.0, 1.0, 9.0]
"""Seconds with which the last of two stages holds one layer, as it does under no other rule."""


@pytest.fixture
def table(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "text").write_text("a stitch in time saves nine, they say. " * 60)
    return tiny_table(
        tmp_path / "run",
        tmp_path / "text",
        run={"steps": 1, "record_step": 1},
        pipeline={"schedule": "interleaved-1f1b", "stages_per_rank": 2, "split": "measured"},
        model={"width": 8, "layers": 2, "key_value_heads": 2, "hidden": 8},
        batch={"length": 8},
    )


@pytest.fixture
def kept(tmp_path):
    """Where the times are kept."""
    return tmp_path / "run" / LAYER_TIMES


def choose(transport, table, folder):
    config = config_from_table(table)
    dataset = open_dataset(config, folder / "tokens")
    layers = build_layers(config, dataset.vocabulary)
    return choose_split(config, layers, dataset, RunFolder(folder), transport)


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("split", "rule"),
    [
        ("declared", SplitRule()),
        ("even", SplitRule(weights=(1.0,) * len(NAMES))),
        ([1, 4], SplitRule(split=(1, 4))),
    ],
)
def test_what_need_not_be_measured_is_not(table, kept, split, rule):
    assert on_ranks(1, choose, merged(table, {"pipeline": {"split": split}}), kept.parent) == [rule]
    assert not kept.exists()


def test_all_ranks_get_the_numbers_that_rank_0_measured_and_keeps(table, kept):
    first, second = on_ranks(2, choose, table, kept.parent)

    stored = json.loads(kept.read_text())
    sums = tuple(map(sum, zip(stored["forward_s"], stored["backward_s"], strict=True)))
    assert first == second
    assert first.weights == sums
    assert min(sums) > 0
    assert stored["names"] == NAMES
    assert stored["of"]["microbatch"] == [2, 8]
    assert f"measured now: {kept}" in first.note


def test_a_later_start_goes_by_what_was_measured_before(table, kept):
    on_ranks(2, choose, table, kept.parent)
    edit(kept, forward_s=LAST_HEAVY, backward_s=LAST_HEAVY)
    text = kept.read_bytes()

    rules = on_ranks(2, choose, merged(table, {"pipeline": {"schedule": "gpipe", "stages_per_rank": 1}}), kept.parent)

    assert [rule.weights for rule in rules] == [(2.0, 2.0, 2.0, 2.0, 18.0)] * 2
    assert f"26.0 s in all when they were measured: {kept}; delete it to measure anew" in rules[0].note
    assert kept.read_bytes() == text


@pytest.mark.parametrize(
    "change",
    [{"model": {"hidden": 16}}, {"batch": {"size": 8}}, {"batch": {"length": 16}}, {"pipeline": {"microbatches": 4}}],
)
def test_another_model_or_microbatch_is_measured_anew(table, kept, change):
    on_ranks(1, choose, table, kept.parent)
    edit(kept, forward_s=LAST_HEAVY)

    [rule] = on_ranks(1, choose, merged(table, change), kept.parent)

    assert max(rule.weights) < 9.0
    assert "measured now" in rule.note


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"forward_s": [1.0] * 4}, r"\$: .* have \[5, 4, 5\] entries, which should be equal; delete it to measure"),
        ({"forward_s": [-1.0] * 5}, r"forward_s\.0: .* greater than or equal to 0"),
        ({"version": 2}, r"version: "),
        (None, r"layer_times\.json: cannot be read"),
    ],
)
def test_damaged_times_and_those_that_cannot_be_read_are_refused_on_every_rank(table, kept, damage, message):
    if damage is None:
        kept.mkdir()
    else:
        on_ranks(1, choose, table, kept.parent)
        edit(kept, **damage)

    errors = on_ranks(2, lambda transport: error_of(choose, transport, table, kept.parent))

    assert [isinstance(error, FormatError) for error in errors] == [damage is not None, False]
    assert isinstance(errors[1], PenstockError)
    assert str(errors[0]) == str(errors[1])
    assert re.search(message, str(errors[0]))


@pytest.mark.slow
def test_training_its_record_and_a_profile_go_by_the_times_that_are_kept(table, kept):
    profile_run(config_from_table(table), num_steps=1)
    edit(kept, forward_s=LAST_HEAVY, backward_s=LAST_HEAVY)

    _, printed = trained(table)
    profile = profile_run(config_from_table(table), num_steps=1)

    recorded = read_recorded_step(kept.parent)
    assert recorded.layers_of_stage == (range(4), range(4, 5))
    assert recorded.layer_weights == (2.0, 2.0, 2.0, 2.0, 18.0)
    assert profile.costs.parameter_bytes[1] == 256 * 8 * 4
    assert f"split by what layers take of a microbatch, 26.0 s in all when they were measured: {kept}" in printed
    assert LAYER_TIMES in printed.split(f"In {kept.parent}:")[1]
