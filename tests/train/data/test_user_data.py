"""A run on a user's own data: it trains, resumes where it was, and says what is wrong with them."""

import re
from textwrap import dedent

import pytest
import torch
from safetensors.torch import load_file

from penstock.errors import CheckpointError, ConfigError, StepRefused
from penstock.train.data.batches import Wants
from penstock.train.data.user_data import UserDataset, UserSource
from penstock.train.settings.config import config_from_table
from tests.train.settings.tables import merged, refusal_of
from tests.train.tiny_runs import tiny_table, trained

MINE = """
import torch

READ = []

def batch_of(number, size, length, seed):
    generator = torch.Generator().manual_seed(1000 * seed + number)
    tokens = torch.randint(97, 123, (size, length + 1), generator=generator)
    READ.append(number)
    return tokens[:, :-1], tokens[:, 1:]

class Stateful:
    def __init__(self, batch_size, length, seed, split="train"):
        self.options, self.at = (batch_size, length, seed + (split == "held_out")), 0
    def __iter__(self):
        while True:
            self.at += 1
            yield batch_of(self.at - 1, *self.options)
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]

def plain(batch_size, length, seed, split="train"):
    number = 0
    while True:
        yield batch_of(number, batch_size, length, seed + (split == "held_out"))
        number += 1

def unsplit(batch_size, length, seed):
    return plain(batch_size, length, seed)

def ends(batch_size, length, seed):
    for number in range(4):
        yield batch_of(number, batch_size, length, seed)
    raise OSError("the disk is gone")
"""


@pytest.fixture
def table(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)

    def make(function, folder="run", **sections):
        table = tiny_table(
            folder,
            run={"steps": 6, "evaluate_every": 3, "evaluate_batches": 2},
            batch={"length": 8, "accumulate": 2},
            optimizer={"learning_rate": 1e-2, "learning_rate_schedule": "constant"},
            checkpoint={"every": 2},
        )
        return merged(table | {"data": {"source": f"mine.py:{function}"}}, sections)

    return make


@pytest.mark.parametrize(("function", "prefetch"), [("Stateful", 3), ("plain", 0)])
def test_a_run_resumes_with_the_batches_that_it_has_not_seen_and_with_no_others(table, tmp_path, function, prefetch):
    data = {"source": f"mine.py:{function}", "prefetch": prefetch}
    expected, _ = trained(table(function, "whole", data=data))

    trained(table(function, data=data, run={"steps": 3}))
    result, printed = trained(table(function, data=data))

    assert (result.loss, result.held_out_loss) == (expected.loss, expected.held_out_loss)
    weights, others = (load_file(tmp_path / name / "weights.safetensors") for name in ("whole", "run"))
    assert all(torch.equal(weights[name], others[name]) for name in weights)
    passed = "mine.py:plain has no state_dict: 6 batches were passed over"
    assert printed.count(passed) == (function == "plain")
    (tmp_path / "mine.py").write_text(MINE.replace("97, 123", "97, 122"))
    with pytest.raises(CheckpointError, match=r"data\.tokenizer or data\.source have changed"):
        trained(table(function, data=data, run={"steps": 7}))


def test_nothing_is_evaluated_without_a_split_which_is_said_once_and_an_error_of_the_source_has_its_line(table):
    result, printed = trained(table("unsplit"))

    assert result.held_out_loss is None
    assert printed.count("nothing is evaluated, since mine.py:unsplit takes no parameter `split`") == 1
    with pytest.raises(ConfigError, match=r"run\.patience: needs evaluations, but mine\.py:unsplit takes no parameter"):
        trained(table("unsplit", run={"patience": 1}))
    with pytest.raises(StepRefused, match=r"mine\.py:\d+: data\.source = 'mine\.py:ends' failed: OSError: the disk"):
        trained(table("ends", batch={"accumulate": 1}))


