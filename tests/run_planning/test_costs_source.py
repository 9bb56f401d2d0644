"""Where the costs of a plan come from."""

import pytest

from penstock.errors import ConfigError
from penstock.run_planning.costs_source import measured_source
from penstock.run_planning.model import PlannedModel
from penstock.train.settings.config import load_config
from tests.run_planning.cases import RUN, costs, write_run

MODEL = PlannedModel([object()] * 7)


def test_measured_costs_are_of_the_microbatches_of_the_run_that_was_measured(tmp_path):
    run_file, costs_file = write_run(tmp_path)

    source = measured_source(costs_file, load_config(run_file), MODEL, 32)

    assert source.choices.microbatch_sizes == (2,)
    assert source.choices.checkpointing == ("none",)
    assert source.costs_of(2, "none") == costs()
    assert source.bytes_note == f"as {costs_file} says, of microbatches of 2"
    assert source.seconds_range == (0.95, 1.05)


def test_without_a_run_file_they_are_taken_to_be_of_one_sequence():
    source = measured_source(costs(), None, MODEL, 32)

    assert source.choices.microbatch_sizes == (1,)
    assert "taken to be of microbatches of 1 sequence" in source.bytes_note


def test_stages_that_checkpoint_in_different_ways_are_refused(tmp_path):
    text = RUN.replace("microbatch_size = 2", 'microbatch_size = 2\nactivation_checkpointing = ["none", "full"]')
    run_file, costs_file = write_run(tmp_path, text)

    with pytest.raises(ConfigError, match="the run that was measured has none, full by stage"):
        measured_source(costs_file, load_config(run_file), MODEL, 32)


def test_sequences_of_another_length_than_those_measured_are_refused(tmp_path):
    run_file, costs_file = write_run(tmp_path)

    with pytest.raises(ConfigError, match=r"with sequences of batch.length = 32 tokens, not 64; measure a run with"):
        measured_source(costs_file, load_config(run_file), MODEL, 64)


def test_costs_per_stage_are_refused(tmp_path):
    file = tmp_path / "stages.toml"
    file.write_text("forward_s = [1, 1]\nbackward_s = [1, 1]\n")

    with pytest.raises(ConfigError, match="has costs per stage; expected those per layer of penstock profile"):
        measured_source(file, None, MODEL, 32)
