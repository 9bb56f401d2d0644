"""Files that the numbers of steps go to."""

import json
import sys

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock.errors import ConfigError, PenstockError
from penstock.train.sinks import open_jsonl, open_tensorboard
from tests.test_files import largest_file


def test_a_line_is_in_the_file_when_it_is_written(tmp_path):
    with open_jsonl(tmp_path / "metrics.jsonl") as sink:
        sink.write(3, {"loss": 2.5})
        assert json.loads((tmp_path / "metrics.jsonl").read_text()) == {"step": 3, "loss": 2.5}


def test_a_line_that_a_killed_process_began_is_ended(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step":1,"lo')

    with open_jsonl(tmp_path / "metrics.jsonl") as sink:
        sink.write(2, {"loss": 2.5})

    assert (tmp_path / "metrics.jsonl").read_text() == '{"step":1,"lo\n{"step":2,"loss":2.5}\n'


def test_a_full_disk_is_named(tmp_path):
    with (
        largest_file(10),
        pytest.raises(PenstockError, match="File too large"),
        open_jsonl(tmp_path / "metrics.jsonl") as sink,
    ):
        sink.write(1, {"loss": 2.5})


@pytest.mark.slow
def test_in_tensorboard_a_step_that_is_written_again_counts_once(tmp_path):
    for first_step, loss in ((1, 3.0), (2, 2.0)):
        with open_tensorboard(tmp_path / "tensorboard", first_step) as sink:
            for step in range(first_step, 4):
                sink.write(step, {"loss": loss})

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 3.0), (2, 2.0), (3, 2.0)]


def test_missing_tensorboard_says_how_to_install_it(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)

    with (
        pytest.raises(ConfigError, match=r"pip install '\.\[tensorboard\]' in Penstock's clone"),
        open_tensorboard(tmp_path / "tensorboard", 1),
    ):
        pass
