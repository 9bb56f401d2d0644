"""Functions that a forward may call are found by their bytecode."""

import functools

from torch import nn

from penstock.models.cutting.reached_code import ReachedCode, cell_value, codes_of, is_foreign

numbers = []


def deeper():
    return numbers


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args):
        return function(*args)

    return wrapper


@decorated
def helper(value):
    return [deeper() for _ in range(2)], value


def unrelated(): ...


class Record:
    def __len__(self):
        return 0

    def named(self): ...

    def unnamed(self): ...


class Model(nn.Module):
    def forward(self, rows):
        self.own = 1
        self.counted += 1
        helper.calls = 2
        global numbers
        numbers = []
        return self.masked(helper(rows)), Record().named

    def masked(self, rows):
        return nn.functional.relu(rows)

    def unused(self):
        return unrelated()


def hook(module, args): ...


def names_of(code):
    return {function.__name__ for function in code.functions}


def test_functions_are_followed_through_methods_decorators_helpers_and_hooks():
    code = ReachedCode([Model()], [hook])
    assert names_of(code) >= {"forward", "masked", "helper", "deeper", "named", "__len__", "hook"}
    assert [function.__name__ for function in code.functions].count("helper") == 2, "itself and its wrapper"
    assert not names_of(code) & {"unused", "unrelated", "unnamed", "relu"}
    assert set(code.classes) == {Model, Record}


def test_names_that_functions_set_are_those_of_other_objects_than_self():
    assert ReachedCode([Model()]).stored_names == {"calls", "numbers"}


def test_a_forward_of_the_object_is_followed_too():
    model = Model()
    model.forward = unrelated
    assert "unrelated" in names_of(ReachedCode([model]))


def test_code_within_functions_is_theirs():
    def outer():
        return lambda: numbers

    assert len(list(codes_of(outer))) == 2


def test_a_variable_of_an_outer_function_has_no_value_before_it_is_set():
    def inner():
        return late

    (cell,) = inner.__closure__
    assert cell_value(cell) is None
    late = 3
    assert cell_value(cell) == 3


def test_torch_and_python_are_foreign():
    assert is_foreign("torch.nn.functional")
    assert is_foreign("functools")
    assert not is_foreign("transformers.models")
