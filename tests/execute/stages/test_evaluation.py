"""During an evaluation all modules of a stage are in evaluation mode; afterwards each is in its own again."""

import pytest
from torch import nn

from penstock.execute.control.error_notes import noted_place
from penstock.execute.stages.evaluation import evaluating
from penstock.execute.stages.stage import Stage


class Special(nn.Module):
    """Notes the calls of `train()` that change its mode, keeps some children frozen, and may be stuck in a mode."""

    def __init__(self, *children, frozen=(), stuck_in=None):
        super().__init__()
        self.inner, self.frozen, self.stuck_in = nn.ModuleList(children), nn.ModuleList(frozen), stuck_in
        self.calls = []
        self.frozen.eval()

    def train(self, mode=True):
        if mode is self.stuck_in:
            raise ValueError("this layer is stuck")
        if mode is not self.training:
            self.calls.append(mode)
        super().train(mode)
        self.frozen.eval()
        return self


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
    trained, frozen = Special(), Special().eval()
    outer = Special(trained, frozen)
    frozen.calls.clear()

    with evaluating([Stage(0, {"a": outer}), Stage(1, {"a": outer})]):
        pass

    assert outer.calls == trained.calls == [False, True]
    assert not frozen.training


def test_a_module_that_freezes_its_own_submodules_keeps_them_frozen():
    norm, dropout = nn.BatchNorm1d(2), nn.Dropout()
    layer = Special(dropout, frozen=[norm])

    with evaluating([Stage(0, {"a": layer})]):
        pass

    assert (layer.training, norm.training, dropout.training) == (True, False, True)


def test_a_layer_that_cannot_change_its_mode_is_named_and_the_others_get_theirs_back():
    first = nn.Dropout()

    with (
        pytest.raises(ValueError, match="stuck") as found,
        evaluating([Stage(0, {"a": first, "b": Special(stuck_in=False)})]),
    ):
        raise AssertionError("evaluated all the same")

    assert noted_place(found.value) == "train(False) of layer 'b' (Special)"
    assert first.training
