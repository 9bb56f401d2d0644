"""Windows and batches."""

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError
from penstock.train import data
from penstock.train.batches import Wants
from penstock.train.config import config_from_table
from penstock.train.data import TokenDataset, WindowOptions, open_dataset

COUNTING = np.arange(1001, dtype=np.uint16)


def pair(batch):
    return *batch.args, batch.target


def dataset_of(tokens=COUNTING, **options):
    return TokenDataset(tokens, WindowOptions(**{"batch_size": 4, "length": 10, "held_out_fraction": 0.1, **options}))


def config_of(tmp_path, **sections):
    return config_from_table(
        {
            "run": {"folder": "unused", "seed": 3},
            "data": {"files": [str(tmp_path / "a.txt")], "held_out_fraction": 0.2},
            "batch": {"size": 4, "length": 8},
            **sections,
        }
    )


def test_the_target_is_the_next_token():
    tokens, target = pair(dataset_of().batch(0))

    assert tokens.shape == target.shape == (4, 10)
    assert tokens.dtype == target.dtype == torch.int64
    assert torch.equal(target, tokens + 1)


def test_an_epoch_visits_every_training_window_once():
    dataset = dataset_of(batch_size=9)
    num_steps = dataset.num_windows // 9

    starts = torch.cat([dataset.batch(step).args[0][:, 0] for step in range(num_steps)])

    assert dataset.num_windows == num_steps * 9 == 90
    assert sorted(starts.tolist()) == list(range(0, 900, 10))


def test_epochs_and_seeds_have_orders_of_their_own():
    def order(dataset, first):
        return torch.cat([dataset.batch(step).args[0][:, 0] for step in range(first, first + 10)]).tolist()

    dataset = dataset_of(batch_size=9)

    orders = [order(dataset, 0), order(dataset, 10), order(dataset_of(batch_size=9, seed=1), 0)]

    assert len({tuple(each) for each in orders}) == 3
    assert len({tuple(sorted(each)) for each in orders}) == 1


def test_batches_are_the_same_in_any_order_and_on_any_rank():
    forward = [dataset_of().batch(step).args[0] for step in range(30)]
    other = dataset_of()

    backward = [other.batch(step).args[0] for step in reversed(range(30))]

    assert all(torch.equal(one, two) for one, two in zip(forward, reversed(backward), strict=True))


def test_held_out_tokens_are_never_trained_on():
    dataset = dataset_of()

    trained = {int(token) for step in range(60) for part in pair(dataset.batch(step)) for token in part.flatten()}
    held_out = {
        int(token) for batch in dataset.held_out_batches(100) for part in pair(batch) for token in part.flatten()
    }

    assert trained == set(range(901))
    assert held_out == set(range(901, 982))


class UnreadTokens(np.ndarray):
    """Tokens that may be counted and divided, but not read."""

    def __getitem__(self, index):
        assert isinstance(index, slice), "a token was read"
        return super().__getitem__(index)


@pytest.mark.parametrize("wants", [Wants(), Wants(target=False), Wants(inputs=False)])
def test_a_rank_is_given_what_it_wants(wants):
    tokens, target = pair(dataset_of().batch(3))

    found = dataset_of().batch(3, wants)

    assert len(found.args) == wants.inputs
    assert all(torch.equal(part, tokens) for part in found.args)
    assert (found.target is not None) == wants.target
    assert found.target is None or torch.equal(found.target, target)
    assert (found.target is None) == (dataset_of().held_out_batches(1, wants)[0].target is None)


def test_a_rank_that_wants_nothing_reads_nothing():
    dataset = dataset_of(COUNTING.view(UnreadTokens))

    for batch in (dataset.batch(3, Wants(False, False)), *dataset.held_out_batches(2, Wants(False, False))):
        assert (batch.args, batch.target) == ((), None)
    with pytest.raises(AssertionError, match="a token was read"):
        dataset.batch(3, Wants(inputs=False))


def test_held_out_batches_are_fixed_and_spread_over_the_whole_part():
    dataset = dataset_of(held_out_fraction=0.5, seed=1)

    few = dataset.held_out_batches(2)

    starts = torch.cat([batch.args[0][:, 0] for batch in few]).tolist()
    same = dataset_of(held_out_fraction=0.5).held_out_batches(2)
    again = torch.cat([batch.args[0][:, 0] for batch in same]).tolist()
    assert starts == again == [501, 561, 621, 681, 741, 801, 861, 921]


