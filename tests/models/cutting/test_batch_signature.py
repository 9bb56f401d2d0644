"""A batch is bound by the arguments of the whole model's forward, as Python binds a call."""

import pytest
from torch import nn

from penstock.errors import ConfigError, PenstockError
from penstock.models.cutting.batch_signature import BatchSignature


class Model(nn.Module):
    def forward(self, words, padding=None, *, scale=1.0):
        pass


class Open(nn.Module):
    def forward(self, words, **others):
        pass


class Inputs(nn.Module):
    def forward(self, input_ids=None, past=None, attention_mask=None, **others):
        pass


class Several(nn.Module):
    def forward(self, *words):
        return words


class Nameless(nn.Module):
    def forward(self, words=None, /, padding=None):
        pass


@pytest.mark.parametrize(
    ("args", "kwargs", "problem"),
    [
        ((), {"padding": 2}, "missing a required argument: 'words'"),
        ((1,), {"words": 1}, "multiple values for argument 'words'"),
        ((1, 2, 3), {}, "too many positional arguments"),
    ],
)
def test_what_does_not_fit_is_refused_in_the_words_of_the_model(args, kwargs, problem):
    text = rf"the forward of Model: {problem}\. Pass the arguments \(words, padding, scale\) .*as target="

    with pytest.raises(PenstockError, match=text):
        BatchSignature(Model()).bind(args, kwargs)


def test_keywords_of_other_layers_stay_as_they_are():
    assert BatchSignature(Model()).bind((1,), {"other": 4}) == ((), {"words": 1, "other": 4})
    assert BatchSignature(Open()).bind((1,), {"other": 4}) == ((), {"words": 1, "other": 4})
    assert BatchSignature(Open()).var_keyword.name == "others"


def test_what_the_first_stage_takes_goes_by_position_and_what_no_batch_has_is_refused():
    signature = BatchSignature(Inputs(), ("input_ids", "attention_mask"), first=("input_ids",))

    assert signature.bind((1,), {"attention_mask": 2}) == ((1,), {"attention_mask": 2})
    assert signature.bind((), {"attention_mask": 2, "input_ids": 1}) == ((1,), {"attention_mask": 2})
    assert signature.bind((), {"attention_mask": 2}, is_first=False) == ((), {"attention_mask": 2})
    with pytest.raises(PenstockError, match="missing a required argument: 'input_ids'"):
        signature.bind((), {"attention_mask": 2})
    with pytest.raises(PenstockError, match=r"'past' is no argument of a batch.*\(input_ids, attention_mask\)"):
        signature.bind((1, 2), {})
    assert [each.name for each in signature.keywords] == ["attention_mask"]
    assert signature.var_keyword is None


def test_arguments_without_names_are_refused_when_the_model_is_cut():
    with pytest.raises(ConfigError, match="forward of Nameless takes 'words' by position alone"):
        BatchSignature(Nameless())
    with pytest.raises(ConfigError, match=r"forward of Several takes \*words, .*; give each of them a name"):
        BatchSignature(Several())
