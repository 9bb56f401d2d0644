"""Keywords reach the layers that name them."""

import pytest
import torch
from torch import nn

from penstock.errors import PipelineError
from penstock.execute.stages.keywords import run_layers
from penstock.execute.stages.signatures import TakenKeywords
from penstock.execute.stages.stage import Stage
from tests.support.using import Using


def stage_of(*layers):
    return Stage(0, {str(index): layer for index, layer in enumerate(layers)})


class Masked(nn.Module):
    def forward(self, x, mask=None, *, scale=1.0):
        return x * scale if mask is None else x * scale * mask


class Variadic(nn.Module):
    def forward(self, *inputs, scale):
        return sum(inputs) * scale


def test_every_layer_that_names_a_keyword_gets_it_or_all_if_it_may_use_any():
    masked = run_layers(
        stage_of(Masked(), nn.ReLU(), Masked()),
        (torch.tensor([3.0, -1.0]),),
        {"mask": torch.tensor([2.0, 1.0]), "scale": 10.0},
    )

    assert masked.tolist() == [1200.0, 0.0]
    assert run_layers(stage_of(Handing(), Variadic()), (2,), {"scale": 3}) == 18


def test_the_first_layer_alone_gets_all_positional_arguments_and_inputs_by_keyword():
    assert run_layers(stage_of(Variadic(), Masked()), (1, 2, 3), {"scale": 2}) == 24
    assert run_layers(stage_of(Masked(), Masked()), (), {"x": 5, "scale": 2}) == 20


def test_a_layer_that_changes_another_stages_output_in_place_is_named_with_the_way_out():
    features, stage = torch.ones(2, requires_grad=True), stage_of(nn.ReLU(inplace=True))

    with pytest.raises(PipelineError, match=r"a ReLU fails with: .* may not change it in place"):
        run_layers(stage, (features,), {})

    assert run_layers(stage, (features.clone(),), {}).tolist() == [1.0, 1.0]


def test_what_a_layer_raises_for_other_reasons_stays_what_it_is():
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        run_layers(stage_of(nn.Linear(3, 2)), (torch.ones(1, 4),), {})


class Handing(nn.Module):
    """Its forward may use its keywords itself, for all that anybody can tell."""

    inner = Variadic()

    def forward(self, x, **kwargs):
        return self.inner(x, **dict(kwargs))


def test_whoever_asks_is_told_before_each_layer_which_one_it_is():
    seen = []
    noting = Using(lambda self, x: seen.append("layer") or x)

    run_layers(stage_of(noting, noting), (torch.ones(1),), {}, seen.append)

    assert seen == [0, "layer", 1, "layer"]


def test_a_keyword_too_many_is_one_error_that_names_layer_and_fix():
    text = r"a Handing fails with: .*'mask'.*given every keyword.*\['mask', 'scale'\]"
    with pytest.raises(PipelineError, match=text):
        run_layers(stage_of(Handing(), Variadic()), (2,), {"scale": 3, "mask": 1})


def test_what_is_known_of_the_layers_is_not_looked_at_again():
    nothing, stage = TakenKeywords({}), stage_of(Masked())
    stage.taken_keywords = [nothing]

    assert run_layers(stage, (3,), {"scale": 2}) == 3
