"""Runs with replicas: the numbers of one process on the whole batch, also where a run continues with other replicas."""

import io
import json
from contextlib import nullcontext

import pytest
import torch
from safetensors.torch import load_file

from penstock.cli.entry import main
from penstock.errors import NotFinite
from penstock.train.loop import train
from penstock.train.settings.config import config_from_table
from penstock.train.stopping import StopRequest
from penstock.train.watching.metrics import read_metrics
from penstock.train.watching.recorded_step import read_recorded_step
from tests.house.source import ROOT
from tests.support.local_pipelines import error_of
from tests.support.tiny_run import TEXT
from tests.train.local_ranks import Stopping
from tests.train.settings.tables import merged
from tests.train.tiny_runs import tiny_table

TOLERANCE = 1e-12
NUM_STEPS = 6
MINE = """
import torch
from torch import nn


class Stateful:
    def __init__(self, batch_size, length, seed, split="train"):
        self.options, self.at = (batch_size, length, seed + (split == "held_out")), 0

    def __iter__(self):
        while True:
            self.at += 1
            size, length, seed = self.options
            generator = torch.Generator().manual_seed(1000 * seed + self.at)
            tokens = torch.randint(97, 123, (size, length + 1), generator=generator)
            target = tokens[:, 1:].clone()
            target[0, : self.at % 8] = -100  # rows weigh otherwise
            yield tokens[:, :-1], target

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        assert state["at"] > 0
        self.at = state["at"]


def dropping(vocabulary, length):
    block = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Dropout(0.5))
    layers = [nn.Embedding(vocabulary, 16), block, nn.Dropout(0.5), nn.Linear(16, vocabulary)]
    return [layer.double() for layer in layers]


class Breaking(nn.Module):
    def __init__(self, in_forward):
        super().__init__()
        self.linear, self.in_forward = nn.Linear(8, 8), in_forward

    def forward(self, hidden):
        from torch.distributed import get_rank, is_initialized

        output = self.linear(hidden)
        if not (is_initialized() and get_rank() == 1):
            return output
        return output * float("nan") if self.in_forward else output + torch.sqrt(0 * output)


def breaking(vocabulary, length, in_forward):
    layers = [nn.Embedding(vocabulary, 8), Breaking(in_forward), nn.Linear(8, vocabulary)]
    return [layer.double() for layer in layers]
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    (folder / "text.txt").write_text(TEXT)
    (folder / "mine.py").write_text(MINE)
    (folder / "documents").mkdir()
    for number in range(60):
        (folder / "documents" / f"{number}.txt").write_text(f"{number} " + TEXT[: 3 + 7 * number % 20])
    return folder


@pytest.fixture(scope="module")
def alone(inputs, tmp_path_factory):
    """Train in one process, once with the same settings, and return the folder."""
    folders = {}

    def folder_of(sections):
        if str(sections) not in folders:
            folders[str(sections)] = tmp_path_factory.mktemp("alone")
            train_rank(0, table_of(inputs, folders[str(sections)], 1, 1, **sections))
        return folders[str(sections)]

    return folder_of


@pytest.fixture
def run(inputs, tmp_path, two_ranks, four_ranks):
    """Run `train_rank`, or another function, on the processes of a mesh; return what each of them returned."""

    def on_mesh(ranks, replicas, *more, case=train_rank, **sections):
        table = table_of(inputs, tmp_path / "run", ranks, replicas, **sections)
        pool = {2: two_ranks, 4: four_ranks}.get(ranks * replicas)
        return [case(0, table, *more)] if pool is None else pool.run(case, table, *more)

    return on_mesh


def table_of(inputs, folder, ranks, replicas, **sections):
    """Eight rows a batch, in four microbatches of the whole job."""
    run = {"steps": NUM_STEPS, "evaluate_every": 3, "evaluate_batches": 2, "device": "cpu"}
    table = tiny_table(
        folder,
        inputs / "text.txt",
        run=run,
        pipeline={"ranks": ranks, "microbatches": 4 // replicas},
        parallel={"data": replicas},
        model={"layers": 2, "key_value_heads": 2, "dtype": "float64"},
        batch={"size": 8},
        optimizer={"learning_rate": 1e-2, "warmup_steps": 2},
        checkpoint={"every": 2},
    )
    if "source" in sections.get("model", {}):
        table["model"] = {}
    return merged(table, sections)


def train_rank(rank, table, stop=None):
    output = io.StringIO()
    request = StopRequest() if stop is None else Stopping(stop)
    with pytest.raises(KeyboardInterrupt) if stop else nullcontext():
        train(config_from_table(table), output=output, stop=request)
    return output.getvalue()


def numbers_of(folder):
    """Return the outcome of each step, and the weights."""
    names = ("step", "loss", "gradient_norm", "held_out_loss", "num_tokens", "learning_rate", "num_skipped")
    rows = [{name: row[name] for name in names if name in row} for row in read_metrics(folder / "metrics.jsonl")]
    return rows, load_file(folder / "weights.safetensors")


def assert_same(folder, expected):
    (rows, weights), (expected_rows, expected_weights) = numbers_of(folder), numbers_of(expected)
    assert [row.keys() for row in rows] == [row.keys() for row in expected_rows]
    assert all(row == pytest.approx(own, rel=0, abs=TOLERANCE) for row, own in zip(rows, expected_rows, strict=True))
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=TOLERANCE)


def documents(inputs):
    data = {"files": [str(inputs / "documents")], "packing": "none", "held_out_fraction": 0.4}
    return {"data": data, "batch": {"accumulate": 2}}


def chats(inputs):
    """Whole conversations, of which the answers are learned; most sequences have several, and padding."""
    from tests.support.chats import CHATML, said, save_chat_tokenizer, write_chats

    talks = [said(*[f"{number} " + "and this " * (number % 7)] * (2 + 2 * (number % 2))) for number in range(150)]
    data = {
        "corpus": "chats",
        "files": [write_chats(inputs / "chats.jsonl", talks)],
        "tokenizer": save_chat_tokenizer(inputs / "chats", CHATML.plain()),
        "held_out_fraction": 0.3,
    }
    return {"data": data, "batch": {"accumulate": 2, "length": 96}}


def stateful(inputs):
    """Data of the user's own, whose rows do not weigh alike."""
    return {"data": {"files": [], "source": f"{inputs}/mine.py:Stateful"}, "batch": {"accumulate": 2, "length": 8}}


