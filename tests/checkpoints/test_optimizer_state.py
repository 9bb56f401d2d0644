"""The state of optimizers by the names of parameters."""

import pytest
import torch
from torch import nn

from penstock.checkpoints.manifest import GroupEntry, OptimizerEntry, ParameterState, TensorEntry
from penstock.checkpoints.optimizer_state import (
    load_optimizer,
    merged_groups,
    optimizer_content,
    require_loadable,
)
from penstock.errors import CheckpointError


def parameters(dtype=torch.float32):
    return {name: nn.Parameter(torch.full((2,), number, dtype=dtype)) for number, name in enumerate(("a", "b", "c"), 1)}


def names_of(given):
    return {id(parameter): name for name, parameter in given.items()}


def stepped(make, given, num_steps=3):
    optimizer = make(list(given.values()))
    for step in range(num_steps):
        for parameter in given.values():
            parameter.grad = torch.full_like(parameter, step + 1.0)
        optimizer.step()
    return optimizer


def entry_of(content):
    """What a manifest says of one rank's optimizer."""
    state = {
        name: ParameterState(
            tensors={key: TensorEntry(dtype="F32", shape=list(value.shape), file="f") for key, value in kept.items()},
            values=content.values[name],
        )
        for name, kept in content.tensors.items()
    }
    return OptimizerEntry(name=content.name, groups=content.groups, state=state)


OPTIMIZERS = {
    "AdamW": lambda given: torch.optim.AdamW(given, lr=0.1, betas=(0.8, 0.9)),
    "AMSGrad": lambda given: torch.optim.Adam(given, lr=0.1, amsgrad=True),
    "SGD": lambda given: torch.optim.SGD(given, lr=0.1, momentum=0.9),
    "SGD without momentum": lambda given: torch.optim.SGD(given, lr=0.1),
    "NAdam": lambda given: torch.optim.NAdam(given, lr=0.1),
    "ASGD": lambda given: torch.optim.ASGD(given, lr=0.1),
    "RMSprop": lambda given: torch.optim.RMSprop(given, lr=0.1, momentum=0.5),
    "Adafactor": lambda given: torch.optim.Adafactor(given, lr=0.1),
    "groups": lambda given: torch.optim.AdamW([{"params": given[:1], "weight_decay": 0.5}, {"params": given[1:]}]),
    "a rate that is a tensor": lambda given: torch.optim.AdamW(given, lr=torch.tensor(0.1), foreach=False),
}


@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_the_next_step_is_the_same_with_parameters_in_another_order(make):
    given = parameters()
    optimizer = stepped(make, given)
    content = optimizer_content(optimizer, names_of(given))
    entry, kept = (
        entry_of(content),
        {name: {k: v.clone() for k, v in own.items()} for name, own in content.tensors.items()},
    )
    moved = {name: nn.Parameter(parameter.detach().clone()) for name, parameter in given.items()}
    other = make(list(moved.values()))

    require_loadable(other, entry, names_of(moved), "here")
    load_optimizer(other, entry, kept, names_of(moved))

    for each, those in ((optimizer, given), (other, moved)):
        for parameter in those.values():
            parameter.grad = torch.full_like(parameter, -0.5)
        each.step()
    assert all(torch.equal(given[name], moved[name]) for name in given)


def test_a_part_of_the_parameters_takes_its_part():
    given = parameters()
    optimizer = stepped(OPTIMIZERS["AdamW"], given)
    content = optimizer_content(optimizer, names_of(given))
    part = {"c": nn.Parameter(given["c"].detach().clone())}
    other = torch.optim.AdamW(part.values(), lr=9.0, foreach=True)

    load_optimizer(other, entry_of(content), {"c": content.tensors["c"]}, names_of(part))

    assert torch.equal(other.state[part["c"]]["exp_avg"], optimizer.state[given["c"]]["exp_avg"])
    group = other.param_groups[0]
    assert (group["lr"], group["betas"], group["foreach"]) == (0.1, (0.8, 0.9), True)


def test_state_in_a_wider_type_than_the_parameter_keeps_its_bits():
    given = parameters(torch.bfloat16)
    optimizer = torch.optim.SGD(given.values(), lr=0.1)
    third = torch.full((2,), 1 / 3)
    entry = OptimizerEntry(
        name="SGD",
        groups=[GroupEntry(options={"lr": 0.1}, parameters=["a", "b", "c"])],
        state={"a": ParameterState(tensors={"main": TensorEntry(dtype="F32", shape=[2], file="f")}, values={})},
    )

    load_optimizer(optimizer, entry, {"a": {"main": third}}, names_of(given))

    assert torch.equal(optimizer.state[given["a"]]["main"], third)


