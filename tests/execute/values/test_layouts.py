"""Layouts travel without pickle and hold every message to them; scalars keep their bits and may change."""

import json
import math
import sys
import warnings
from collections import UserDict, defaultdict, namedtuple
from dataclasses import dataclass, replace
from types import ModuleType

import pytest
import torch
from hypothesis import given

from penstock.errors import PipelineError
from penstock.execute.values.layouts import Layout, TensorInfo, decode_layout, encode_layout, is_alike
from penstock.execute.values.tree import flatten
from tests.execute.values.test_tree import CONTAINERS, Point, State


class Scaled(torch.Tensor):
    """A tensor that another rank would take for a plain one."""


with warnings.catch_warnings(action="ignore"):
    QUANTIZED = torch.quantize_per_tensor(torch.eye(2), 0.1, 0, torch.qint8)
INFO = TensorInfo((2, 3), torch.float32, requires_grad=False)
Late = namedtuple("Renamed", ["x"])  # found under no module-level name: Renamed


@given(CONTAINERS)
def test_a_layout_survives_the_journey(value):
    layout = decode_layout(encode_layout(value))

    assert layout.spec == flatten(value)[1]
    assert repr(layout.fill([])) == repr(value)
    assert encode_layout(layout.fill([])) == encode_layout(value)


def test_a_layout_holds_what_the_receiver_needs_to_rebuild_the_tree():
    sent = Point({"h": torch.ones(2, 0, dtype=torch.bfloat16, requires_grad=True), 7: 2.5}, [torch.ones(3) > 0, "x"])

    layout = decode_layout(encode_layout(sent))
    buffers = [torch.zeros(info.shape, dtype=info.dtype) for info in layout.tensors]
    received = layout.fill(buffers)

    assert layout.tensors == (TensorInfo((2, 0), torch.bfloat16, True), TensorInfo((3,), torch.bool, False))
    assert isinstance(received, Point)
    assert received.x["h"] is buffers[0]
    assert received.x[7] == 2.5
    assert received.y == [buffers[1], "x"]
    with pytest.raises(PipelineError, match="got 0 tensors, expected 2"):
        layout.fill([])
    for number in (float("nan"), float("inf"), 0.1, -0.0, 1e-320, 2**200, True, 1):
        assert repr(decode_layout(encode_layout(number)).fill([])) == repr(number)


def test_a_layout_tells_how_dimensions_lie_in_memory_and_is_equal_where_they_do_not():
    pictures = torch.ones(2, 3, 4, 5)
    last = pictures.to(memory_format=torch.channels_last)

    (info,) = decode_layout(encode_layout(last)).tensors

    assert info.order == (0, 2, 3, 1)
    assert info == TensorInfo.of(pictures)
    assert TensorInfo.of(pictures).order == ()


def test_layouts_differ_where_anything_differs():
    trees = [1, 1.0, True, "1", [1], (1,), {"a": 1}, None, Point(1), State(1), torch.ones(1), torch.ones(1, 1)]
    trees += [torch.ones(1).double(), torch.ones(1, requires_grad=True)]

    assert len({encode_layout(tree) for tree in trees}) == len(trees)


@pytest.mark.parametrize(
    ("leaf", "message"),
    [
        (torch.Size([1]), r"value\['a'\]\[0\] is a torch.Size.*Take it apart"),
        (torch.eye(2).to_sparse(), r"value\['a'\]\[0\] is a tensor of layout torch.sparse_coo"),
        (torch.eye(2).as_subclass(Scaled), r"is a tests.execute.values.test_layouts.Scaled, a subclass of tensors"),
        (QUANTIZED, r"value\['a'\]\[0\] is a quantized tensor of type qint8"),
        (b"bytes", "builtins.bytes"),
        (UserDict(x=torch.ones(1)), "a part of the output is a collections.UserDict.*Take it apart"),
        (defaultdict(list, x=torch.ones(1)), "a part of the output is a collections.defaultdict"),
    ],
)
def test_a_leaf_that_cannot_travel_is_an_error_naming_its_type(leaf, message):
    with pytest.raises(PipelineError, match=message):
        encode_layout({"a": [leaf]})