def dropping(inputs):
    return {"model": {"source": f"{inputs}/mine.py:dropping", "vocabulary": 256}}


def deep(inputs):
    return {"pipeline": {"schedule": "zbv"}, "model": {"layers": 4}}


def tied(inputs):
    return {"pipeline": {"schedule": "interleaved-1f1b"}, "model": {"layers": 4, "tied_head": True}}


def text(inputs):
    return {}


MESHES = {
    "text": (2, 2, text, {}),
    "accumulated": (2, 2, text, {"batch": {"accumulate": 2}, "pipeline": {"schedule": "gpipe"}}),
    "ragged": (2, 2, text, {"batch": {"size": 9, "allow_ragged": True}}),
    "ramped": (2, 2, text, {"batch": {"accumulate": 3, "ramp_from": 1, "ramp_steps": 3}}),
    "documents": (2, 2, documents, {}),
    "chats": (2, 2, chats, {}),
    "chats in slices": (2, 2, chats, {"pipeline": {"schedule": "seq1f1b", "slices": 4}}),
    "data of the user's own": (2, 2, stateful, {}),
    "dropout": (2, 2, dropping, {}),
    "replicas alone": (1, 2, text, {}),
    "ranks alone": (2, 1, text, {}),
    "four replicas": (1, 4, text, {}),
    "full": (2, 2, text, {"batch": {"accumulate": 2}, "parallel": {"shard": "full"}}),
    "all whole": (1, 4, text, {"parallel": {"shard": "full", "residency": 0, "look_ahead": 0}}),
    "optimizer": (2, 2, deep, {"parallel": {"shard": "optimizer"}}),
    "tied": (2, 2, tied, {"parallel": {"shard": "full"}}),
    "means": (2, 2, text, {"batch": {"size": 9, "allow_ragged": True}, "parallel": {"gradients": "mean"}}),
}


@pytest.mark.feature("X40")
@pytest.mark.parametrize(
    "mesh", [pytest.param(name, marks=() if name == "full" else pytest.mark.slow) for name in MESHES]
)
def test_replicas_train_as_one_process_does(inputs, tmp_path, alone, run, mesh):
    ranks, replicas, data, given = MESHES[mesh]
    sections = data(inputs) | given

    printed = run(ranks, replicas, **sections)

    learned = {name: keys for name, keys in sections.items() if name not in ("pipeline", "parallel")}
    assert_same(tmp_path / "run", alone(learned))
    assert [text == "" for text in printed] == [False, *[True] * (ranks * replicas - 1)]
    assert printed[0].count("on 2 replicas of 2 ranks, 2 microbatches") == (ranks == replicas == 2)


LOW_PRECISION = {
    "model": {"dtype": "float32"},
    "precision": {"compute": "float16", "loss_scale": 2.0**20, "loss_scale_growth_steps": 2},
}


def assert_close(folder, expected):
    """Sums of float16 differ by rounding, so that losses and weights are only close; but the same steps are skipped."""
    (rows, weights), (expected_rows, expected_weights) = numbers_of(folder), numbers_of(expected)
    assert [row.get("num_skipped") for row in rows] == [row.get("num_skipped") for row in expected_rows]
    assert 0 < rows[-1]["num_skipped"] < NUM_STEPS
    assert [row["loss"] for row in rows] == pytest.approx([row["loss"] for row in expected_rows], abs=2e-3)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("shard", ["none", "full"])
