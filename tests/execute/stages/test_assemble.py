"""A rank builds the layers of its own stages and nothing else, and knows which parameters are one."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils.parametrizations import weight_norm

from penstock.errors import PartitionError, StepRefused
from penstock.execute.stages.assemble import assemble, with_skips
from penstock.execute.stages.skips import SkipPart
from penstock.models import LayerSpec, Skip
from penstock.pipeline import Pipeline
from penstock.placement import Placement
from tests.support.local_pipelines import (
    WIDTH,
    Task,
    assert_errors,
    error_of,
    on_ranks,
    settle,
    square_loss,
    step_task,
    values,
)
from tests.support.one_stage import OneStage
from tests.support.using import Using

CPU = torch.device("cpu")
LINE = Placement.line(3)
SLICES = (range(0, 1), range(1, 3), range(3, 4))
NAMES = ("in", "mid.0", "mid.1", "out")


def specs(built=None, **changes):
    """Return layers to be, which note that they are built; `changes` are those of the width and of ties, by name."""
    return [spec(name, [] if built is None else built, **changes.get(name, {})) for name in NAMES]


def spec(name, built, width=WIDTH, **options):
    return LayerSpec(name, lambda: built.append(name) or nn.Linear(width, width), **options)


def modules():
    return [nn.Linear(WIDTH, WIDTH) for _ in range(4)]


def put_together(layers, rank, placement=LINE, slices=SLICES, **options):
    return assemble(layers, placement, slices, rank, device=CPU, **options)


@pytest.mark.feature("X28", "F7")
def test_only_the_layers_of_the_own_stages_are_built_and_know_their_places_in_the_model():
    built = []

    (stage,) = put_together(specs(built), 1).stages
    first, last = put_together(modules(), 0, Placement.vee(2), [range(n, n + 1) for n in range(4)]).stages

    assert built == list(stage.layers) == ["mid.0", "mid.1"]
    assert [name for name, _ in stage.named_parameters()] == [
        f"{layer}.{name}" for layer in built for name in ("weight", "bias")
    ]
    places = [(each.index, each.first_layer, list(each.layers)) for each in (first, stage, last)]
    assert places == [(0, 0, ["0"]), (1, 1, built), (3, 3, ["3"])]


@pytest.mark.parametrize("is_one_object", [False, True], ids=["by pairs", "by object"])
def test_every_rank_knows_the_group_and_holders_know_each_other(is_one_object):
    layers, tied = modules(), [("3.weight", "0.weight")]
    if is_one_object:
        layers[3].weight, tied = layers[0].weight, []

    assemblies = [put_together(layers, rank, tied=tied) for rank in range(3)]

    assert [assembly.tied_groups for assembly in assemblies] == [((0, 2),)] * 3
    assert [list(assembly.tied_copies) for assembly in assemblies] == [[0], [], [0]]
    copy = assemblies[2].tied_copies[0]
    assert (list(copy.ranks), list(copy.parameters)) == ([0, 2], ["3.weight"])
    assert copy.parameters["3.weight"] is layers[3].weight
    assert [set(assembly.owner_names) for assembly in assemblies] == [set(), set(), {"3.weight"}]


@pytest.mark.feature("X29")
def test_a_spec_says_what_it_is_tied_to():
    layers = specs(out={"tied": (("weight", "in.weight"), ("bias", "in.bias"))})

    assembly = put_together(layers, 2)

    assert assembly.tied_groups == ((0, 2), (0, 2))
    assert set(assembly.owner_names) == {"out.weight", "out.bias"}


def test_ranks_number_the_groups_alike_where_one_has_been_assembled_before():
    """Rank 1 makes 1.weight and 2.weight one object, which the other ranks cannot know in the next assembly."""
    tied = [("0.weight", "1.weight"), ("2.weight", "0.weight"), ("0.bias", "3.bias")]
    layers_of_rank = [modules() for _ in range(3)]

    first, second = ([put_together(layers_of_rank[rank], rank, tied=tied) for rank in range(3)] for _ in range(2))

    assert layers_of_rank[1][1].weight is layers_of_rank[1][2].weight
    assert [each.tied_groups for each in (*first, *second)] == [((0, 1), (0, 2))] * 6


def test_tied_parameters_of_one_rank_become_one_object():
    assembly = put_together(modules(), 1, tied=[("1.weight", "2.weight")])

    layers = assembly.stages[0].layers
    assert layers["1"].weight is layers["2"].weight
    assert assembly.tied_groups == ()
    assert assembly.tied_copies == {}
    assert set(assembly.owner_names) == {"2.weight"}


def test_a_rank_that_holds_a_parameter_twice_counts_once():
    placement = Placement.explicit([0, 1, 0])

    assembly = put_together(modules(), 0, placement, tied=[("0.weight", "3.weight"), ("0.weight", "1.weight")])

    assert assembly.tied_groups == ((0, 1),)
    assert list(assembly.tied_copies[0].ranks) == [0, 1]


@pytest.mark.parametrize(
    ("pair", "text"),
    [
        (("4.weight", "in.weight"), "no layer has that prefix"),
        (("out.wieght", "in.weight"), "'out.wieght' is tied but is no parameter"),
        (("out.inner.weight", "in.weight"), "'out.inner.weight' is tied but is no parameter"),
        (("out.training", "in.weight"), "'out.training' is tied but is no parameter"),
        (("mid.0.weight", "out.weight"), "'mid.0.weight' (3, 3) and 'out.weight' (6, 6)"),
    ],
)
def test_a_tie_to_nothing_or_to_another_shape_is_refused(pair, text):
    layers = specs(**{"mid.0": {"width": 3}})

    error = error_of(put_together, layers, 0, Placement.line(1), [range(4)], tied=[pair])

    assert_errors([error], PartitionError, text)


BOTH_WAYS = Placement.bidirectional(2)
HALVES = (range(0, 2), range(2, 4)) * 2


def both_ways(layers, rank, **options):
    return put_together(layers, rank, BOTH_WAYS, HALVES, **options)


def test_the_copies_of_a_stage_are_tied_as_a_whole():
    first, second = (both_ways(modules(), rank) for rank in range(2))

    assert first.tied_groups == second.tied_groups == ((0, 2), (1, 3))
    for index in range(2):
        mine, theirs = first.tied_copies[index], second.tied_copies[index]
        names = [f"{layer}.{name}" for layer in HALVES[index] for name in ("weight", "bias")]
        assert list(mine.parameters) == list(theirs.parameters) == names
        assert list(mine.ranks) == list(theirs.ranks) == [[0, 1], [1, 0]][index]
        assert len(mine.layers) == 2
    assert set(first.owner_names) == set(second.owner_names) == set()


def test_copies_of_a_stage_on_one_rank_are_one_module_and_need_no_exchange():
    built = []

    assembly = put_together(specs(built), 1, Placement.bidirectional(3), SLICES * 2)

    assert built == ["mid.0", "mid.1"]
    first, second = assembly.stages
    assert (first.index, second.index) == (1, 4)
    assert all(first.layers[name] is second.layers[name] for name in built)
    assert assembly.tied_groups == ((0, 3), (2, 5))
    assert assembly.tied_copies == {}


def test_the_second_copy_is_a_deep_copy_where_ranks_may_hold_the_very_same_modules():
    layers = modules()
    layers[3] = layers[2]

    first, second = both_ways(layers, 0, shares_modules=True).stages

    assert list(first.layers.values()) == layers[:2]
    assert second.layers["3"] is second.layers["2"] is not layers[2]  # copies go on sharing what they share
    assert torch.equal(second.layers["2"].weight, layers[2].weight)


def test_a_tied_parameter_and_its_copies_are_one_group():
    layers = specs(out={"tied": (("weight", "in.weight"),)})

    first, second = (both_ways(layers, rank) for rank in range(2))

    assert first.tied_groups == second.tied_groups == ((0, 2), (0, 2), (1, 3))
    assert [list(copy.parameters) for copy in first.tied_copies.values()] == [
        ["in.weight"], ["in.bias", "mid.0.weight", "mid.0.bias"], ["mid.1.weight", "mid.1.bias", "out.bias"],
    ]  # fmt: skip
    for assembly in (first, second):
        held = {name: layer for stage in assembly.stages for name, layer in stage.layers.items()}
        assert held["out"].weight is held["in"].weight
        assert set(assembly.owner_names) == {"out.weight"}


def test_a_tie_between_threads_is_two_copies_on_two_ranks_and_one_object_on_one():
    """Layer 0 of rank 0 shares its weight with layer 3 of rank 2, and layers 1 and 2 of rank 1 share theirs."""
    layers = modules()
    layers[3].weight, layers[2].weight = layers[0].weight, layers[1].weight

    first, middle, last = (put_together(layers, rank, shares_modules=True) for rank in range(3))

    assert first.stages[0].layers["0"] is layers[0]
    assert list(middle.stages[0].layers.values()) == layers[1:3]
    copied = last.stages[0].layers["3"]
    assert copied.weight is not layers[0].weight
    assert torch.equal(copied.weight, layers[0].weight)
    assert last.tied_copies[0].parameters["3.weight"] is copied.weight


def test_what_a_copied_module_shares_with_another_of_its_rank_is_one_object():
    """Layer 2 shares its weight with layer 0, on another rank, and its bias with layer 1, on its own."""
    layers = modules()
    layers[2].weight, layers[2].bias = layers[0].weight, layers[1].bias

    own = put_together(layers, 1, shares_modules=True).stages[0].layers

    assert own["2"] is not layers[2]
    assert own["2"].bias is own["1"].bias is layers[1].bias


def two_uses():
    """Hold one parameter under two names, the later one in the alphabet first."""
    second, first = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(2))
    first.weight = second.weight
    return Using(lambda self, x: self.first(torch.tanh(self.second(x))), second=second, first=first)


WRAPPED_TIES = {
    "checkpoint wrapper": (lambda: checkpoint_wrapper(nn.Linear(WIDTH, WIDTH, bias=False)), "3.weight"),
    "compiled": (lambda: torch.compile(nn.Linear(WIDTH, WIDTH, bias=False), backend="eager"), "3.weight"),
    "held twice": (two_uses, "3.first.weight"),
    "held twice, by the other name": (two_uses, "3.second.weight"),
}


@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zbv", marks=pytest.mark.slow), "dualpipe"])
@pytest.mark.parametrize("wrapped", WRAPPED_TIES)
def test_a_tie_reaches_every_use_within_a_layer(wrapped, schedule):
    make, name = WRAPPED_TIES[wrapped]

    def build():
        return [settle(layer.double(), seed) for seed, layer in enumerate([*modules()[:3], make()])]

    def tied_layers():
        layers = build()
        for holder in layers[3].modules():
            if type(holder) is nn.Linear:
                holder.weight = layers[0].weight
        return layers

    inputs, target = (values(seed, 8, WIDTH, dtype=torch.float64) for seed in (1, 2))
    task = Task(tied_layers, (inputs,), target)

    def case(wires):
        pipeline = Pipeline(build(), schedule, 4, square_loss, transport=wires, tied=[("0.weight", name)])
        outcome = step_task(pipeline, task)
        counted = [own for own, _ in pipeline.named_parameters() if own not in pipeline.copied_names]
        return outcome, counted

    (first, counted), (second, others) = on_ranks(2, case)
    _, expected = task.reference(4)
    for outcome in (first, second):
        for own, gradient in outcome.gradients.items():
            wanted = expected["0.weight"] if own.startswith("3.") else expected[own]
            torch.testing.assert_close(gradient, wanted, rtol=1e-12, atol=1e-12)
    assert set(counted + others) == {own for own in expected if not own.startswith("3.")}


def holding_a_result(layer):
    layer.cached = layer.weight.sum()  # torch copies no results of computations
    return layer


def hooked(layer):
    layer.weight.register_hook(lambda gradient: gradient / 2)
    return layer


@pytest.mark.parametrize(
    ("wrap", "text"),
    [
        (holding_a_result, r"layer '2' cannot be copied .* give a callable that builds the layer"),
        # It hands `__deepcopy__` on.
        (
            lambda layer: nn.Sequential(checkpoint_wrapper(weight_norm(layer))),
            r"layer '2' loses a CheckpointWrapper when it is copied, .* callable",
        ),
        (hooked, "layer '2' has parameters with hooks, which a copy would lose"),
    ],
    ids=["a result", "a wrapper", "hooks"],
)
def test_a_module_that_cannot_be_copied_whole_is_refused_and_else_used_in_place(wrap, text):
    layers = modules()
    layers[2] = wrap(layers[2])

    with pytest.raises(PartitionError, match=text):
        both_ways(layers, 0, shares_modules=True)
    first, second = both_ways(layers, 0).stages
    assert [*first.layers.values(), *second.layers.values()] == layers


@pytest.mark.parametrize(
    "wrap",
    [
        checkpoint_wrapper,
        lambda layer: checkpoint_wrapper(nn.Sequential(weight_norm(layer[0]))),
        torch.fx.symbolic_trace,
        lambda layer: torch.jit.trace(layer, torch.ones(1, WIDTH)),
        lambda layer: nn.ModuleList([layer, layer]),
    ],
    ids=["checkpointed", "parametrized", "traced by fx", "traced by jit", "twice"],
)
def test_layers_of_all_kinds_are_copied(wrap):
    layers = modules()
    layers[2] = nn.Sequential(wrap(nn.Sequential(layers[2])))

    copied = both_ways(layers, 0, shares_modules=True).stages[1].layers["2"]

    assert copied is not layers[2]
    assert [name for name, _ in copied.named_modules()] == [name for name, _ in layers[2].named_modules()]


def test_a_tie_that_would_lose_hooks_is_refused():
    layers = modules()
    hooked(layers[0])
    put_together(layers, 0, Placement.line(1), [range(4)], tied=[("0.weight", "2.weight")])
    hooked(layers[1])

    with pytest.raises(PartitionError, match=r"'1.weight' is tied to a parameter before .* hooks that would be lost"):
        put_together(layers, 0, Placement.line(2), HALVES[:2], tied=[("0.weight", "1.weight")])


@pytest.mark.parametrize("index", [0, 3])
def test_a_hook_that_would_see_a_part_of_a_gradient_is_refused_on_every_rank(index):
    def case(wires):
        layers = modules()
        hooked(layers[index])
        pipeline = Pipeline(layers, "1f1b", 2, square_loss, transport=wires, tied=[("0.weight", "3.weight")])
        return error_of(pipeline.step, values(1, 4, WIDTH), target=values(2, 4, WIDTH))

    errors = on_ranks(2, case)

    assert_errors(errors, StepRefused, f"'{index}.weight' is tied over ranks and has a hook")
    assert [error.rank for error in errors] == [index > 1] * 2


def holder(name):
    """Return a layer that holds a skip of this name."""
    return Using(lambda self, x: self.skip.put(x) or x, skip=Skip(name))


def test_every_stage_is_told_of_the_skips_that_go_past_it_though_others_hold_them():
    layers = [holder("a"), nn.Tanh(), nn.Tanh(), holder("a")]

    def case(wires):
        assembly = with_skips(put_together(layers, wires.rank), SLICES, {0: ["a"], 1: [], 2: [], 3: ["a"]})
        [stage] = assembly.stages
        if stage.index == 2:
            return assembly.skips[2]
        x = torch.ones(1)
        one = OneStage(stage, features=[lambda step, place: SkipPart(assembly.skips[stage.index])])
        return one.forward(x if stage.index == 0 else (x, {"a": x}))[0]

    first, middle, last = on_ranks(3, case)

    assert list(first[1]) == list(middle[1]) == ["a"]
    assert torch.equal(middle[1]["a"], torch.ones(1))
    assert last is not None