def test_held_out_part_gives_fewer_batches_where_it_does_not_suffice():
    assert len(dataset_of().held_out_batches(100)) == 2


@pytest.mark.parametrize("fraction", [0.0, 0.03])
def test_held_out_part_below_one_batch_is_refused(fraction):
    with pytest.raises(ConfigError, match=r"fewer than batch\.size = 4") as caught:
        dataset_of(held_out_fraction=fraction).held_out_batches(1)

    assert caught.value.key == "data.held_out_fraction"


@pytest.mark.parametrize(("num_tokens", "is_enough"), [(10, False), (11, True)])
def test_a_corpus_shorter_than_one_window_is_refused(num_tokens, is_enough):
    tokens = COUNTING[:num_tokens]
    if is_enough:
        assert dataset_of(tokens, held_out_fraction=0.0).num_windows == 1
        return

    with pytest.raises(ConfigError, match=r"10 tokens to train on, but one window .* needs 11") as caught:
        dataset_of(tokens, held_out_fraction=0.0)

    assert caught.value.key == "data.files"


@pytest.mark.parametrize("look_at_once", [1, 3, 1000])
@pytest.mark.parametrize(
    ("ends", "first"),
    [
        ((850, 910, 950), 911),  # the first end after the cut at 901 tokens
        ((900,), 901),  # the document before ends at the cut
        ((901,), 902),
        ((950, 1000), 951),
        ((951, 1000), 901),  # the document at the cut would leave less than half
        ((), 901),
    ],
)
def test_held_out_tokens_begin_with_a_document(ends, first, look_at_once, monkeypatch):
    monkeypatch.setattr(data, "LOOK_AT_ONCE", look_at_once)
    tokens = COUNTING + 7
    tokens[list(ends)] = 3

    found = dataset_of(tokens, end_of_document=3)

    assert len(found.train_tokens) == 901
    assert np.array_equal(found.held_out_tokens, tokens[first:])
    assert np.array_equal(dataset_of(tokens).held_out_tokens, tokens[901:])


def test_no_document_of_a_corpus_is_in_both_parts(tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(100):
        (folder / f"{number}.txt").write_text(f"<{number}>" + "x" * 40)
    files = {"files": [str(folder)], "held_out_fraction": 0.2}

    found = open_dataset(config_of(tmp_path, data=files), tmp_path / "cache")

    train, held_out = (bytes(part).split(b"\0") for part in (found.train_tokens, found.held_out_tokens))
    assert all(each.startswith(b"<") for each in held_out if each)
    assert not {each.partition(b">")[0] for each in train[:-1]} & {each.partition(b">")[0] for each in held_out}
    assert len(held_out) > 15


def test_a_configuration_opens_its_files(tmp_path):
    (tmp_path / "a.txt").write_text("".join(chr(97 + place % 26) for place in range(500)))

    dataset = open_dataset(config_of(tmp_path), tmp_path / "cache")
    tokens, target = pair(dataset.batch(7))

    assert tokens.shape == (4, 8)
    assert torch.equal((tokens - 97 + 1) % 26, target - 97)
    assert dataset.vocabulary == 256
    assert len(dataset.digest) == 64
    assert len(dataset.held_out_tokens) == 100


def test_the_model_may_have_more_ids_than_the_tokenizer_but_not_fewer(tmp_path):
    (tmp_path / "a.txt").write_text("text " * 100)

    config = config_of(tmp_path, model={"vocabulary": 300})

    assert open_dataset(config, tmp_path / "cache").vocabulary == 300


def test_a_vocabulary_below_that_of_the_tokenizer_file_is_refused(tmp_path):
    import tokenizers

    path = tmp_path / "words.json"
    tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "b": 9}, unk_token="a")).save(str(path))
    config = config_of(
        tmp_path, model={"vocabulary": 5}, data={"files": [str(tmp_path / "a.txt")], "tokenizer": str(path)}
    )

    with pytest.raises(ConfigError, match=r"5 is smaller than the 10 ids") as caught:
        open_dataset(config, tmp_path / "cache")

    assert caught.value.key == "model.vocabulary"


@pytest.mark.slow
def test_the_standard_library_is_a_corpus_of_megabytes(tmp_path):
    config = config_of(tmp_path, data={"corpus": "stdlib"})

    dataset = open_dataset(config, tmp_path / "cache")

    assert len(dataset.train_tokens) > 5_000_000
    assert bytes(dataset.train_tokens[:100_000]).count(b"def ") > 100
