"""Skips travel with the messages of the stages between, are gone when done, and say what is wrong with them."""

import gc
import weakref

import pytest
import torch
from torch import nn

from penstock.errors import PenstockError
from penstock.execute.stages.skips import SkipPart, StageSkipBuffer, StageSkips, open_at, skip_names
from penstock.execute.stages.stage import Stage
from penstock.models import Skip
from tests.support.one_stage import OneStage
from tests.support.using import Using


def holding(use, names):
    return Using(use, skips=nn.ModuleList(map(Skip, names)))


def putting(*names):
    """Return a layer that puts twice its input under every name, and passes its input on."""

    def put(self, x):
        for skip in self.skips:
            skip.put(2 * x)
        return x

    return holding(put, names)


def getting(*names):
    """Return a layer that adds to its input what it gets under every name."""
    return holding(lambda self, x: x + sum(skip.get() for skip in self.skips), names)


def run(skips, layers, inputs, part=None):
    part = part or SkipPart(skips)
    inputs = part.arrive(inputs)
    with part.around_forward():
        output = nn.Sequential(*layers)(*inputs)
    return part.leave(output)


def test_a_skip_is_open_from_behind_its_first_layer_to_its_last():
    holders = {"late": [3, 4], "far": [0, 2, 5], "inside": [1, 1]}

    found = [open_at(border, holders) for border in range(7)]

    assert found == [[], ["far"], ["far"], ["far"], ["far", "late"], ["far"], []]  # in the order of first layers
    assert open_at(3, {"b": [0, 4], "c": [1, 3], "a": [1, 5]}) == ["b", "a", "c"]


def test_the_names_of_a_layer_are_found_wherever_they_are_in_it():
    assert skip_names(nn.Sequential(putting("b", "a"), nn.Sequential(getting("b")))) == ["b", "a"]
    assert skip_names(nn.Linear(1, 1)) == []


def test_what_leaves_is_the_output_and_all_open_skips():
    layers = [putting("a", "b"), getting("b")]
    x = torch.ones(2)

    output, skips = run(StageSkips(layers, leaving=["a"]), layers, (x,))

    assert torch.equal(output, 3 * x)
    assert list(skips) == ["a"]
    assert torch.equal(skips["a"], 2 * x)


def test_a_stage_hands_on_what_goes_past_it():
    skips = StageSkips([nn.Tanh()], ["a", "b"], ["b"])
    a, b = torch.ones(1), torch.zeros(1)

    output, on_its_way = run(skips, [nn.Tanh()], ((a, {"a": a, "b": b}),))

    assert torch.equal(output, a.tanh())
    assert on_its_way.keys() == {"b"}
    assert on_its_way["b"] is b


def test_a_stage_without_skips_has_nothing_to_do():
    assert StageSkips([nn.Tanh()]).is_empty
    assert not StageSkips([nn.Tanh()], ["a"], ["a"]).is_empty
    assert not StageSkips([nn.Sequential(putting("a"))]).is_empty


def test_a_value_that_is_not_got_on_its_stage_is_free_as_soon_as_it_is_handed_on():
    layers = [putting("a"), nn.Tanh()]
    skips = StageSkips(layers, leaving=["a"])

    part = SkipPart(skips)
    found = weakref.ref(run(skips, layers, (torch.ones(2),), part)[1]["a"])

    gc.collect()
    assert found() is None


def test_of_a_value_that_only_goes_past_a_stage_nothing_is_kept_but_the_way_of_its_gradient():
    skips = StageSkips([nn.Tanh()], ["a"], ["a"])
    stage = OneStage(Stage(1, {"0": nn.Tanh()}), features=[lambda step, place: SkipPart(skips)])
    inputs = (torch.zeros(2, requires_grad=True), {"a": (torch.ones(2, requires_grad=True), torch.ones(2), "b")})

    outputs, saved = stage.forward(inputs)
    found = weakref.ref(inputs[1]["a"][0])
    del inputs, outputs

    gc.collect()
    assert found() is None
    gradients = stage.backward(saved, torch.full((2,), 3.0), torch.tensor([5.0, 7.0]))
    assert [gradient.tolist() for gradient in gradients] == [[3, 3], [5, 7]]


def test_a_value_that_is_got_stays_for_a_recomputation_which_puts_nothing_new():
    layers = [putting("a"), getting("a")]
    skips = StageSkips(layers)
    part = SkipPart(skips)
    run(skips, layers, (torch.ones(2),), part)

    with part.around_backward():
        again = nn.Sequential(*layers)(torch.zeros(2))

    assert torch.equal(again, torch.full((2,), 2.0))


def buffer_of(**arrived):
    return StageSkipBuffer(arrived, "stage 3")


def test_a_second_value_of_one_name_is_refused():
    for own in (buffer_of(a=1), buffer_of()):
        with pytest.raises(PenstockError, match="stage 3: the skip 'a' is put twice for one microbatch; put once"):
            [own.put("a", 2) for _ in range(2)]


def test_a_skip_that_is_got_before_it_is_put_is_refused_with_those_that_are_there():
    layers = [putting("b"), getting("a")]
    with pytest.raises(PenstockError, match=r"stage 3: the skip 'a' is got before it is put \(there are: 'b'\)"):
        buffer_of(b=1).get("a")
    with pytest.raises(PenstockError, match="there are: none"):
        buffer_of().get("a")
    with pytest.raises(PenstockError, match="there are: 'b'"):
        run(StageSkips(layers), layers, (torch.ones(2),))
    with pytest.raises(PenstockError, match="call connect_skips"):
        layers[1](torch.ones(2))  # layers are left alone after a forward that failed


def test_a_skip_that_was_not_put_is_missed_where_it_should_leave():
    skips = StageSkips([putting("b")], leaving=["a"], place="stage 3")

    with pytest.raises(PenstockError, match="stage 3: the skip 'a' was not put, but a later stage holds a Skip"):
        run(skips, [putting("b")], (torch.ones(1),))


def test_a_none_may_be_handed_on():
    own = buffer_of()
    own.put("a", None)

    assert own.get("a") is None
    assert own.take(["a"]) == {"a": None}


def test_what_would_lose_its_gradient_is_refused():
    own = buffer_of(needing=torch.ones(1, requires_grad=True), number=torch.ones(1))

    with torch.no_grad():
        with pytest.raises(PenstockError, match="the skip 'new' is put where gradients are off"):
            own.put("new", torch.ones(1))
        with pytest.raises(PenstockError, match="the skip 'needing' is got where gradients are off"):
            own.get("needing")
        assert own.get("number") == 1
