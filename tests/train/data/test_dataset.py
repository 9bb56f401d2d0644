"""Windows and batches."""

import numpy as np
import pytest
import torch

from penstock.errors import ConfigError
from penstock.train.data import sequences
from penstock.train.data.batches import Wants
from penstock.train.data.dataset import BatchOptions, TokenDataset, left_out_notes, open_dataset
from penstock.train.data.learned import marked
from penstock.train.data.sequences import Source
from penstock.train.settings.config import config_from_table
from tests.train.settings.tables import merged
from tests.train.tiny_runs import save_tokenizer, tiny_table

COUNTING = np.arange(1001, dtype=np.uint16)


def pair(batch):
    return *batch.args, batch.target


def parts_of(dataset):
    """The tokens to train on, and those that are held out."""
    (source,) = dataset.sources
    return source.tokens[: source.num_train_tokens], source.tokens[source.held_out.begin :]


def source_of(tokens=COUNTING, held_out_fraction=0.1, **options):
    return Source(tokens, length=10, held_out_fraction=held_out_fraction, **options)


def dataset_of(tokens=COUNTING, batch_size=4, seed=0, **options):
    return TokenDataset([source_of(tokens, seed=seed, **options)], BatchOptions(batch_size, 10, seed))


def starts_of(batches):
    return torch.cat([batch.args[0][:, 0] for batch in batches]).tolist()


def config_of(tmp_path, **sections):
    tiny = {
        "run": {"seed": 3},
        "batch": {"length": 8},
        "pipeline": {"microbatches": 4},
        "data": {"held_out_fraction": 0.2},
    }
    return config_from_table(merged(tiny_table("unused", tmp_path / "a.txt", **tiny), sections))


def test_the_target_is_the_next_token():
    tokens, target = pair(dataset_of().batch(0))

    assert tokens.shape == target.shape == (4, 10)
    assert tokens.dtype == target.dtype == torch.int64
    assert torch.equal(target, tokens + 1)


def test_an_epoch_visits_every_training_window_once_in_an_order_of_its_own_and_of_its_seed():
    datasets = [dataset_of(batch_size=9, seed=seed) for seed in (0, 0, 1)]

    orders = [
        starts_of(map(each.batch, range(*ends))) for each, ends in zip(datasets, [(10,), (10, 20), (10,)], strict=True)
    ]

    assert datasets[0].num_sequences == 10 * 9
    assert [sorted(order) for order in orders] == [list(range(0, 900, 10))] * 3
    assert len(set(map(tuple, orders))) == 3


def test_held_out_tokens_are_never_trained_on():
    dataset = dataset_of()

    trained = {int(token) for step in range(60) for part in pair(dataset.batch(step)) for token in part.flatten()}
    held_out = {
        int(token) for batch in dataset.held_out_batches(100) for part in pair(batch) for token in part.flatten()
    }

    assert len(dataset.held_out_batches(100)) == 2
    assert trained == set(range(901))
    assert held_out == set(range(901, 982))


class UnreadTokens(np.ndarray):
    """Tokens that may be cut into parts, but not read any more when `is_cut`."""

    is_cut = False

    def __getitem__(self, index):
        assert not self.is_cut, "a token was read"
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


def test_a_rank_that_wants_nothing_reads_nothing(monkeypatch):
    dataset = dataset_of(COUNTING.view(UnreadTokens))
    monkeypatch.setattr(UnreadTokens, "is_cut", True)

    for batch in (dataset.batch(3, Wants(False, False)), *dataset.held_out_batches(2, Wants(False, False))):
        assert (batch.args, batch.target) == ((), None)
    with pytest.raises(AssertionError, match="a token was read"):
        dataset.batch(3, Wants(inputs=False))


