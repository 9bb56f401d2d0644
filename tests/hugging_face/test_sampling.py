"""Tokens are taken as transformers takes them, and as often as the settings say."""

from collections import Counter

import pytest
import torch

from penstock.errors import ConfigError, PenstockError
from penstock.hugging_face.sampling import Sampling


def drawn(logits, seed=0, **settings):
    return Sampling(**settings).draw(logits, torch.Generator().manual_seed(seed)).tolist()


def frequencies(number=4000, **settings):
    counts = Counter(drawn(torch.tensor([1.0, 2.0, 4.0]).log().repeat(number, 1), **settings))
    return [counts[token] / number for token in range(3)]


@pytest.mark.parametrize(
    ("settings", "odds"),
    [
        ({"temperature": 1}, [1, 2, 4]),
        ({"temperature": 0.5}, [1, 4, 16]),
        ({"temperature": 1, "top_k": 2}, [0, 2, 4]),
        ({"temperature": 1, "top_k": 9}, [1, 2, 4]),
        ({"temperature": 1, "top_p": 0.6}, [0, 2, 4]),
        ({"temperature": 1, "top_p": 0.5}, [0, 0, 1]),
        ({"temperature": 1, "top_p": 1e-9}, [0, 0, 1]),
        ({"temperature": 0}, [0, 0, 1]),
    ],
)
def test_tokens_are_drawn_as_often_as_the_settings_say(settings, odds):
    assert frequencies(**settings) == pytest.approx([each / sum(odds) for each in odds], abs=0.03)


@pytest.mark.parametrize("settings", [{"temperature": 0.7}, {"temperature": 2.0, "top_k": 5, "top_p": 0.6}])
def test_scores_are_those_of_transformers_bit_for_bit(settings):
    transformers = pytest.importorskip("transformers")
    logits = torch.randn(50, 40, generator=torch.Generator().manual_seed(1)).bfloat16()
    scores = transformers.TemperatureLogitsWarper(settings["temperature"])(None, logits.float())
    if "top_k" in settings:
        scores = transformers.TopKLogitsWarper(settings["top_k"])(None, scores)
        scores = transformers.TopPLogitsWarper(settings["top_p"])(None, scores)
    expected = torch.multinomial(scores.softmax(-1), 1, generator=torch.Generator().manual_seed(0))[:, 0]

    assert drawn(logits, **settings) == expected.tolist()


def test_wrong_settings_and_logits_that_are_not_numbers_are_refused():
    for settings, words in (({"top_k": True}, "top_k: True"), ({"temperature": float("inf")}, "temperature: inf")):
        with pytest.raises(ConfigError, match=words):
            Sampling(**settings)
    with pytest.raises(PenstockError, match="are not numbers"):
        drawn(torch.tensor([[0.0, torch.nan]]))
