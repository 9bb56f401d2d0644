"""Runs of one rank on a tiny model, of which a test says what it needs, and tokenizer files of a few words."""

import io

import tokenizers

from penstock.train.loop import train
from penstock.train.settings.config import config_from_table
from tests.train.settings.tables import merged


def tiny_table(folder, *files, **sections):
    """Return the settings of a run in a folder on files of text, with these sections."""
    tiny = {
        "run": {"folder": str(folder), "evaluate_batches": 0, "record_step": 0},
        "pipeline": {"ranks": 1, "microbatches": 2},
        "model": {"width": 16, "layers": 1, "heads": 2, "key_value_heads": 1, "hidden": 16},
        "data": {"files": [str(file) for file in files], "held_out_fraction": 0.1},
        "batch": {"size": 4, "length": 16},
        "optimizer": {"warmup_steps": 1},
    }
    return merged(tiny, sections)


def trained(table, **options):
    """Train by a table of settings; return the result, and what was printed."""
    output = io.StringIO()
    return train(config_from_table(table), output=output, **options), output.getvalue()


def save_tokenizer(path, words, unknown):
    """Write a tokenizer of words with these ids."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token=unknown))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path))
    return str(path)