def test_a_rank_between_reads_only_the_first_batch(table):
    dataset = UserDataset(config_from_table(table("plain")))
    read = dataset._source._function.__globals__["READ"]

    for number in range(5):
        assert dataset.batch(number, Wants(False, False)).args == ()
    assert read == [0]
    dataset.batch(2, Wants(target=False))
    assert read == [0, 1, 2]


def test_replicas_share_out_the_rows_of_a_batch_with_its_keywords_and_its_state_is_one(table, tmp_path):
    (tmp_path / "mine.py").write_text(f"""{MINE}
class Keywords(Stateful):
    def __iter__(self):
        for tokens, target in super().__iter__():
            yield {{"tokens": tokens, "target": target, "rows": torch.arange(len(tokens)), "scale": 2.0}}
""")
    config = config_from_table(table("Keywords"))
    whole = UserDataset(config)
    wanted = [Wants(replica=replica, num_replicas=3) for replica in range(3)]
    datasets = [UserDataset(config) for _ in wanted]

    for number in range(2):
        batch = whole.batch(number)
        parts = [dataset.batch(number, wants) for dataset, wants in zip(datasets, wanted, strict=True)]
        assert torch.cat([part.args[0] for part in parts]).equal(batch.args[0])
        assert torch.cat([part.target for part in parts]).equal(batch.target)
        assert [part.kwargs["rows"].tolist() for part in parts] == [[0, 1], [2], [3]]
        assert {part.kwargs["scale"] for part in parts} == {2.0}
    assert [dataset.state(1) for dataset in (whole, *datasets)] == [{"at": 2}] * 4
    assert len({dataset.digest for dataset in (whole, *datasets)}) == 1
    held_out = [dataset.held_out_batches(1, wants)[0] for dataset, wants in zip(datasets, wanted, strict=True)]
    assert torch.cat([part.target for part in held_out]).equal(whole.held_out_batches(1)[0].target)
    assert datasets[1].held_out_weights(1) == whole.held_out_weights(1)


def test_an_earlier_batch_is_the_same_again(table):
    dataset = UserDataset(config_from_table(table("plain")))

    first = [dataset.batch(number).args[0] for number in (0, 1, 2, 3)]
    again = [dataset.batch(number).args[0] for number in (1, 0, 3)]

    assert all(torch.equal(first[number], found) for number, found in zip((1, 0, 3), again, strict=True))


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"files": ["a"]}, "data.source"),
        ({"corpus": "stdlib"}, "data.source"),
        ({"sources": [{"corpus": "stdlib"}]}, "data.source"),
        ({"packing": "none"}, "data.packing"),
    ],
)
def test_a_source_stands_alone(table, data, key):
    assert refusal_of(table("plain", data=data)).key == key


@pytest.fixture
def source_of(table, tmp_path):
    def make(body, name="batches"):
        head = "import torch\nones = lambda: torch.ones(4, 8, dtype=torch.int64)\n"
        (tmp_path / "mine.py").write_text(head + dedent(body))
        return UserSource(config_from_table(table(name, run={"seed": 7})), 256)

    return make


def test_a_function_gets_what_it_names(source_of):
    body = """
        def batches(*, seed, length, batch_size):
            assert (seed, length, batch_size) == (7, 8, 4)
            return [(ones() * seed, ones())]
        def all_of_it(**given):
            assert set(given) == {"config", "batch_size", "length", "seed", "split"}
            return [(ones() * given["config"].run.seed, ones())]
        def nothing():
            return [(ones() * 7, ones())]
        """
    for name in ("batches", "all_of_it", "nothing"):
        assert source_of(body, name).next(0).args[0].unique().tolist() == [7]


