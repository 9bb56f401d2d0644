"""What a user's function gives, and what is said where it gives something else."""

import re
from textwrap import dedent

import pytest

from penstock.errors import ConfigError
from penstock.train.data.user_source import UserSource
from penstock.train.settings.config import config_from_table


@pytest.fixture
def source_of(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def make(body, name="batches"):
        head = "import torch\nones = lambda: torch.ones(4, 8, dtype=torch.int64)\n"
        (tmp_path / "mine.py").write_text(head + dedent(body))
        config = config_from_table(
            {
                "run": {"folder": "run", "seed": 7},
                "data": {"source": f"mine.py:{name}"},
                "batch": {"size": 4, "length": 8},
                "pipeline": {"microbatches": 4},
            }
        )
        return UserSource(config, 256)

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
        ("def batches():\n    yield 1 / 0", "mine.py:4: data.source = 'mine.py:batches' failed: ZeroDivisionError"),
        ("def batches(): return 5", "returned 5 of type int; expected an iterable of batches"),
        ("def batches(): return [5]", "batch 0 of mine.py:batches is 5 of type int; expected tokens and target"),
        ("def batches(): return [{'tokens': ones()}]", "batch 0 of mine.py:batches is {'tokens'"),
        ("def batches(): return [(ones().float(), ones())]", "tokens is a tensor of shape [4, 8] and type float32"),
        ("def batches(): return [(ones(), ones()[:2])]", "target is a tensor of shape [2, 8] and type int64; expected"),
        (
            "def batches(): return [(ones(), None)]",
            "target is None; expected tokens and target, int64 tensors of shape",
        ),
        ("def batches(): return [(ones().repeat(1, 2), ones())]", "shape [4, 16] and type int64; expected"),
        ("def batches(): return [(ones() * 300, ones())]", "has token 300, but the model's vocabulary is 256"),
        ("def batches(): return [(ones(), ones() * -1)]", "has token -1, but the model's vocabulary is 256"),
        ("def other(): return []", "data.source: mine.py has no function 'batches'; its functions: ones, other"),
        ("def batches(:", "mine.py:3:13: not Python"),
    ],
)
def test_what_is_wrong_is_one_message(source_of, body, problem):
    with pytest.raises(ConfigError if "not Python" not in problem else Exception, match=re.escape(problem)):
        source_of(body).next(0)


def test_a_missing_file_is_named(tmp_path, source_of):
    config = config_from_table({"run": {"folder": "run"}, "data": {"source": "none.py:batches"}})

    with pytest.raises(ConfigError, match=r"data\.source: none\.py: cannot be read \(No such file or directory\)"):
        UserSource(config, 256)


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
    source.load_state({"at": 9})
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