def test_a_class_that_no_peer_could_find_is_an_error():
    @dataclass
    class Hidden:
        x: int

    for value in (Hidden(1), Late(1)):
        with pytest.raises(PipelineError, match="cannot be found by its name"):
            encode_layout(value)


def message(tree, leaves):
    return json.dumps({"tree": tree, "leaves": leaves}).encode()


@pytest.mark.parametrize("path", ["os:system", "builtins:int", "this:Class", f"{__name__}:missing", "x"])
def test_only_imported_dataclasses_and_named_tuples_are_looked_up(path):
    with pytest.raises(PipelineError, match=r"no dataclass or named tuple"):
        decode_layout(message([path, ["x"], ["*"]], [1]))

    assert "this" not in sys.modules


def test_looking_a_class_up_runs_no_code(monkeypatch):
    lazy = ModuleType("lazy")
    lazy.__getattr__ = lambda name: pytest.fail(f"the module was asked for {name}")
    monkeypatch.setitem(sys.modules, "lazy", lazy)

    with pytest.raises(PipelineError, match="lazy:Point"):
        decode_layout(message(["lazy:Point", ["x", "y"], ["*", "*"]], [1, 2]))


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[]",
        b"{}",
        message("+", [1]),
        message("*", []),
        message("*", [1, 2]),
        message(["tuple", [1], ["*"]], [1]),
        message(["dict", ["a", "a"], ["*", "*"]], [1, 2]),
        message(["dict", [True], ["*"]], [1]),
        message(["list", [0], []], []),
        message([f"{Point.__module__}:Point", ["x"], ["*"]], [1]),
        message("*", [[[2], "no_such_dtype", True]]),
        message("*", [[[2], "ones", True]]),
        message("*", [[[-1], "float32", True]]),
        message("*", [[[True], "float32", True]]),
        message("*", [{"float": "x"}]),
        message("*", [1.5]),
        b'{"tree":' + b"[" * 100_000,
    ],
)
def test_damaged_layouts_are_one_kind_of_error(data):
    with pytest.raises(PipelineError, match="run the same version"):
        decode_layout(data)


# ---- scalars


def layout_of(*leaves):
    return Layout(flatten(tuple(range(len(leaves))))[1], tuple(leaves))


def test_numbers_come_back_with_their_types_and_everything_else_as_agreed():
    agreed = layout_of(True, INFO, 7, "text", 0.5, 2**63, 1.0, 1.0)
    leaves = [False, torch.zeros(2, 3), -(2**63), "text", math.nan, 2**63, -0.0, 5e-324]

    written = agreed.written_numbers(leaves)
    found = agreed.with_numbers(written).leaves

    assert written.numel() == agreed.bytes_of_numbers
    assert found[:4] == (False, INFO, -(2**63), "text")
    assert math.isnan(found[4])
    assert [repr(leaf) for leaf in found[5:]] == [repr(2**63), "-0.0", "5e-324"]
    assert [type(leaf) for leaf in found[:5]] == [bool, TensorInfo, int, str, float]


@pytest.mark.parametrize(
    ("leaf", "agreed", "is_right"),
    [
        (2, 1, True),
        (math.nan, 0.5, True),
        (math.nan, math.nan, True),
        (False, True, True),
        (1, True, False),
        (1.0, 1, False),
        (2**63, 1, False),
        (2**63, 2**63, True),
        (2**63, 2**64, False),
        ("a", "a", True),
        ("b", "a", False),
        (INFO, INFO, True),
        (replace(INFO, requires_grad=True), INFO, False),
        (1, INFO, False),
        (INFO, 1, False),
        (INFO, "a", False),
        (object(), object(), True),
        ([], object(), False),
    ],
)
def test_numbers_may_change_and_keep_their_types_and_all_else_stays(leaf, agreed, is_right):
    assert is_alike(layout_of(leaf), layout_of(agreed)) is is_right
    assert not is_alike(layout_of(leaf, leaf), layout_of(leaf))