def test_a_batch_may_be_a_pair_a_part_or_a_dict_with_keywords(source_of):
    body = """
        import penstock as ps
        def batches():
            yield ones(), 2 * ones()
            yield [ones(), 2 * ones()]
            yield ps.Part(ones(), target=2 * ones(), positions=ones())
            yield {"tokens": ones(), "target": 2 * ones(), "positions": ones()}
        """
    source = source_of(body)

    found = [source.next(number) for number in range(4)]

    assert all(len(batch.args) == 1 and batch.target.unique().tolist() == [2] for batch in found)
    assert [sorted(batch.kwargs) for batch in found] == [[], [], ["positions"], ["positions"]]


def test_what_can_be_iterated_over_again_has_epochs_and_an_iterator_ends(source_of):
    body = """
        def batches():
            return [(ones() * number, ones()) for number in range(2)]
        def once():
            return iter(batches())
        def empty():
            return []
        """
    source, once, empty = (source_of(body, name) for name in ("batches", "once", "empty"))

    assert [int(source.next(number).args[0][0, 0]) for number in range(5)] == [0, 1, 0, 1, 0]
    once.next(0), once.next(1)
    with pytest.raises(ConfigError, match=r"mine\.py:once has ended after 2 batches; return what can be iterated"):
        once.next(2)
    with pytest.raises(ConfigError, match=r"mine\.py:empty has ended after 0 batches"):
        empty.next(0)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("def batches(width): return []", "TypeError: batches() missing 1 required positional argument: 'width'"),
        (
            "def batches():\n    raise ValueError('no file')",
            "mine.py:4: data.source = 'mine.py:batches' failed: ValueErr",
        ),
        ("def batches(): return 5", "returned 5 of type int; expected an iterable of batches"),
        ("def batches(): return [5]", "batch 0 of mine.py:batches is 5 of type int; expected tokens and target"),
        ("def batches(): return [(ones(), ones()[:2])]", "target is a tensor of shape [2, 8] and type int64; expected"),
        ("def batches(): return [(ones().repeat(1, 2), ones())]", "shape [4, 16] and type int64; expected"),
        ("def batches(): return [(ones() * 300, ones())]", "has token 300, but the model's vocabulary is 256"),
        ("def other(): return []", "data.source: mine.py has no function 'batches'; its functions: ones, other"),
        ("def batches(:", "mine.py:3:13: not Python"),
    ],
)
def test_what_is_wrong_is_one_message(source_of, body, problem):
    with pytest.raises(ConfigError if "not Python" not in problem else Exception, match=re.escape(problem)):
        source_of(body).next(0)


def test_a_state_is_of_json_values(source_of):
    body = """
        class Source:
            state = {"at": 3}
            def __iter__(self):
                yield from [(ones() * self.state["at"], ones())] * 2
            def state_dict(self):
                return self.state
            def load_state_dict(self, state):
                self.state = state
        class Strange(Source):
            def state_dict(self):
                return {"at": torch.ones(1)}
        def plain():
            yield ones(), ones()
        """
    source, strange, plain = (source_of(body, name) for name in ("Source", "Strange", "plain"))

    assert [source.is_stateful, strange.is_stateful, plain.is_stateful] == [True, True, False]
    assert source.state() == {"at": 3}
    source.begin({"at": 9})
    assert source.next(0).args[0].unique().tolist() == [9]
    with pytest.raises(ConfigError, match=r"the state_dict of mine\.py:Strange is not of numbers, texts, lists"):
        strange.state()


def test_held_out_batches_are_the_first_of_their_split(source_of):
    body = """
        def batches(split):
            for number in range(9):
                yield ones() * (100 * (split == "held_out") + number), ones()
        def none(split):
            return [] if split == "held_out" else [(ones(), ones())]
        def plain():
            yield ones(), ones()
        """
    source, none, plain = (source_of(body, name) for name in ("batches", "none", "plain"))

    assert [int(batch.args[0][0, 0]) for batch in source.held_out(2)] == [100, 101]
    assert int(source.next(0).args[0][0, 0]) == 0
    assert (plain.has_held_out, plain.held_out(2)) == (False, [])
    with pytest.raises(ConfigError, match=r"has no batches for split='held_out'"):
        none.held_out(1)