@pytest.mark.parametrize(("num_replicas", "sizes"), [(2, [4, 3]), (3, [3, 2, 2])])
def test_replicas_share_out_the_rows_of_a_batch_in_their_order_and_read_no_others(num_replicas, sizes, monkeypatch):
    dataset, read = dataset_of(batch_size=7), []
    wholes = [dataset.batch(3), *dataset.held_out_batches(1)]
    getitem = np.ndarray.__getitem__
    monkeypatch.setattr(UnreadTokens, "__getitem__", lambda self, index: read.append(index) or getitem(self, index))
    counted = dataset_of(COUNTING.view(UnreadTokens), batch_size=7)
    read.clear()

    wanted = [Wants(replica=replica, num_replicas=num_replicas) for replica in range(num_replicas)]
    parts = [(counted.batch(3, wants), *counted.held_out_batches(1, wants)) for wants in wanted]

    assert [[len(batch.target) for batch in own] for own in parts] == [[size, size] for size in sizes]
    assert len(read) == 2 * 7  # spans, of a batch and of a held-out one
    for whole, own in zip(wholes, zip(*parts, strict=True), strict=True):
        assert torch.cat([batch.args[0] for batch in own]).equal(whole.args[0])
        assert torch.cat([batch.target for batch in own]).equal(whole.target)


def test_held_out_batches_are_fixed_and_spread_over_the_whole_part():
    dataset = dataset_of(held_out_fraction=0.5, seed=1)

    few = dataset.held_out_batches(2)

    same = dataset_of(held_out_fraction=0.5).held_out_batches(2)
    assert starts_of(few) == starts_of(same) == [501, 561, 621, 681, 741, 801, 861, 921]


@pytest.mark.parametrize("fraction", [0.0, 0.03])
def test_held_out_part_below_one_batch_is_refused_and_a_source_without_any_named(fraction):
    with pytest.raises(ConfigError, match=r"fewer than batch\.size = 4") as caught:
        dataset_of(held_out_fraction=fraction).held_out_batches(1)

    assert caught.value.key == "data.held_out_fraction"
    dataset = TokenDataset([source_of(), source_of(COUNTING[:50])], BatchOptions(4, 10), weights=[1, 1])
    with pytest.raises(ConfigError, match=r"the held-out part of data\.sources\[1\] is shorter than one sequence"):
        dataset.held_out_batches(1)


def test_a_corpus_shorter_than_one_window_is_refused():
    assert dataset_of(COUNTING[:11], held_out_fraction=0.0, batch_size=1).num_sequences == 1
    with pytest.raises(ConfigError, match=r"10 tokens to train on, but one sequence .* needs 11") as caught:
        dataset_of(COUNTING[:10], held_out_fraction=0.0)
    assert caught.value.key == "data.files"
    with pytest.raises(ConfigError, match=r"data\.sources\[1\] has 8 tokens to train on"):
        TokenDataset([source_of(), source_of(COUNTING[:8], number=1)], BatchOptions(4, 10), weights=[1, 1])
    with pytest.raises(ConfigError, match=r"has 3 sequences to train on, fewer than batch\.size = 4"):
        dataset_of(COUNTING[:31], held_out_fraction=0.0)


@pytest.mark.parametrize("look_at_once", [3, 1000])
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
    monkeypatch.setattr(sequences, "LOOK_AT_ONCE", look_at_once)
    tokens = COUNTING + 7
    tokens[list(ends)] = 3

    found = dataset_of(tokens, end_of_document=3)

    assert found.num_train_tokens == 901
    assert np.array_equal(parts_of(found)[1], tokens[first:])
    assert np.array_equal(parts_of(dataset_of(tokens))[1], tokens[901:])


def test_no_document_of_a_corpus_is_in_both_parts(tmp_path):
    (tmp_path / "a.txt").mkdir()
    for number in range(100):
        (tmp_path / "a.txt" / f"{number}.txt").write_text(f"<{number}>" + "x" * 40)

    found = open_dataset(config_of(tmp_path), tmp_path / "cache")

    train, held_out = (bytes(part).split(b"\0") for part in parts_of(found))
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
    assert len(parts_of(dataset)[1]) == 100


