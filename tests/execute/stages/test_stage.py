"""A stage has its layers under the names of the unsplit model."""

import pytest
from torch import nn

from penstock.execute.stages.stage import Stage, evaluating
from tests.local_pipelines import WIDTH


def test_a_parameter_that_is_used_twice_is_listed_once_under_its_first_name():
    shared = nn.Linear(WIDTH, WIDTH, bias=False)
    stage = Stage(0, {"a": shared, "b": nn.Sequential(shared)})

    assert [name for name, _ in stage.named_parameters()] == ["a.weight"]


@pytest.mark.parametrize("is_training", [True, False])
def test_training_mode_reaches_all_layers(is_training):
    stage = Stage(0, {"a": nn.Sequential(nn.Dropout()), "b": nn.Dropout()})

    stage.set_training(is_training)

    assert [m.training for layer in stage.layers.values() for m in layer.modules()] == [is_training] * 3


def test_a_stage_is_trainable_if_any_of_its_parameters_is():
    layers = {"a": nn.Linear(2, 2).requires_grad_(False), "b": nn.Linear(2, 2)}

    assert Stage(0, layers).is_trainable
    assert not Stage(0, {"a": layers["a"]}).is_trainable


class Counting(nn.Module):
    """Notes the calls of `train()` that change its mode."""

    def __init__(self, *children):
        super().__init__()
        self.inner = nn.ModuleList(children)
        self.calls = []

    def train(self, mode=True):
        if mode is not self.training:
            self.calls.append(mode)
        return super().train(mode)


def modes_of(module):
    return {name: each.training for name, each in module.named_modules(remove_duplicate=False)}


def test_each_module_gets_its_own_mode_back_after_an_evaluation():
    shared = nn.Dropout().eval()
    frozen = nn.Sequential(nn.Dropout(), nn.BatchNorm1d(2)).eval()
    thawed = nn.Sequential(nn.Dropout(), shared).eval()
    thawed[0].train()
    layer = nn.Sequential(nn.Sequential(frozen, shared), nn.Sequential(thawed, shared))
    layer.training = False  # so that no call of its own train() sets the modes within
    stage, before = Stage(0, {"a": layer, "b": layer[1]}), modes_of(layer)

    with evaluating([stage]):
        assert set(modes_of(layer).values()) == {False}

    assert modes_of(layer) == before
    assert set(before.values()) == {True, False}


def test_an_evaluation_calls_train_for_both_changes_of_mode():
    """A layer may do more in it than set its flag."""
    trained, frozen = Counting(), Counting().eval()
    outer = Counting(trained, frozen)
    frozen.calls.clear()

    with evaluating([Stage(0, {"a": outer}), Stage(1, {"a": outer})]):
        pass

    assert outer.calls == trained.calls == [False, True]
    assert not frozen.training


class KeepsFrozen(nn.Module):
    """Keeps a submodule in evaluation mode by its own `train()`, as many backbones do."""

    def __init__(self):
        super().__init__()
        self.norm, self.dropout = nn.BatchNorm1d(2), nn.Dropout()
        self.train()

    def train(self, mode=True):
        super().train(mode)
        self.norm.eval()
        return self


def test_a_module_that_freezes_its_own_submodules_keeps_them_frozen():
    layer = KeepsFrozen()

    with evaluating([Stage(0, {"a": layer})]):
        pass

    assert (layer.training, layer.norm.training, layer.dropout.training) == (True, False, True)
