"""A `Stage` is what its file makes of it: nothing outside assigns to one, so all programs see the same stage."""

import ast

import pytest

from tests.house.source import all_nodes, assert_none, classes, modules, nodes, parse

HOME = "penstock.execute.stages.stage"


def own_attributes():
    """Name all that a `Stage` sets on itself."""
    (home,) = (module for module in modules() if module.name == HOME)
    (stage,) = (each for each in classes(home) if each.name == "Stage")
    return {attribute.attr for attribute in assigned(ast.walk(stage)) if ast.unparse(attribute.value) == "self"}


def assigned(tree_nodes):
    return [n for n in tree_nodes if isinstance(n, ast.Attribute) and isinstance(n.ctx, (ast.Store, ast.Del))]


def last_name(expression):
    return ast.unparse(expression).rpartition(".")[2]


def names_of_stages(module):
    """Name what holds a stage: `stage`, `_stage`, and what loops over stages call one."""
    return {"stage", "_stage"} | {
        each.target.id
        for each in nodes(module, ast.For, ast.comprehension)
        if isinstance(each.target, ast.Name) and last_name(each.iter).endswith("stages")
    }


def assignments_to_stages(module, own):
    """Find attributes that are set on a stage; in execute/, also those of its names on whatever is not `self`."""
    names = names_of_stages(module)

    def is_stage(owner):
        if isinstance(owner, ast.Subscript):
            return last_name(owner.value).endswith("stages")
        return last_name(owner) in names

    is_near = module.name.startswith("penstock.execute.")

    def is_of_stage(target):
        return is_stage(target.value) or (is_near and target.attr in own and ast.unparse(target.value) != "self")

    found = list(filter(is_of_stage, assigned(all_nodes(module))))
    calls = [call for call in nodes(module, ast.Call) if call.args and ast.unparse(call.func) == "setattr"]
    found += [call for call in calls if is_stage(call.args[0])]
    return [f"{module.at(node)}: {ast.unparse(node)}" for node in found if module.name != HOME]


def test_nothing_outside_of_its_file_assigns_to_a_stage():
    own = own_attributes()

    assert own >= {"index", "layers", "split_planner"}
    assert_none([line for module in modules() for line in assignments_to_stages(module, own)])


@pytest.mark.parametrize(
    "text",
    [
        "stage.is_split = True",
        "self.stage.passes = None",
        "self._stage.num_steps += 1",
        "del stage.split_planner",
        "stages[0].options: int = 1",
        "for each in assembly.stages:\n    each.is_training = True",
        "setattr(stage, 'device', 1)",
        "each.own_weight_gradients = None",
    ],
)
def test_an_assignment_to_a_stage_is_found(text):
    assert len(assignments_to_stages(parse(text, "penstock.execute.example"), own_attributes())) == 1


def test_a_stage_may_be_made_and_read():
    text = "self.index = stage.index\nstage = Stage(0, layers)\nstages[0] = stage"

    assert assignments_to_stages(parse(text, "penstock.execute.example"), own_attributes()) == []
