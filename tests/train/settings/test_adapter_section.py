"""The keys of an adapter: which a method has, and when one is used."""

import pytest

from penstock.train.settings.adapter_section import AdapterSection
from tests.support.local_pipelines import error_of
from tests.train.settings.tables import config_with


def adapter_config(**adapter):
    return config_with(model={"transformers": "tiny"}, data={"tokenizer": "bytes", "corpus": "stdlib"}, adapter=adapter)


def test_an_adapter_is_used_where_a_method_or_a_folder_is_named():
    assert not AdapterSection().is_used
    assert AdapterSection(kind="lora").is_used
    assert AdapterSection(folder="mine").is_used


@pytest.mark.parametrize(
    ("adapter", "key", "told"),
    [
        ({"kind": "ia3", "rank": 4}, "adapter.rank", "is not for adapter.kind = 'ia3'"),
        ({"kind": "vera", "alpha": 4}, "adapter.alpha", "is not for adapter.kind = 'vera'"),
        ({"folder": "mine", "rank": 4}, "adapter.rank", "the settings of the adapter in adapter.folder"),
        ({"kind": "adalora"}, "adapter.kind", "'lora'"),
    ],
)
def test_keys_that_an_adapter_does_not_have_are_refused(adapter, key, told):
    error = error_of(adapter_config, **adapter)

    assert error.key == key
    assert told in str(error)
