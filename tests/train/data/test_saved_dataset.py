"""Folders that the `datasets` package has saved; without the package, only that it is missing is tested."""

import sys

import pytest
import torch

from penstock.errors import ConfigError
from penstock.train.data.dataset import open_dataset
from penstock.train.data.saved_dataset import SavedDataset
from penstock.train.settings.config import config_from_table
from penstock.train.settings.optional_packages import require_packages
from tests.train.settings.tables import merged, refusal_of
from tests.train.tiny_runs import tiny_table

TEXTS = ["first of all", "", None, "second, with é", "first of all", "third " * 30]
IDS = [[5, 6, 7], [], [300, 2, 9, 4] * 20]
OF_DATASETS = {"corpus": "datasets", "held_out_fraction": 0.0}


def config_of(folder, **sections):
    return config_from_table(merged(tiny_table("unused", folder, batch={"length": 4}, data=OF_DATASETS), sections))


@pytest.fixture
def saved(tmp_path):
    datasets = pytest.importorskip("datasets")

    def save(**columns):
        datasets.Dataset.from_dict(columns).save_to_disk(tmp_path / "saved")
        return tmp_path / "saved"

    return save


def documents_of(dataset):
    [source] = dataset.sources
    parts = torch.from_numpy(source.tokens.astype("int64")).tensor_split(
        torch.from_numpy(source.document_ends[:-1].copy())
    )
    return [part.tolist() for part in parts]


def test_a_missing_package_is_named_before_anything_is_opened(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)

    with pytest.raises(ConfigError, match=r"data\.corpus: needs the datasets package .* pip install '\.\[datasets\]'"):
        require_packages(config_of(tmp_path))
    with pytest.raises(ConfigError, match=r"needs the datasets package: pip install '\.\[datasets\]'"):
        SavedDataset(str(tmp_path), "text")


@pytest.mark.parametrize(
    ("data", "key"),
    [
        ({"files": []}, "data.files"),
        ({"files": ["a", "b"]}, "data.files"),
        ({"corpus": "files", "files": ["a"], "column": "content"}, "data.column"),
    ],
)
def test_keys_that_do_not_go_together_are_named(data, key):
    assert refusal_of(tiny_table("run", data=OF_DATASETS | data)).key == key


def test_each_distinct_row_of_texts_is_a_document(saved, tmp_path):
    dataset = open_dataset(config_of(saved(text=TEXTS, other=TEXTS)), tmp_path / "cache")

    found = {bytes(document) for document in documents_of(dataset)}
    assert found == {b"first of all\0", "second, with é\0".encode(), b"third " * 30 + b"\0"}
    assert dataset.batch(0).args[0].shape == (4, 4)


def test_ids_are_taken_as_they_are(saved, tmp_path):
    folder = saved(input_ids=IDS)
    keys = {"column": "input_ids"}

    dataset = open_dataset(config_of(folder, data=keys, model={"vocabulary": 301}), tmp_path / "cache")

    assert sorted(documents_of(dataset)) == sorted(ids for ids in IDS if ids)
    assert dataset.vocabulary == 301
    with pytest.raises(ConfigError, match=r"model\.vocabulary: 300 is a token of data\.column, but the model has 256"):
        open_dataset(config_of(folder, data=keys), tmp_path / "cache")
    folder = saved(input_ids=[[1, 2], [3, -100]])  # read again, since it has changed
    with pytest.raises(ConfigError, match=r"saved, row 1: -100 is no token id"):
        open_dataset(config_of(folder, data=keys), tmp_path / "cache")


def test_saved_rows_and_files_are_sources_beside_each_other(saved, tmp_path):
    folder = saved(input_ids=IDS)
    (tmp_path / "a.txt").write_text("some text " * 20)
    sources = [
        {"corpus": "datasets", "files": [str(folder)], "column": "input_ids"},
        {"files": [str(tmp_path / "a.txt")]},
    ]
    data = {"sources": sources, "corpus": "files", "files": []}

    dataset = open_dataset(config_of(folder, data=data, model={"vocabulary": 301}), tmp_path / "cache")

    tokens = dataset.batch(0).args[0]
    assert sum(bool((row > 31).any() and row.max() < 256) for row in tokens) >= 2
    assert len(dataset.sources) == 2


@pytest.mark.parametrize(
    ("columns", "column", "problem"),
    [
        (
            {"text": ["a"], "title": ["b"]},
            "txt",
            r"has no column 'txt'\. Did you mean 'text' or 'title'\? Its columns: text, title",
        ),
        ({"text": [1.5]}, "text", r"column 'text' of .* expected texts, or lists of whole numbers"),
        ({"text": [[0.5]]}, "text", r"column 'text' of .* expected texts, or lists of whole numbers"),
    ],
)
def test_a_column_of_neither_texts_nor_ids_is_refused(saved, columns, column, problem):
    with pytest.raises(ConfigError, match=problem) as caught:
        SavedDataset(str(saved(**columns)), column)

    assert caught.value.key == "data.column"


def test_a_folder_of_splits_a_missing_one_and_one_of_something_else_are_named(tmp_path):
    datasets = pytest.importorskip("datasets")
    part = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict({"train": part, "test": part}).save_to_disk(tmp_path / "saved")

    with pytest.raises(ConfigError, match=r"saved holds the splits train, test; name one, as in .*saved/train"):
        SavedDataset(str(tmp_path / "saved"), "text")
    assert len(SavedDataset(str(tmp_path / "saved" / "train"), "text")) == 1
    with pytest.raises(ConfigError, match=r"none: there is no such folder; name one that save_to_disk has written"):
        SavedDataset(str(tmp_path / "none"), "text")
    with pytest.raises(ConfigError, match=r"cannot be read: .* Save the data set anew"):
        SavedDataset(str(tmp_path), "text")


@pytest.mark.parametrize("damage", ["cut", "empty", "torn"])
def test_a_damaged_file_is_named(saved, tmp_path, damage):
    folder = saved(text=[f"row {number} " * 20 for number in range(2000)])
    [path] = folder.glob("*.arrow")
    content = path.read_bytes()
    path.write_bytes({"cut": content[: len(content) // 2], "empty": b"", "torn": b"x" * 64 + content[64:]}[damage])

    with pytest.raises(ConfigError, match=r"saved.*: cannot be read: .* Save the data set anew") as caught:
        open_dataset(config_of(folder), tmp_path / "cache")

    assert caught.value.key == "data.files"