def test_the_model_may_have_more_ids_than_the_tokenizer_file_but_not_fewer(tmp_path):
    path = save_tokenizer(tmp_path / "words.json", {"a": 0, "b": 9}, unknown="a")
    (tmp_path / "a.txt").write_text("a " * 500)

    def dataset(vocabulary):
        config = config_of(tmp_path, model={"vocabulary": vocabulary}, data={"tokenizer": path})
        return open_dataset(config, tmp_path / "cache")

    assert dataset(11).vocabulary == 11
    with pytest.raises(ConfigError, match=r"5 is smaller than the 10 ids") as caught:
        dataset(5)
    assert caught.value.key == "model.vocabulary"


def test_sources_are_drawn_by_weight_and_each_has_epochs_of_its_own():
    sources = [source_of(COUNTING), source_of(COUNTING[:401] + 2000, number=1)]
    dataset = TokenDataset(sources, BatchOptions(8, 10), weights=[1, 3])

    starts = starts_of(map(dataset.batch, range(45)))

    second = [start for start in starts if start >= 2000]
    first = [start for start in starts if start < 2000]
    assert (len(first), len(second)) == (90, 270)
    assert sorted(first) == list(range(0, 900, 10))  # one epoch
    assert all(sorted(second[at : at + 36]) == list(range(2000, 2360, 10)) for at in range(0, 252, 36))
    assert second[:36] != second[36:72]


