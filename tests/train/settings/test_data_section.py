"""The keys of data: what follows from the corpus, and what does not go together."""

import tomllib
from typing import get_args

import pytest

from penstock.train.settings.config import config_from_table, config_to_toml
from penstock.train.settings.data_section import CORPORA, PACKINGS, DataSection, SourceKeys
from tests.train.settings.tables import config_with, refusal_of

CHATS = {"corpus": "chats", "files": ["a.jsonl"], "tokenizer": "words.json"}


def config_of(**data):
    return config_from_table({"run": {"folder": "run"}, "data": data})


def test_each_corpus_and_each_packing_has_a_row():
    assert set(get_args(SourceKeys.model_fields["corpus"].annotation)) == set(CORPORA)
    assert set(get_args(DataSection.model_fields["packing"].annotation)) == set(PACKINGS)


def test_chats_are_found_learned_and_packed_as_they_are_unless_a_run_says_otherwise():
    chats, text = config_of(**CHATS).data, config_with().data

    assert (chats.column, chats.suffixes, chats.learn, chats.packing) == (
        "messages",
        (".jsonl", ".parquet"),
        "assistant",
        "whole",
    )
    assert (text.column, text.suffixes, text.learn, text.packing) == ("text", (".txt", ".md", ".py"), "all", "windows")
    other = config_of(**CHATS, column="talk", suffixes=[".json"], learn="all", packing="none").data
    assert (other.column, other.suffixes, other.learn, other.packing) == ("talk", (".json",), "all", "none")


def test_chats_beside_other_sources_have_keys_of_their_own_and_all_are_packed_whole():
    sources = [{"corpus": "chats", "files": ["a.jsonl"]}, {"files": ["a.txt"], "weight": 2.0}]

    data = config_of(sources=sources, tokenizer="words.json").data

    assert [source.learn for source in data.all_sources] == ["assistant", "all"]
    assert [source.column for source in data.all_sources] == ["messages", "text"]
    assert data.packing == "whole"


def test_what_a_run_writes_of_chats_reads_back():
    config = config_of(**CHATS)

    assert config_from_table(tomllib.loads(config_to_toml(config))) == config


@pytest.mark.parametrize(
    ("data", "key", "message"),
    [
        (CHATS | {"packing": "windows"}, "data.packing", "'windows' cuts conversations; use 'whole', or 'none'"),
        (CHATS | {"packing": "documents"}, "data.packing", "'documents' cuts conversations"),
        (CHATS | {"tokenizer": "bytes"}, "data.tokenizer", "bytes have no chat template; name the tokenizer.json"),
        (CHATS | {"files": []}, "data.files", "no file or folder is named; name some"),
        (CHATS | {"learn": "user"}, "data.learn", "expected 'all' or 'assistant'"),
        ({"files": ["a.txt"], "learn": "assistant"}, "data.learn", "only data.corpus = 'chats' knows who speaks"),
        ({"files": ["a.txt"], "chat_template": "a.jinja"}, "data.chat_template", "is for data.corpus = 'chats'"),
        ({"files": ["a.txt"], "column": "a"}, "data.column", "only data.corpus = 'datasets' or 'chats' has columns"),
        ({"corpus": ["chats"]}, "data.corpus", "expected 'files', 'stdlib', 'datasets' or 'chats'"),
    ],
)
def test_keys_that_do_not_go_together_are_named(data, key, message):
    refusal = refusal_of({"run": {"folder": "run"}, "data": data})

    assert refusal.key == key
    assert message in str(refusal)


def test_a_model_of_ones_own_takes_no_positions_so_that_nothing_is_packed_apart():
    table = {"run": {"folder": "run"}, "model": {"source": "mine.py:layers"}, "data": CHATS}

    refusal = refusal_of(table)

    assert refusal.key == "data.packing"
    assert "'whole' is for the decoder, which takes positions; use 'windows' or 'none'" in str(refusal)
