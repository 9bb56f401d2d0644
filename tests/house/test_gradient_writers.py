"""One file writes the gradients of parameters."""

import ast

import pytest

from tests.house.source import modules, nodes, parse

OWNER = "penstock.execute.parameters.gradient_store"
# Other files that write a `.grad` or `.main_grad`, each with the reason.
EXCEPTIONS = {
    "penstock.execute.stages.passes": "leaves of a stage's inputs: their gradients go to the stage before",
    "penstock.execute.losses.grad_scaler": "a probe that stands in for the gradients of a rank that has none",
    "penstock.execute.stages.other_layers": "parameters of other ranks, freed: they are on no device",
    "penstock.models.cutting.course": "attributes that a model's own forward sets on its submodules",
    "penstock.moving.own_backward": "modules with a backward of their own add their gradients by themselves",
    "penstock.sizing.walk": "gradients without values, beside parameters without values",
    "penstock.train.optimizing.main_weights": "main weights are parameters of an optimizer of their own",
}
ATTRIBUTES = {"grad", "main_grad"}
CONSTANTS = {"MAIN_GRAD", "attribute", "gradient_attribute", "ATTRIBUTE"}


def targets(node):
    """List what a statement assigns to or deletes."""
    found = getattr(node, "targets", None) or ([node.target] if hasattr(node, "target") else [])
    return [each for target in found for each in (target.elts if isinstance(target, ast.Tuple) else [target])]


def names_gradient(argument):
    """Whether the second argument of setattr or delattr is, or may be, the name of a gradient."""
    text = ast.unparse(argument)
    is_text = isinstance(argument, ast.Constant)
    return argument.value in ATTRIBUTES if is_text else text.split(".")[-1] in CONSTANTS


def writes(module):
    """List the places where a file writes a gradient of some tensor."""
    found = []
    for node in nodes(module, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Delete):
        if any(isinstance(target, ast.Attribute) and target.attr in ATTRIBUTES for target in targets(node)):
            found.append(module.at(node))
    for node in nodes(module, ast.Call):
        if ast.unparse(node.func) in ("setattr", "delattr"):
            found += [module.at(node)] * names_gradient(node.args[1])
    return found


def test_the_store_is_the_only_writer_of_gradients_and_every_exception_is_still_needed():
    places_by_module = {module.name: places for module in modules() if (places := writes(module))}

    assert places_by_module.pop(OWNER)
    assert {name: places for name, places in places_by_module.items() if name not in EXCEPTIONS} == {}
    assert EXCEPTIONS.keys() <= places_by_module.keys()


@pytest.mark.parametrize(
    ("text", "num_found"),
    [
        ("parameter.grad = None", 1),
        ("gradient, leaf.grad = leaf.grad, None", 1),
        ("parameter.main_grad += gradient", 1),
        ("del parameter.grad", 1),
        ("setattr(parameter, self.attribute, None)", 1),
        ("setattr(parameter, 'grad', None)", 1),
        ("gradient = parameter.grad", 0),
        ("setattr(module, name, parameter)", 0),
        ("parameter.grad.mul_(2)", 0),
    ],
)
def test_a_writer_is_found(text, num_found):
    assert len(writes(parse(text, "penstock.example"))) == num_found