def test_groups_of_equal_options_on_several_ranks_are_one():
    group = {"options": {"lr": 1.0}, "parameters": ["a", "copy"]}
    other = {"options": {"lr": 2.0}, "parameters": ["c"]}
    again = {"options": {"lr": 1.0}, "parameters": ["copy", "d"]}

    merged = merged_groups([[group, other], [again]], [frozenset("ac"), frozenset({"copy", "d"})])

    assert [(each.options["lr"], each.parameters) for each in merged] == [(1.0, ["a", "copy", "d"]), (2.0, ["c"])]


def saved(**changes):
    moment = {"dtype": "F32", "shape": [2], "file": "f"}
    state = {name: {"tensors": {"m": moment, "v": moment}, "values": {}} for name in "abc"}
    groups = [{"options": {}, "parameters": ["a", "b", "c"]}]
    return OptimizerEntry.model_validate({"name": "SGD", "groups": groups, "state": state} | changes)


def test_what_an_optimizer_needs_is_looked_for_before_anything_changes():
    given = parameters()
    optimizer = torch.optim.SGD(given.values())
    dropped = saved()
    del dropped.state["b"].tensors["v"]
    groups = [{"options": {"lr": 0.1 * len(names)}, "parameters": list(names)} for names in ("ab", "c")]
    cases = {
        "here: was saved without an optimizer": None,
        "here: holds the state of Adam, but the optimizer is SGD": saved(name="Adam"),
        "here: SGD held no parameter 'c'": saved(groups=[{"options": {}, "parameters": ["a", "b"]}]),
        "here: the optimizer's state of 'b' lacks v, which others have": dropped,
        "here: 'a' and another parameter of its group had different options": saved(groups=groups),
    }

    require_loadable(optimizer, saved(), names_of(given), "here")
    for words, entry in cases.items():
        with pytest.raises(CheckpointError, match=words):
            require_loadable(optimizer, entry, names_of(given), "here")


@pytest.mark.parametrize("has_main_weight", [False, True])
def test_a_parameter_that_was_never_stepped_has_no_state_or_its_main_weight_alone(has_main_weight):
    entry = saved()
    for state in entry.state.values():
        state.tensors |= {"main_weight": state.tensors["m"]} if has_main_weight else {}
    entry.state["b"].tensors = {"main_weight": entry.state["b"].tensors["m"]} if has_main_weight else {}

    require_loadable(torch.optim.SGD((given := parameters()).values()), entry, names_of(given), "here")


def test_matrices_and_vectors_of_a_group_may_keep_other_tensors():
    given = {"matrix": nn.Parameter(torch.ones(3, 4)), "vector": nn.Parameter(torch.ones(3))}
    optimizer = torch.optim.Adafactor(given.values())
    for parameter in given.values():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    found = optimizer_content(optimizer, names_of(given))
    moment = {"dtype": "F32", "shape": [1], "file": "f"}
    state = {name: {"tensors": dict.fromkeys(own, moment), "values": {}} for name, own in found.tensors.items()}
    entry = OptimizerEntry.model_validate({"name": found.name, "groups": found.groups, "state": state})

    assert entry.state["matrix"].tensors.keys() != entry.state["vector"].tensors.keys()
    require_loadable(optimizer, entry, names_of(given), "here")


def test_an_optimizer_within_another_is_named_with_it():
    class Outer(torch.optim.SGD):
        def __init__(self, given, inner):
            super().__init__(given)
            self.inner = inner(given)

    given = parameters()
    own = Outer(list(given.values()), torch.optim.AdamW)

    assert optimizer_content(own, names_of(given)).name == "Outer(AdamW)"
    for name in ("Outer(AdamW)", "Outer"):  # the latter in files of earlier versions
        require_loadable(own, saved(name=name), names_of(given), "here")
    with pytest.raises(CheckpointError, match=r"state of Outer\(SGD\), but the optimizer is Outer\(AdamW\)"):
        require_loadable(own, saved(name="Outer(SGD)"), names_of(given), "here")


def test_state_of_no_parameter_cannot_be_saved():
    given = parameters()
    optimizer = torch.optim.SGD(given.values())
    optimizer.state["all"] = {"steps": 3}

    with pytest.raises(CheckpointError, match="SGD keeps state of 'all', which is no parameter, and is not saved"):
        optimizer_content(optimizer, names_of(given))


@pytest.mark.parametrize(
    ("more", "options", "told"),
    [
        ([nn.Parameter(torch.ones(5))], {}, r"a parameter of shape \(5,\) that is none of the pipeline's"),
        ([], {"hook": print}, "hook: builtin_function_or_method of the optimizer cannot be saved"),
    ],
)
def test_what_can_not_be_saved_is_named(more, options, told):
    given = parameters()
    optimizer = torch.optim.SGD([{"params": [*given.values(), *more], **options}])

    with pytest.raises(CheckpointError, match=told):
        optimizer_content(optimizer, names_of(given))
