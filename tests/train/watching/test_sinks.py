"""Files that the numbers of steps go to."""

import sys
from importlib.util import find_spec
from threading import Event
from types import SimpleNamespace

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from penstock.errors import ConfigError, PenstockError
from penstock.train.settings.config import config_to_toml
from penstock.train.settings.sections import MetricsSection
from penstock.train.watching.sinks import open_jsonl, open_tensorboard, open_wandb
from tests.package.test_files import largest_file
from tests.train.settings.tables import config_with


def test_a_line_is_in_the_file_when_it_is_written_behind_what_a_killed_process_began_and_a_full_disk_is_named(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step":1,"lo')

    with open_jsonl(path) as write:
        write(2, {"loss": 2.5})
        assert path.read_text() == '{"step":1,"lo\n{"step":2,"loss":2.5}\n'
    with largest_file(10), pytest.raises(PenstockError, match="File too large"), open_jsonl(path) as write:
        write(1, {"loss": 2.5})


def test_in_tensorboard_a_step_that_is_written_again_counts_once(tmp_path):
    for first_step, loss in ((1, 3.0), (2, 2.0)):
        with open_tensorboard(tmp_path / "tensorboard", first_step) as write:
            for step in range(first_step, 4):
                write(step, {"loss": loss})

    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [(1, 3.0), (2, 2.0), (3, 2.0)]


@pytest.mark.parametrize(
    ("module", "extra", "sink"),
    [
        ("torch.utils.tensorboard", "tensorboard", lambda folder: open_tensorboard(folder, 1)),
        ("wandb", "wandb", lambda folder: open_wandb(folder, MetricsSection(wandb="offline"), print)),
    ],
)
def test_a_missing_package_says_how_to_install_it(tmp_path, monkeypatch, module, extra, sink):
    monkeypatch.setitem(sys.modules, module, None)

    with pytest.raises(ConfigError, match=rf"pip install '\.\[{extra}\]' in Penstock's clone"), sink(tmp_path):
        pass


class StandIn:
    """The part of W&B that is used: `init` gives a run, logged to and finished; `failing` is the call to fail."""

    def __init__(self, failing=""):
        self.calls = []
        self.failing = failing

    def called(self, name, /, **given):
        self.calls.append((name, given))
        if self.failing == name:
            raise OSError("no route to host")

    def init(self, **given):
        self.called("init", **given)
        return SimpleNamespace(
            log=lambda data, step: self.called("log", data=data, step=step), finish=lambda: self.called("finish")
        )


def write_to(monkeypatch, stand_in, folder, **options):
    """Return what is told while two steps are written."""
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    told = []
    with open_wandb(folder, MetricsSection(wandb="offline", **options), told.append) as write:
        for step in (3, 4):
            write(step, {"loss": 2.0})
    return told


def test_wandb_gets_the_settings_of_the_run_and_each_step_and_is_ended(tmp_path, monkeypatch):
    (tmp_path / "config.toml").write_text(config_to_toml(config_with(run={"seed": 7})))
    stand_in = StandIn()

    assert write_to(monkeypatch, stand_in, tmp_path, wandb_project="mine") == []

    (first, given), *others = stand_in.calls
    assert (first, given["project"], given["name"], given["mode"]) == ("init", "mine", tmp_path.name, "offline")
    assert (given["dir"], given["config"]["run"]["seed"]) == (str(tmp_path), 7)
    logged = [("log", {"data": {"loss": 2.0}, "step": step}) for step in (3, 4)]
    assert others == [*logged, ("finish", {})]


@pytest.mark.parametrize(
    ("failing", "calls"),
    [("init", ["init"]), ("log", ["init", "log"]), ("finish", ["init", "log", "log", "finish"])],
)
def test_where_wandb_fails_the_run_goes_on_and_one_line_says_so(tmp_path, monkeypatch, failing, calls):
    stand_in = StandIn(failing)

    assert write_to(monkeypatch, stand_in, tmp_path) == ["training goes on without W&B: OSError: no route to host"]

    assert [name for name, _ in stand_in.calls] == calls


def test_the_end_of_a_run_waits_for_wandb_only_so_long(tmp_path, monkeypatch):
    is_over, told = Event(), []
    monkeypatch.setitem(
        sys.modules, "wandb", SimpleNamespace(init=lambda **given: SimpleNamespace(finish=lambda: is_over.wait(20)))
    )

    with open_wandb(tmp_path, MetricsSection(wandb="online"), told.append, limit_s=0.05):
        pass
    is_over.set()

    assert told == ["W&B has not taken everything within 0.05 s; `wandb sync` sends the rest"]


@pytest.mark.slow
@pytest.mark.skipif(find_spec("wandb") is None, reason="wandb is not installed")
def test_offline_wandb_writes_into_the_folder_without_a_network(tmp_path):
    told = []
    with open_wandb(tmp_path, MetricsSection(wandb="offline"), told.append) as write:
        write(1, {"loss": 2.0})

    assert told == []
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))
