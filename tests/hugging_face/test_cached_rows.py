"""A batch with a cache takes it to the forward; any other has no cache, as in training."""

import pytest
import torch

import penstock as ps
from penstock.errors import PenstockError
from penstock.hugging_face.cached_rows import CACHED_ROWS, CachedRows, with_cache
from tests.hugging_face.families import batch_of, model_of

SETTINGS = {"use_cache": False, "return_dict": True}


def test_a_forward_gets_a_cache_where_the_batch_brings_one_alone():
    rows = CachedRows({"past_key_values": "cache", "position_ids": 2})

    with torch.no_grad():
        found = with_cache(SETTINGS, {CACHED_ROWS: rows, "labels": 1})

    assert found == {
        **{"labels": 1, "use_cache": True, "return_dict": True},
        **{"past_key_values": "cache", "position_ids": 2},
    }
    assert with_cache(SETTINGS, {"labels": 1}) == {"labels": 1, **SETTINGS}


def test_a_training_step_and_another_object_are_refused():
    with pytest.raises(PenstockError, match="cached_rows: a cache is of no use in training"):
        with_cache(SETTINGS, {CACHED_ROWS: CachedRows({})})
    with torch.no_grad(), pytest.raises(PenstockError, match=r"cached_rows is .*; leave it to model.generate"):
        with_cache(SETTINGS, {CACHED_ROWS: object()})


def test_a_step_takes_no_cache_in_any_way():
    transformers = pytest.importorskip("transformers")
    layers, (tokens, labels, _) = ps.from_transformers(model_of("llama")), batch_of("plain")

    with ps.Pipeline(layers, "1f1b", 4, ranks=1) as pipeline:
        for keywords, words in (
            ({CACHED_ROWS: CachedRows({})}, "a cache is of no use in training"),
            ({"past_key_values": transformers.DynamicCache()}, "no layer's forward names 'past_key_values'"),
        ):
            with pytest.raises(PenstockError, match=words):
                pipeline.step(tokens, target=labels, **keywords)
            assert all(parameter.grad is None for parameter in pipeline.parameters())
