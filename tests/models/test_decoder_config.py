"""The decoder's shape: what is refused."""

import pytest
from pydantic import ValidationError

from penstock.errors import ConfigError
from penstock.models.decoder import decoder_layers
from penstock.models.decoder_config import DecoderConfig

SIZES = {"vocabulary": 11, "width": 16, "heads": 4, "key_value_heads": 2, "length": 8}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"heads": 5}, "heads: 5 heads do not divide width = 16"),
        ({"heads": 16, "key_value_heads": 16}, "heads: width / heads = 1 must be even"),
        ({"key_value_heads": 3}, "key_value_heads: 3 does not divide heads = 4"),
    ],
)
def test_heads_that_do_not_divide_are_refused_before_anything_is_built(change, message):
    with pytest.raises(ConfigError, match=f"^{message}"):
        decoder_layers(DecoderConfig(**(SIZES | change)))


@pytest.mark.parametrize("change", [{"vocabulary": 0}, {"layers": -1}, {"width": 16.0}, {"dtype": "float46"}, {"x": 1}])
def test_a_value_out_of_range_or_of_another_type_is_refused_by_its_key(change):
    with pytest.raises(ValidationError, match=next(iter(change))):
        DecoderConfig(**(SIZES | change))


def test_problems_name_keys_of_a_section():
    config = DecoderConfig(**(SIZES | {"heads": 5, "key_value_heads": 3}))

    assert list(config.problems("model.")) == [
        ("model.heads", "5 heads do not divide model.width = 16"),
        ("model.key_value_heads", "3 does not divide model.heads = 5"),
    ]


def test_more_blocks_than_any_model_has_are_refused():
    with pytest.raises(ValidationError, match="less than or equal to 100000"):
        DecoderConfig(vocabulary=2, length=2, layers=10**14)
