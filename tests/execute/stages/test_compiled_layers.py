"""Compiled layers keep the names of their parameters, wherever torch.compile was called."""

import pytest
import torch
from torch import nn

from penstock.errors import ConfigError
from penstock.execute.backend import aot_eager
from penstock.execute.stages.compiled_layers import compile_layers, without_wrappers
from penstock.execute.stages.stage import Stage
from penstock.execute.undocumented_compiler import COMPILED
from penstock.models import LayerSpec
from penstock.pipeline import Pipeline
from tests.support.local_pipelines import WIDTH, block, error_of, gradients_of, named, square_loss, values
from tests.support.using import Using

pytestmark = pytest.mark.usefixtures("nothing_stays_compiled")


def kind_of_output(layer):
    return type(layer(values(1, 3, WIDTH)).grad_fn).__name__


def test_wrappers_within_a_layer_go_too():
    inner, first = (torch.compile(block(seed), backend="aot_eager") for seed in (0, 1))
    more = nn.ModuleList([first, nn.Tanh()])  # in a list too
    layer = without_wrappers(Using(lambda self, x: self.more[1](self.more[0](self.inner(x))), inner=inner, more=more))

    names = [*layer.state_dict(), *(name for name, _ in layer.named_modules())]
    assert not any("_orig_mod" in name for name in names)
    assert {"inner.1.weight", "more.0.1.weight"} <= set(names)
    assert kind_of_output(layer.inner) == kind_of_output(layer.more[0]) == COMPILED


def test_what_is_no_compiled_module_stays_as_it_is():
    spec, plain = LayerSpec("a", lambda: block(0)), block(0)

    assert without_wrappers(spec) is spec
    assert without_wrappers(plain) is plain
    assert kind_of_output(plain) == "TanhBackward0"


def test_layers_that_are_compiled_already_keep_their_backend_and_nothing_is_compiled_unless_asked_for():
    layer, plain = without_wrappers(torch.compile(block(0), backend="eager")), block(0)

    compile_layers([Stage(0, {"0": layer})], "aot_eager")
    compile_layers([Stage(0, {"0": plain})], False)

    assert kind_of_output(layer) == "TanhBackward0"  # "eager" runs the traced forward as it is
    assert plain._compiled_call_impl is None


def pipeline_of(layers, **options):
    return Pipeline(layers, "1f1b", 2, square_loss, **options)


def test_a_pipeline_trains_returned_built_and_own_layers_under_plain_names():
    wanted = named([block(seed) for seed in range(3)])
    plain = pipeline_of([block(seed) for seed in range(3)])
    layers = [
        torch.compile(block(0), backend=aot_eager),
        LayerSpec("1", lambda: torch.compile(block(1), backend="eager")),
        block(2),
    ]
    pipeline = pipeline_of(layers, compile="aot_eager")

    losses = [each.step(values(1, 4, WIDTH), target=values(2, 4, WIDTH)).loss for each in (plain, pipeline)]

    assert losses[0] == losses[1]
    assert [name for name, _ in pipeline.named_parameters()] == [name for name, _ in wanted]
    assert list(pipeline.state_dict()) == list(plain.state_dict())
    found, expected = gradients_of(pipeline.named_parameters()), gradients_of(plain.named_parameters())
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    pipeline.load_state_dict(plain.state_dict())


def test_an_unknown_backend_is_refused_with_those_that_are_known():
    for name in ("inducter", 3):
        error = error_of(pipeline_of, [block(0)], compile=name)
        assert isinstance(error, ConfigError)
        assert error.key == "compile"
    assert "Did you mean 'inductor'" in str(error_of(pipeline_of, [block(0)], compile="inducter"))