def test_main_weights_and_a_loss_scale_stay_alike_and_skip_the_same_steps(tmp_path, alone, run, shard):
    run(2, 2, **LOW_PRECISION, parallel={"shard": shard})

    assert_close(tmp_path / "run", alone(LOW_PRECISION))


def test_the_page_shows_the_example_as_it_is():
    page = (ROOT / "docs" / "recipes" / "data_parallel.md").read_text(encoding="utf-8")

    assert f"```toml\n{(ROOT / 'examples' / 'replicas.toml').read_text(encoding='utf-8')}```" in page


# ---- a run that continues with other replicas


@pytest.mark.slow
@pytest.mark.parametrize(
    ("data", "parts"),
    [
        (text, [(2, 2, "none", 2), (1, 4, "none", 2), (1, 1, "none", None)]),
        (chats, [(2, 2, "none", 2), (1, 4, "full", 2), (1, 1, "none", None)]),
        (stateful, [(2, 2, "none", 2), (1, 4, "none", 2), (1, 1, "none", None)]),
        (stateful, [(2, 2, "full", 2), (1, 4, "optimizer", 1), (2, 2, "none", 1), (1, 1, "full", None)]),
        (stateful, [(1, 1, "none", 3), (2, 2, "none", None)]),
    ],
    ids=["text", "chats", "data of the user's own", "other shards", "one process first"],
)
def test_a_run_continues_with_other_replicas(inputs, tmp_path, alone, run, data, parts):
    at = 0
    for ranks, replicas, shard, stop in parts:
        printed, *_ = run(ranks, replicas, stop, **data(inputs), parallel={"shard": shard})

        assert (f"its run has the same settings and continues after step {at}" in printed) == (at > 0)
        assert "were passed over" not in printed
        at += stop or 0
        assert (f"stopped by a signal after step {at}; its checkpoint is saved" in printed) == (stop is not None)

    assert_same(tmp_path / "run", alone(data(inputs)))


# ---- what is written


@pytest.mark.slow
def test_the_folder_has_the_figures_of_the_first_replica_once_and_a_profile_of_every_rank(tmp_path, run):
    printed, *_ = run(2, 2, run={"record_step": 2}, metrics={"memory_every": 2}, profile={"steps": [3, 3]})

    recorded = read_recorded_step(tmp_path / "run")
    assert (recorded.num_replicas, recorded.program.num_ranks, len(recorded.prologues)) == (2, 2, 2)
    memory = [row for row in read_metrics(tmp_path / "run" / "metrics.jsonl") if "peak_bytes_rank0" in row]
    assert [row["step"] for row in memory] == [2, 4, 6]
    assert all("peak_bytes_rank1" in row and "peak_bytes_rank2" not in row for row in memory)
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == NUM_STEPS
    traces = sorted(path.name for path in (tmp_path / "run").glob("profile-rank*"))
    assert traces == [f"profile-rank{rank}.json.gz" for rank in range(4)]
    assert "4 ranks on CPU, backend gloo; precision float64\n" in printed


@pytest.mark.slow
@pytest.mark.feature("X41")
@pytest.mark.parametrize(
    ("shard", "in_forward", "is_dry", "told"),
    [
        ("none", True, False, "the loss is nan"),
        ("none", False, False, "the gradient norm is nan"),
        ("none", False, True, "the gradient norm"),
        ("full", False, False, "the gradient norm is nan"),
    ],
)
def test_a_value_that_is_not_finite_in_one_replica_ends_the_run_on_all_ranks(
    inputs, run, shard, in_forward, is_dry, told
):
    model = {"source": f"{inputs}/mine.py:breaking", "vocabulary": 256, "options": {"in_forward": in_forward}}
    settings = {"skip_updates": is_dry, "deadline_s": 10.0}

    found = run(1, 2, case=failing_rank, model=model, run=settings, parallel={"shard": shard})

    assert len(set(found)) == 1
    assert found[0][0] is NotFinite
    assert f"step 1: {told}" in found[0][1]
    assert "rank 1 (pipeline 0, data 1)" in found[0][1]


def failing_rank(rank, table):
    error = error_of(train_rank, rank, table)
    return type(error), str(error)


@pytest.mark.slow
def test_one_replica_evaluates_and_writes_on_what_several_trained(tmp_path, run, capsys):
    run(1, 2, run={"record_step": 2})

    assert main(["evaluate", str(tmp_path / "run"), "--to", "json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["loss"] == pytest.approx(numbers_of(tmp_path / "run")[0][-1]["held_out_loss"], abs=TOLERANCE)
    assert main(["generate", str(tmp_path / "run"), "--prompt", "the ", "--tokens", "2"]) == 0
    assert capsys.readouterr().out.startswith("the ")
    assert main(["doctor", str(tmp_path / "run")]) == 0
    told = capsys.readouterr().out
    assert "step 2: 1f1b, 2 replicas of 1 rank, 1 stage, 2 microbatches" in told
    assert "replicas:   the step waits for them " in told
    assert read_recorded_step(tmp_path / "run").num_replicas == 2