def test_held_out_sequences_have_the_shares_of_the_weights_and_are_spread_over_each_source():
    sources = [source_of(tokens, held_out_fraction=0.5) for tokens in (COUNTING, COUNTING + 2000)]
    dataset = TokenDataset(sources, BatchOptions(8, 10), weights=[1, 3])

    starts = starts_of(dataset.held_out_batches(2))

    assert sorted(start for start in starts if start < 2000) == [501 + 10 * (at * 49 // 4) for at in range(4)]
    assert sorted(start for start in starts if start >= 2000) == [2501 + 10 * (at * 49 // 12) for at in range(12)]
    assert dataset.held_out_weights(2) is None


ENDS = np.array([3, 4, 40, 45, 60])


def test_documents_are_cut_or_padded_and_what_pads_is_no_target():
    source = source_of(COUNTING[:60], held_out_fraction=0.0, document_ends=ENDS, packing="none")
    dataset = TokenDataset([source], BatchOptions(4, 10, packing="none"))

    tokens, target = pair(dataset.batch(0))

    rows = sorted((row[0].item(), goal[goal >= 0].tolist()) for row, goal in zip(tokens, target, strict=True))
    assert rows == [
        (0, [1, 2]),
        (4, list(range(5, 15))),  # longer than a sequence; the document of one token has nothing to predict
        (40, [41, 42, 43, 44]),
        (45, list(range(46, 56))),
    ]
    assert set(target[target < 0].tolist()) == {-100}
    assert dataset.num_targets(0) == int((target >= 0).sum()) == 26
    assert dataset.shares(0, 2) == [0.5, 0.5]


def test_documents_are_in_one_part_only():
    source = source_of(COUNTING[:60], held_out_fraction=0.4, document_ends=ENDS, packing="none")  # from token 36 on

    assert [source.train[index] for index in range(len(source.train))] == [((0, 3),), ((4, 15),)]
    assert [source.held_out[index] for index in range(len(source.held_out))] == [((40, 45),), ((45, 56),)]


def test_positions_begin_anew_with_each_document_and_with_the_sequence():
    source = source_of(COUNTING[:60], document_ends=ENDS)

    assert source.positions(((0, 11),), 10).tolist() == [0, 1, 2, 0, 0, 1, 2, 3, 4, 5]
    assert source.positions(((20, 31),), 10).tolist() == list(range(10))
    assert source.positions(((30, 41),), 10).tolist() == list(range(10))
    assert source.positions(((38, 49),), 10).tolist() == [0, 1, 0, 1, 2, 3, 4, 0, 1, 2]
    assert source.positions(((49, 60),), 10).tolist() == list(range(10))


def test_whole_documents_are_packed_apart_and_none_is_cut():
    source = source_of(COUNTING[:60], held_out_fraction=0.0, document_ends=ENDS, packing="whole")
    dataset = TokenDataset([source], BatchOptions(1, 10, packing="whole"))

    batch = dataset.batch(0)

    # The documents of tokens 4 to 39 and 45 to 59 are longer than a sequence; that of one token predicts nothing.
    assert batch.args[0].tolist() == [[0, 1, 40, 41, 42, 43, 44, 0, 0, 0]]
    assert batch.target.tolist() == [[1, 2, 41, 42, 43, 44, *[-100] * 4]]
    assert batch.kwargs["positions"].tolist() == [[0, 1, *range(8)]]
    assert dataset.num_targets(0) == 6
    assert left_out_notes(dataset) == [
        "note: 2 of 5 documents of the corpus are left out, for they are longer than batch.length = 10 tokens"
    ]


LEARNED = np.isin(COUNTING, [2, 41, 42, 45])


@pytest.mark.parametrize(
    ("packing", "targets", "note"),
    [
        ("none", [[2], [41, 42]], "for their first batch.length = 10 tokens have no target"),
        ("whole", [[2, 41, 42]], "for they are longer than batch.length = 10 tokens"),
    ],
)
def test_only_learned_tokens_are_targets_and_documents_without_any_are_left_out(packing, targets, note):
    tokens = marked(COUNTING, LEARNED)[:60]
    source = source_of(tokens, held_out_fraction=0.0, document_ends=ENDS, packing=packing, has_marks=True)
    dataset = TokenDataset([source], BatchOptions(len(targets), 10, packing=packing))

    target = dataset.batch(0).target

    assert sorted(row[row >= 0].tolist() for row in target) == targets
    assert dataset.num_targets(0) == 3
    # The first token of a document, 45, is no target; and that of 4 to 39 has none.
    assert left_out_notes(dataset) == [f"note: 2 of 5 documents of the corpus are left out, {note}"]


def test_batches_share_in_a_step_by_their_targets():
    tokens = marked(COUNTING, COUNTING % 3 > 0)
    ends = np.cumsum([3, 8, 4, 11, 5, 7, 9, 2, 6, 10] * 15)[:150]
    source = source_of(tokens[: ends[-1]], document_ends=ends, packing="whole", has_marks=True)
    dataset = TokenDataset([source], BatchOptions(4, 10, packing="whole"))

    counts = [int((dataset.batch(number).target >= 0).sum()) for number in range(5, 8)]

    assert [dataset.num_targets(number) for number in range(5, 8)] == counts
    assert dataset.shares(5, 3) == [count / sum(counts) for count in counts]
    assert len(set(counts)) > 1
    assert dataset.held_out_weights(2) == [float((batch.target >= 0).sum()) for batch in dataset.held_out_batches(2)]


def test_text_of_which_every_document_is_left_out_is_refused():
    source = source_of(COUNTING[:60], document_ends=np.array([20, 60]), packing="whole")

    with pytest.raises(
        ConfigError, match=r"has only documents that are left out, for they are longer than batch\.length"
    ):
        TokenDataset([source], BatchOptions(4, 10, packing="whole"))


def test_a_configuration_opens_several_sources(tmp_path):
    for name, letter in (("a.txt", "a"), ("b.txt", "b")):
        (tmp_path / name).write_text(letter * 1000)
    one, two = (
        {"files": [str(tmp_path / name)], "weight": weight} for name, weight in (("a.txt", 1.0), ("b.txt", 3.0))
    )

    found = [
        open_dataset(config_of(tmp_path, data={"sources": sources, "files": []}), tmp_path / "cache")
        for sources in ([one, two], [two, one], [one, {**two, "weight": 2.0}], [one])
    ]

    letters = found[0].batch(0).args[0][:, 0].tolist()
    assert (letters.count(ord("a")), letters.count(ord("b"))) == (1, 3)
    assert len({dataset.digest for dataset in found}) == 4
    plain = open_dataset(config_of(tmp_path), tmp_path / "cache")
    assert found[3].digest == plain.digest
    assert torch.equal(found[3].batch(5).args[0], plain.batch(5).args[0])
